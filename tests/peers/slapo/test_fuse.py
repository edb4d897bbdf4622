"""Slapo's tests of fusing, ops, recomputation, tags and checks: ``fuse``, ``fused``, ``checkpoint``, ``verify``.

(``test_fusion.py``, ``test_op.py``, ``test_checkpoint.py``, ``test_annotate.py``, ``test_verify.py`` on one device.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

import fused
import schedule
from schedule import call_module
from schedule.primitives.callees import CompiledRegion, Region
from tests.needs import IS_OLD, needs
from tests.zoo import build

pytestmark = pytest.mark.unwritable("matches of functions inside tests")


class Layers(nn.Module):
    """Layers of any kind, one after the other."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Convolved(Layers):
    """With one more operation after its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Projection(nn.Module):
    """A linear layer, dropout, and the norm of the residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.ln = nn.Linear(8, 8), nn.Dropout(0.2), nn.LayerNorm(8)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ln(self.dropout(self.linear(x)) + residual)


IMAGE, ROWS = torch.linspace(-1, 1, 108).view(2, 2, 9, 3), torch.linspace(-1, 1, 32).view(4, 8)
PAIR = (ROWS, ROWS.flip(0))


def convolved() -> nn.Module:
    return Convolved(conv=nn.Conv2d(2, 4, 3), relu=nn.ReLU())


def with_twin(model: nn.Module, inputs: Any) -> tuple[Any, nn.Module]:
    twin = copy.deepcopy(model)
    return schedule.create_schedule(model, inputs), twin


def same(model: nn.Module, twin: nn.Module, *inputs: Tensor) -> None:
    """Results, gradients of the inputs and of the parameters, with equal random numbers."""
    seen = []
    for each in (model, twin):
        own = [value.clone().requires_grad_() for value in inputs]
        torch.manual_seed(0)
        result = each(*own)
        result.mean().backward()
        seen.append([result, *(value.grad for value in own), *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(bias + x)


def test_a_linear_layer_is_taken_apart() -> None:
    sch, twin = with_twin(Layers(linear=nn.Linear(8, 4), relu=nn.ReLU()), ROWS)
    sch["linear"].decompose()
    assert "linear__add" in [node.name for node in sch.graph.nodes]
    same(sch.module, twin, ROWS)


def conv_relu_plus(x: Tensor) -> Tensor:
    return F.relu(call_module("conv")(x)) + 1


def conv_relu(x: Tensor) -> Tensor:
    return F.relu(call_module("conv")(x))


def made_of(sch: Any, name: str) -> Any:
    """What the node ``name`` calls."""
    (found,) = [node.target for node in sch.graph.nodes if node.name == name]
    return found


@pytest.mark.slow  # it compiles
def test_a_chain_through_a_layer_is_fused() -> None:
    sch, twin = with_twin(convolved(), IMAGE)
    found = sch.find(conv_relu_plus, expect=1)
    assert len(found[0].nodes) == 3
    with schedule.verify(sch, IMAGE, steps=0):
        sch.fuse(found, compiler="inductor", name="conv_relu_plus")
    assert isinstance(made_of(sch, "conv_relu_plus"), CompiledRegion)
    same(sch.module, twin, IMAGE)


def test_a_chain_becomes_one_call_without_a_compiler() -> None:
    """Under the name that is given; the step tells what is inside."""
    sch, twin = with_twin(convolved(), IMAGE)
    sch.fuse(sch.find(conv_relu, expect=1), compiler=None, name="ConvReLU")
    assert isinstance(made_of(sch, "ConvReLU"), Region)
    assert [str(node) for node in sch.history[-1].replaced] == ["conv", "relu__relu"]
    same(sch.module, twin, IMAGE)


@pytest.mark.parametrize("compiler", ["auto", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_bias_and_an_activation_are_found_and_fused(compiler: Any) -> None:
    """One intention each: by a fused op, or compiled. The layer need not be taken apart first."""
    sch, twin = with_twin(Layers(linear=nn.Linear(8, 8), gelu=nn.GELU()), ROWS)
    found = sch.find(gelu, expect=1)
    assert [node.target.__name__ for node in found[0].nodes] == ["add", "gelu"]
    with schedule.verify(sch, ROWS, steps=0):
        sch.fuse(found, compiler=compiler, name="BiasGeLU")
    made = made_of(sch, "BiasGeLU")
    assert isinstance(made, CompiledRegion) if compiler == "inductor" else made.__module__.startswith("fused")
    same(sch.module, twin, ROWS)


def dropped(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return call_module("ln")(F.dropout(x + bias, 0.2) + residual)


def test_a_bias_dropout_and_a_norm_are_found_in_their_order() -> None:
    sch = schedule.create_schedule(Projection(), PAIR)
    (found,) = sch.find(dropped, expect=1)
    assert [getattr(node.target, "__name__", node.target) for node in found.nodes] == ["add", "dropout", "add", "ln"]


def test_a_fused_dropout_draws_as_the_original() -> None:
    """Equal seeds, equal results; the weights are those of the model."""
    sch, twin = with_twin(Projection(), PAIR)
    weight = sch.module.linear.weight
    sch.fuse(sch.find(dropped, expect=1), compiler=None, name="FusedLN")
    assert isinstance(made_of(sch, "FusedLN"), Region) and sch.module.linear.weight is weight
    same(sch.module, twin, *PAIR)


# -- ops ---------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Adds the names of torch's operations to ``seen``."""

    observes_only = True

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(seen: set[str]) -> Iterator[None]:
    """Add the names of Triton's kernels to ``seen``."""
    launcher = KernelInterface.__getitem__

    def launched(kernel: Any, grid: Any) -> Any:
        seen.add(kernel.fn.__name__)
        return launcher(kernel, grid)

    with mock.patch.object(KernelInterface, "__getitem__", launched):
        yield


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTIONS: dict[str, tuple[str, Any, Any, set[str]]] = {
    "math": ("attention", lambda: sdpa_kernel(SDPBackend.MATH), Operations, {"_softmax", "_softmax_backward_data"}),
    "flash": ("attention", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), Operations, {FLASH, f"{FLASH}_backward"}),
    "triton": (
        "attention_softmax",
        *(lambda: fused.backend("triton"), launches),
        {"_masked_softmax", "_masked_softmax_backward"},
    ),
}
"""Kernel → the rule, the block in which the model runs, what observes it, and the kernels of both passes."""


def attended(block: nn.Module) -> list[Tensor]:
    """Its result under a mask, and all gradients."""
    rows, mask = torch.linspace(-1, 1, 320).view(2, 5, 32).requires_grad_(), torch.linspace(-1, 1, 10).view(2, 1, 1, 5)
    result = block(rows, attention_mask=mask)
    result = result[0] if isinstance(result, tuple) else result  # of transformers 5.0
    result.square().mean().backward()
    return [result, rows.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]


_SCALES_ALONE = needs(not IS_OLD, "GPT-2 whose attention adds masks alone")  # there, the rule finds nothing


@pytest.mark.parametrize(
    "kernel", [pytest.param(name, marks=_SCALES_ALONE if name != "triton" else ()) for name in ATTENTIONS]
)
def test_an_attention_op_takes_packed_weights(kernel: str) -> None:
    """With the kernel asked for; in GPT-2's, query, key and value are one projection."""
    rule, chosen, observer, kernels = ATTENTIONS[kernel]
    block, seen = build("gpt2").transformer.h[0].eval(), set[str]()
    expected = attended(copy.deepcopy(block))
    inputs = {"hidden_states": torch.ones(2, 5, 32), "attention_mask": torch.ones(2, 1, 1, 5)}
    assert schedule.create_schedule(block, inputs)["attn"].optimize(rules=rule, cost_guard=False).applied
    with chosen(), observer(seen):
        found = attended(block)
    known = {name for *_, names in ATTENTIONS.values() for name in names}
    assert seen & known == kernels
    torch.testing.assert_close(found, expected)


def through(mlp: nn.Module, x: Tensor) -> list[Tensor]:
    """Its result, and the gradient of its input."""
    x = x.clone().requires_grad_()
    result = mlp(x)
    result = result[0] + result[1] if isinstance(result, tuple) else result
    result.square().mean().backward()
    return [result.detach(), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_an_mlp_module_takes_the_weights_of_gpt2(activation: str) -> None:
    """One intention each: both forms of the activation."""
    theirs = build("gpt2").transformer.h[0].mlp.eval()
    theirs.act = nn.GELU("tanh" if activation == "gelu_new" else "none")
    function = fused.new_gelu if activation == "gelu_new" else F.gelu
    width, hidden = theirs.c_fc.weight.shape
    ours = fused.MLP(fused.TransformerConfig(width, ffn_hidden_size=hidden, activation_func=function))
    with torch.no_grad():
        for mine, its in ((ours.linear_fc1, theirs.c_fc), (ours.linear_fc2, theirs.c_proj)):
            mine.weight.copy_(its.weight.t())
            mine.bias.copy_(its.bias)
    x = torch.linspace(-1, 1, 6 * width).view(2, 3, width)
    for a, b in zip(through(ours, x), through(theirs, x), strict=True):
        torch.testing.assert_close(a, b)


class Saying(nn.Module):
    """Prints what it is given, and returns the first."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        print(*more)
        return x


class Talking(nn.Module):
    """Says the shape of what it computes, as a text and as a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.say = nn.Linear(8, 8), Saying()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + x
        return F.gelu(self.say(self.say(y, f"text {y.ndim}"), "shape", y.shape))


def test_a_module_that_prints_stays_in_the_graph() -> None:
    sch = schedule.create_schedule(Talking(), ROWS)
    assert [node.op for node in sch.graph.nodes if node.target == "say"] == ["call_module"] * 2


def test_a_module_that_prints_does_so_once_a_call_of_the_rewritten_model(capsys: pytest.CaptureFixture[str]) -> None:
    sch = schedule.create_schedule(Talking(), ROWS)
    sch.replace(lambda x: F.gelu(x), sch.find(lambda x: F.gelu(x), expect=1))
    capsys.readouterr()
    sch.module(ROWS[:3])
    assert capsys.readouterr().out == "text 2\nshape torch.Size([3, 8])\n"


# -- recomputation and tags --------------------------------------------------------------------------------------


def linear_relu(x: Tensor) -> Tensor:
    return F.relu(call_module("layer1")(x))


def test_a_part_of_a_forward_is_computed_again() -> None:
    """Found as a layer and a function; results and all gradients stay."""
    sch, twin = with_twin(Layers(layer1=nn.Linear(8, 8), act=nn.ReLU(), layer2=nn.Linear(8, 8)), ROWS)
    found = sch.find(linear_relu, expect=1)
    assert len(found[0].nodes) == 2
    layer = sch.module.layer1
    sch.checkpoint(found)
    assert sch.module.layer1 is layer
    same(sch.module, twin, ROWS)


def test_a_tag_is_on_its_parameter_alone_and_stays_in_what_is_built() -> None:
    sch = schedule.create_schedule(Layers(layer1=nn.Linear(8, 8), layer2=nn.Linear(8, 8)))
    sch["layer1"].annotate("weight", "foo", "bar")
    model = schedule.build(sch)
    assert model.layer1.weight.foo == "bar" and not hasattr(model.layer2.weight, "foo")
