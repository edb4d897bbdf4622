"""Megatron's MLP: shapes, parameter counts, fusion, scales, specs."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused
from fused.mlp import MLP, Linear, MLPSubmodules, TransformerConfig, column_parallel_linear, row_parallel_linear
from fused.mlp.activation import activation_name

Tensor = torch.Tensor
H, FFN = 12, 48


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


tanh_gelu = functools.partial(F.gelu, approximate="tanh")

ACTIVATIONS = {
    "gelu": F.gelu,
    "tanh_gelu": tanh_gelu,
    "new_gelu": fused.new_gelu,
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": fused.quick_gelu,
    "module": nn.GELU("tanh"),
    "own": squared_relu,
}


def config(**settings) -> TransformerConfig:
    return TransformerConfig(hidden_size=H, ffn_hidden_size=FFN, **settings)


def filled(mlp: MLP) -> MLP:
    """Numbers large enough to tell activations apart, biases too."""
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.7)
    return mlp


def expected(mlp: MLP, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """The MLP written out, its second bias added."""
    settings = mlp.settings
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    z = F.linear(x, fc1.weight, fc1.bias)
    if settings.gated_linear_unit:
        gate, up = z.chunk(2, -1)
        if (c := settings.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=c), up.clamp(-c, c)
        z = settings.activation_func(gate) * (up + settings.glu_linear_offset)
    else:
        z = settings.activation_func(z)
    if scale is None:
        return F.linear(z, fc2.weight, fc2.bias)
    out = F.linear(z * scale.unsqueeze(-1), fc2.weight)
    return out if fc2.bias is None else out + fc2.bias * scale.unsqueeze(-1)


@pytest.mark.parametrize(
    ("gated", "bias", "count"), [(False, True, 1212), (False, False, 1152), (True, True, 1836), (True, False, 1728)]
)
def test_parameter_counts(gated, bias, count):
    mlp = MLP(config(gated_linear_unit=gated, add_bias_linear=bias))
    assert sum(p.numel() for p in mlp.parameters()) == count
    assert isinstance(mlp.linear_fc1, nn.Module) and isinstance(mlp.linear_fc2, nn.Module)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("fusion", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_path_is_the_mlp_written_out(name, gated, bias, fusion, scaled):
    mlp = filled(
        MLP(
            config(
                activation_func=ACTIVATIONS[name],
                gated_linear_unit=gated,
                add_bias_linear=bias,
                bias_activation_fusion=fusion,
                params_dtype=torch.float64,
            )
        )
    )
    x = torch.randn(5, 2, H, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(5, 2, dtype=torch.float64, requires_grad=True) if scaled else None
    out, out_bias = mlp(x, scale)
    assert (out_bias is None) == (not bias or scaled)
    assert out_bias is None or out_bias is mlp.linear_fc2.bias
    whole = out if out_bias is None else out + out_bias
    exact = expected(mlp, x, scale)
    torch.testing.assert_close(whole, exact, rtol=1e-12, atol=1e-12)
    wanted = [x, *mlp.parameters(), *([scale] if scaled else [])]
    g = torch.randn_like(out)
    mine, theirs = (torch.autograd.grad(result, wanted, g) for result in (whole, exact))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("function", [F.silu, fused.quick_gelu, F.gelu])
def test_clamp_and_offset(function, fusion):
    mlp = filled(
        MLP(
            config(
                activation_func=function,
                gated_linear_unit=True,
                bias_activation_fusion=fusion,
                activation_func_clamp_value=0.5,
                glu_linear_offset=1.0,
            )
        )
    )
    x, scale = torch.randn(5, 2, H), torch.rand(5, 2)
    out, bias = mlp(x)
    torch.testing.assert_close(out + bias, expected(mlp, x))
    torch.testing.assert_close(mlp(x, scale)[0], expected(mlp, x, scale))


@pytest.mark.parametrize(
    ("function", "gated", "saved"),
    # The input, the two weights, fc1's output and bias, and what the second layer reads.
    [(F.gelu, False, 2 * FFN), (F.silu, True, 3 * FFN)],
)
def test_fusing_saves_no_more_than_the_inputs_of_the_layers_and_of_the_activation(function, gated, saved, saved_bytes):
    mlp = MLP(config(activation_func=function, gated_linear_unit=gated))
    tokens = 64
    x = torch.randn(tokens, 1, H)
    fixed = sum(p.numel() for p in mlp.parameters()) - H + x.numel()
    assert saved_bytes(lambda: mlp(x)[0]) <= 4 * (fixed + tokens * saved)
    plain = MLP(config(activation_func=function, gated_linear_unit=gated, bias_activation_fusion=False))
    assert not gated or saved_bytes(lambda: plain(x)[0]) > 4 * (fixed + tokens * saved)


def test_the_scaled_bias_is_added_out_of_place():
    class Second(Linear):
        def forward(self, x):
            self.returned = super().forward(x)
            self.before = self.returned[0].clone()
            return self.returned

    def second(*sizes, config, init_method, bias, skip_bias_add, **_):
        return Second(*sizes, init_method=init_method, bias=bias, skip_bias_add=skip_bias_add)

    mlp = filled(MLP(config(), MLPSubmodules(column_parallel_linear, second)))
    mlp(torch.randn(3, 2, H), torch.rand(3, 2))
    assert torch.equal(mlp.linear_fc2.returned[0], mlp.linear_fc2.before)


def test_16_bit_numbers_with_a_float32_scale_stay_16_bit():
    mlp = filled(MLP(config(params_dtype=torch.bfloat16, gated_linear_unit=True, activation_func=F.silu)))
    out, bias = mlp(torch.randn(3, 2, H).bfloat16(), torch.rand(3, 2))
    assert out.dtype == torch.bfloat16 and bias is None


def test_sizes_follow_the_arguments():
    mlp = MLP(config(gated_linear_unit=True), input_size=7, ffn_hidden_size=20, is_expert=True)
    assert mlp.linear_fc1.weight.shape == (40, 7) and mlp.linear_fc2.weight.shape == (H, 20)
    assert mlp(torch.randn(3, 2, 7))[0].shape == (3, 2, H)
    assert MLP(TransformerConfig(hidden_size=5)).linear_fc1.weight.shape == (20, 5)


def test_any_object_with_the_attributes_is_a_config():
    given = SimpleNamespace(hidden_size=H, ffn_hidden_size=FFN, add_bias_linear=False, activation_func=F.silu)
    mlp = MLP(given)
    assert mlp.config is given and mlp.linear_fc1.bias is None
    x = torch.randn(3, 2, H)
    torch.testing.assert_close(mlp(x)[0], expected(mlp, x))
    with pytest.raises(TypeError, match="needs an attribute hidden_size, SimpleNamespace has none"):
        MLP(SimpleNamespace(hidden=H))


def test_weights_begin_as_the_config_says():
    torch.manual_seed(0)
    mlp = MLP(TransformerConfig(hidden_size=256, num_layers=8, init_method_std=0.1))
    assert abs(mlp.linear_fc1.weight.std() - 0.1) < 0.002 and abs(mlp.linear_fc2.weight.std() - 0.025) < 0.001
    assert not mlp.linear_fc1.bias.any() and not mlp.linear_fc2.bias.any()
    ones = MLP(config(init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_))
    assert (ones.linear_fc1.weight == 1).all() and (ones.linear_fc2.weight == 0).all()


def test_parts_are_built_with_megatrons_arguments():
    seen = {}

    def spy(name, build):
        def builder(*sizes, **settings):
            seen[name] = (sizes, settings)
            return build(*sizes, **settings)

        return builder

    parts = MLPSubmodules(spy("fc1", column_parallel_linear), spy("fc2", row_parallel_linear))
    given, group = config(gated_linear_unit=True), SimpleNamespace(size=lambda: 1)
    MLP(given, parts, is_expert=True, ffn_hidden_size=20, tp_group=group)
    common = {"config": given, "bias": True, "skip_bias_add": True, "is_expert": True, "tp_group": group}
    for name, sizes, own in (
        ("fc1", (H, 40), {"gather_output": False, "tp_comm_buffer_name": "fc1", "stride": 2}),
        ("fc2", (20, H), {"input_is_parallel": True, "tp_comm_buffer_name": "fc2"}),
    ):
        assert seen[name][0] == sizes
        settings = dict(seen[name][1])
        assert callable(settings.pop("init_method"))
        assert settings == {**common, **own}


def test_built_as_by_megatrons_transformer_layer():
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    given, call = config(), {"is_mtp_layer": False, "is_expert": False, "input_size": 6, "ffn_hidden_size": 20}
    mlp = MLP.as_mlp_submodule(MLPSubmodules(), config=given, pg_collection=groups, name="layer.mlp", **call)
    assert mlp.linear_fc1.weight.shape == (20, 6) and mlp.linear_fc2.weight.shape == (H, 20)
    split = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    torch.manual_seed(0)
    whole = MLP.as_mlp_submodule(config=given, pg_collection=groups)
    torch.manual_seed(0)
    own = MLP.as_mlp_submodule(config=given, pg_collection=split)
    assert torch.equal(own.linear_fc1.weight, whole.linear_fc1.weight.chunk(2, 0)[1])


def test_an_activation_of_ones_own_does_the_gating_too():
    class Activation:
        def __init__(self, config):
            self.config = config

        def forward(self, z):
            gate, up = z.chunk(2, -1)
            return torch.tanh(gate) * up

    parts = MLPSubmodules(activation_func=lambda *, config: Activation(config))
    mlp = filled(MLP(config(gated_linear_unit=True, use_te_activation_func=True, activation_func=torch.tanh), parts))
    x, scale = torch.randn(3, 2, H), torch.rand(3, 2)
    out, bias = mlp(x)
    torch.testing.assert_close(out + bias, expected(mlp, x))
    torch.testing.assert_close(mlp(x, scale)[0], expected(mlp, x, scale))


def test_an_activation_of_ones_own_is_used_if_the_config_says_so():
    """Megatron's experts are given one either way, and Megatron's subclasses call what the MLP has."""
    parts = MLPSubmodules(activation_func=lambda *, config: torch.tanh)
    assert MLP(config(use_te_activation_func=True), parts).activation_func is torch.tanh
    mlp, x = filled(MLP(config(activation_func=F.silu), parts)), torch.randn(3, 2, H)
    assert mlp.activation_func is F.silu
    torch.testing.assert_close(mlp(x)[0] + mlp.linear_fc2.bias, expected(mlp, x))


def test_the_two_gelus_are_told_apart():
    forms = [F.gelu, tanh_gelu, nn.GELU("tanh"), nn.GELU(), functools.partial(F.gelu, approximate="none"), squared_relu]
    assert [activation_name(form) for form in forms] == ["gelu", "gelu_tanh", "gelu_tanh", "gelu", "gelu", None]
    mlp = filled(MLP(config(activation_func=F.gelu, params_dtype=torch.float64)))
    x = torch.randn(3, 2, H, dtype=torch.float64)
    exact = expected(mlp, x)
    swapped = copy.deepcopy(mlp)
    swapped.settings = config(activation_func=tanh_gelu)
    torch.testing.assert_close(mlp(x)[0] + mlp.linear_fc2.bias, exact)
    assert (swapped(x)[0] + mlp.linear_fc2.bias - exact).abs().max() > 1e-5


@pytest.mark.parametrize("gated", [False, True])
def test_compiles_without_graph_break_and_exports(gated):
    mlp = filled(MLP(config(gated_linear_unit=gated, activation_func=F.silu, delay_wgrad_compute=True)))
    x, scale = torch.randn(3, 2, H), torch.rand(3, 2)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, scale)[0], mlp(x, scale)[0])
    exported = torch.export.export(mlp, (x,)).module()
    torch.testing.assert_close(exported(x), mlp(x))


def test_the_padding_mask_of_a_router_is_ignored_and_other_keywords_are_not():
    mlp, x = filled(MLP(config())), torch.randn(3, 2, H)
    out, _ = mlp(x, padding_mask=torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(out, mlp(x)[0])
    with pytest.raises(TypeError, match="token_scale"):
        mlp(x, token_scale=torch.ones(3, 2))


def test_what_cannot_be_built_or_run():
    with pytest.raises(ValueError, match="an expert needs ffn_hidden_size"):
        MLP(config(), is_expert=True)
    with pytest.raises(ValueError, match="use_te_activation_func needs a builder"):
        MLP(config(use_te_activation_func=True))
    with pytest.raises(ValueError, match="ffn_hidden_size must be positive, got -1"):
        TransformerConfig(hidden_size=4, ffn_hidden_size=-1)
    with pytest.raises(ValueError, match=r"48 outputs cannot be shared evenly by 5 ranks"):
        MLP(config(), tp_group=SimpleNamespace(size=lambda: 5))
    with pytest.raises(ValueError, match=r"per_token_scale \[2\].*\[3, 2, 12\]"):
        MLP(config())(torch.randn(3, 2, H), torch.rand(2))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("linear_fc1", lambda y, bias: (y, None)),
        ("linear_fc1", lambda y, bias: (torch.cat(y.chunk(2, -1)[::-1], -1), bias)),
        ("linear_fc1", lambda y, bias: (y + bias, bias)),
        ("linear_fc2", lambda y, bias: (y + bias, bias)),
        ("linear_fc2", lambda y, bias: (y, None)),
    ],
)
def test_wrong_variants_are_told_apart(part, change):
    mlp = filled(MLP(config(gated_linear_unit=True, activation_func=F.silu)))
    x, scale = torch.randn(5, 2, H), torch.rand(5, 2)
    torch.testing.assert_close(mlp(x, scale)[0], expected(mlp, x, scale))
    getattr(mlp, part).register_forward_hook(lambda module, args, result: change(*result))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(mlp(x, scale)[0], expected(mlp, x, scale))
