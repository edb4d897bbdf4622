"""Projections of one input as one product: what is kept of parameters, and what is left alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import schedule
from schedule.rules import select_rules
from schedule.rules.merged_linear import merged_linear
from schedule.rules.proof import failures_of
from schedule.rules.qkv_merge import QKV_MERGE
from tests.zoo import batch, build

# -- in models ------------------------------------------------------------------------------------------------


def merged(name: str) -> tuple[nn.Module, schedule.Schedule, dict[str, Tensor]]:
    model, inputs = build(name), batch(name)
    sch = schedule.create_schedule(model, inputs)
    assert sch.optimize(rules="qkv_merge", cost_guard=False).applied
    return model, sch, inputs


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "groups"), [("llama", 2), ("bert", 2), ("whisper", 6), ("t5", 6), ("qwen3", 2)])
@pytest.mark.filterwarnings("ignore")
def test_attention_of_transformers_is_merged(name: str, groups: int) -> None:
    inputs = batch(name)
    sch = schedule.create_schedule(build(name), inputs)
    report = sch.optimize(rules="qkv_merge", cost_guard=False)
    assert report.applied == {"qkv_merge": groups}
    schedule.verify(sch, inputs, steps=2)
    called = [n for m in sch.module.modules() for n in graph_nodes(sch, m) if n.target is merged_linear]
    assert len(called) == groups


def graph_nodes(sch: schedule.Schedule, module: nn.Module) -> list[fx.Node]:
    made = sch.tree.graphs.current(module) or ()
    return [node for each in made if each.training for node in each.graph.nodes]


@pytest.mark.filterwarnings("ignore")
def test_state_dicts_know_nothing_of_it(tmp_path: Path) -> None:
    original, inputs = build("llama"), batch("llama")
    before = {name: value.clone() for name, value in original.state_dict().items()}
    model, sch, _ = merged("llama")
    parameters = list(model.parameters())
    model(**inputs).loss.backward()
    assert_equal(model.state_dict(), before)
    model.save_pretrained(tmp_path)
    assert_equal(type(original).from_pretrained(tmp_path).state_dict(), before)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert_equal(torch.load(tmp_path / "state.pt"), before)
    other = build("llama", seed=1)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(**inputs).logits, other(**inputs).logits)
    sch.undo()
    assert_equal(model.state_dict(), other.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(**inputs).logits, other(**inputs).logits)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_goes_on_with_its_state() -> None:
    """Two steps before, two after: moments stay with the parameters they belong to."""
    twin, inputs = build("bert"), batch("bert")
    model = build("bert")
    for each in (model, twin):
        each.eval()
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for step in range(4):
            if each is model and step == 2:
                schedule.optimize(model, inputs, rules="qkv_merge", cost_guard=False)
            optimizer.zero_grad()
            each(**inputs).loss.backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_put_on_afterwards_counts() -> None:
    model, _, inputs = merged("llama")
    model.eval()
    attention = model.model.layers[0].self_attn
    plain = model(**inputs).logits

    class Doubled(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * 2

    attention.q_proj = Doubled(attention.q_proj)
    twin = build("llama").eval()
    twin.model.layers[0].self_attn.q_proj.weight.data *= 2
    assert not torch.allclose(model(**inputs).logits, plain)
    torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits)


def test_a_trace_before_the_first_call_leaves_the_weights() -> None:
    """It runs modules on tensors without data."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention(READS["heads"][0])])
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)[0].transpose(1, 2).reshape(x.shape)
            return nn.functional.gelu(x + self.scale)

    model, x = Layers(), torch.randn(2, 5, 8)
    report = schedule.optimize(model, x, rules=["qkv_merge", "bias_gelu"], cost_guard=False)
    assert report.applied == {"qkv_merge": 1, "bias_gelu": 1}
    twin = Layers()
    twin.load_state_dict(model.state_dict())
    model.layers.append(Attention(READS["heads"][0]))
    twin.layers.append(copy.deepcopy(model.layers[1]))
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert report.fallbacks == {}


# -- what is left alone ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections without bias, whose results are read as ``read`` says."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.q(x)), self.read(self.k(x))


READS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "heads": (lambda y: y.view(2, 5, -1, 2).transpose(1, 2), ""),
    "one row": (lambda y: y.view(2, -1) * 2, "fails on the strides"),
    "in place": (lambda y: y.view(2, 5, -1, 2).mul_(2).transpose(1, 2), "in place"),
    "later in one row": (lambda y: y.view(2, 5, -1, 2).view(2, -1) * 2, "fails on the strides"),
    "strides": (lambda y: (y.view(2, 5, -1, 2), y.stride()), "may read the strides"),
    "returned": (lambda y: y.view(2, 5, -1, 2), "may read the strides"),
    "gate": (torch.sigmoid, "nothing is taken apart into heads"),
}


@pytest.mark.parametrize("name", READS)
def test_results_that_are_read_otherwise(name: str) -> None:
    read, reason = READS[name]
    module, x = Attention(read), torch.randn(2, 5, 8)
    expected = module(x)
    report = schedule.optimize(module, x, rules="qkv_merge", cost_guard=False)
    assert report.applied == ({} if reason else {"qkv_merge": 1})
    assert reason in " ".join(entry.reason for entry in report.entries)
    torch.testing.assert_close(module(x), expected)


def test_changes_in_place_afterwards() -> None:
    class Scaled(Attention):
        def forward(self, x: Tensor) -> Any:
            q, k = self.q(x), self.k(x)
            q.mul_(2)
            return self.read(q), self.read(k)

    module, x = Scaled(READS["heads"][0]), torch.randn(2, 5, 8)
    expected = module(x)
    assert schedule.optimize(module, x, rules="qkv_merge", cost_guard=False).applied
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module(x)[0], expected[0])


def test_one_weight_twice() -> None:
    module, x = Attention(READS["heads"][0]), torch.randn(2, 5, 8)
    module.k = nn.Linear(8, 8, bias=False)
    module.k.weight = module.q.weight
    report = schedule.optimize(module, x, rules="qkv_merge", cost_guard=False)
    assert [entry.reason for entry in report.entries] == ["two of them are one weight"]


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features = base, base.in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * 2


@pytest.mark.parametrize("adapted", [["q"], ["k"], ["q", "k"]])
def test_linears_of_another_kind_are_declined_by_name(adapted: list[str]) -> None:
    module = Attention(READS["heads"][0])
    for name in adapted:
        setattr(module, name, Adapted(getattr(module, name)))
    report = schedule.optimize(module, torch.randn(2, 5, 8), rules="qkv_merge", cost_guard=False)
    (reason,) = {entry.reason for entry in report.select(status="declined")}
    assert not report.applied and ": no plain Linear" in reason
    assert set(reason.partition(":")[0].split(" and ")) == set(adapted)


def test_no_set_has_it() -> None:
    """It gains no time to speak of, and no bytes."""
    assert QKV_MERGE not in select_rules("all") and select_rules("qkv_merge") == [QKV_MERGE]


# -- the product itself ---------------------------------------------------------------------------------------


def parameters(*widths: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(w, 8)) for w in widths], [nn.Parameter(torch.randn(w)) for w in widths]


def check(weights: list[nn.Parameter], biases: Sequence[Tensor | None]) -> None:
    x = torch.randn(3, 8, dtype=weights[0].dtype, requires_grad=True)
    ours, theirs = (
        merged_linear(x, weights, biases),
        [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)],
    )
    torch.testing.assert_close(ours, tuple(theirs))
    given = [x, *weights, *(bias for bias in biases if bias is not None)]
    gradients = [torch.autograd.grad([(y * y.detach()).sum() for y in ys], given) for ys in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def one_product(*given: Any) -> bool:
    """Whether a call makes a single product."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        merged_linear(*given)
    found = [event for event in profile.events() if event.name in ("aten::addmm", "aten::mm")]
    return len(found) == 1


def test_parameters_stay_in_memory_of_their_own_and_are_followed() -> None:
    weights, biases = parameters(8, 4, 4)
    assert one_product(torch.randn(3, 8), weights, biases)
    before = [part.data_ptr() for part in weights]
    check(weights, biases)
    check(weights, [None, biases[1], None])
    assert [part.data_ptr() for part in weights] == before
    weights[1].data.copy_(weights[2])
    check(weights, biases)
    nn.ParameterList([*weights, *biases]).double()
    check(weights, biases)
    check(copy.deepcopy(weights), biases)
    check([weights[0], weights[0], weights[1]], [biases[0], biases[0], None])


def test_parts_of_one_tensor_stay_parts_of_it() -> None:
    whole = torch.randn(20, 8)
    weights = [nn.Parameter(whole[4:12]), nn.Parameter(whole[12:16])]
    check(weights, parameters(8, 4)[1])
    assert {part.untyped_storage().data_ptr() for part in weights} == {whole.untyped_storage().data_ptr()}


@pytest.mark.parametrize("frozen", ["x", "weights", "one weight", "biases"])
def test_frozen_operands(frozen: str) -> None:
    """What is saved, and so what must not change before the backward pass, is what F.linear saves."""
    weights, biases = parameters(8, 4)
    x = torch.randn(3, 8, requires_grad=frozen != "x")
    for part in {"x": [], "weights": weights, "one weight": weights[:1], "biases": biases}[frozen]:
        part.requires_grad_(False)
    given = [part for part in (x, *weights, *biases) if part.requires_grad]
    eager = [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    found, expected = (sum(y.square().sum() for y in ys) for ys in (merged_linear(x, weights, biases), eager))
    torch.testing.assert_close(torch.autograd.grad(found, given), torch.autograd.grad(expected, given))
    ours = merged_linear(x, weights, biases)
    with torch.no_grad():
        weights[0].add_(1)
    if x.requires_grad:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(ours[1].sum(), given, allow_unused=True)
    else:
        torch.autograd.grad(ours[1].sum(), given, allow_unused=True)


def test_bytes_saved_are_those_of_linear_layers() -> None:
    weights, biases = parameters(8, 4, 4)
    x = torch.randn(3, 8, requires_grad=True)
    saved: list[list[Tensor]] = []
    for call in (
        lambda: merged_linear(x, weights, biases),
        lambda: [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)],
    ):
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved[-1].append(t) or t, lambda t: t):  # type: ignore
            call()
    storages = [{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in each} for each in saved]
    assert storages[0] == storages[1]


def test_derivatives_of_derivatives() -> None:
    weights, biases = parameters(4, 2)
    given = [part.detach().double().requires_grad_() for part in (*weights, *biases)]
    x = torch.randn(2, 3, 8, dtype=torch.double, requires_grad=True)

    def function(x: Tensor, *parts: Tensor) -> Tensor:
        q, k = merged_linear(x, parts[:2], parts[2:])
        return (q.tanh() * k.sum(-1, keepdim=True)).sum(-1)

    assert torch.autograd.gradcheck(function, (x, *given), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (x, *given))


def test_transforms_inference_and_compilers() -> None:
    weights, biases = parameters(8, 4)
    x = torch.randn(3, 8)
    expected = [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(list(merged_linear(x, weights, biases)), expected)
    check(weights, biases)  # still parameters that can be trained
    mapped = torch.vmap(lambda row: merged_linear(row, weights, biases))(x)
    torch.testing.assert_close(list(mapped), expected)
    torch.testing.assert_close(
        torch.func.jacrev(lambda x: merged_linear(x, weights)[0].sum())(x), weights[0].sum(0).expand(3, 8)
    )
    _, moved = torch.func.jvp(lambda *w: merged_linear(x, w)[1], tuple(weights), tuple(map(torch.ones_like, weights)))
    torch.testing.assert_close(moved, x.sum(-1, keepdim=True).expand(3, 4))
    captured = torch.compile(lambda x: merged_linear(x, weights, biases), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(list(captured), expected)


def test_autocast_is_that_of_linear_layers() -> None:
    weights, biases = parameters(8, 4)
    x = torch.randn(3, 8, requires_grad=True)
    results = []
    for call in (
        lambda: merged_linear(x, weights, biases),
        lambda: tuple(nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(call())
        results.append(torch.autograd.grad(sum(y.float().sum() for y in results[-1]), [x, *weights, *biases]))
    assert results[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(results[:2], results[2:], rtol=0, atol=0)


@pytest.mark.parametrize("odd", ["dtype", "width", "bias"])
def test_operands_that_do_not_fit_fail_as_in_linear_layers(odd: str) -> None:
    weights, biases = parameters(8, 4)
    if odd == "dtype":
        weights[1] = nn.Parameter(weights[1].double())
    elif odd == "width":
        weights[1] = nn.Parameter(torch.randn(4, 7))
    else:
        biases[1] = nn.Parameter(torch.randn(3))
    with pytest.raises(RuntimeError) as expected:
        nn.functional.linear(torch.ones(3, 8), weights[1], biases[1])
    with pytest.raises(RuntimeError) as found:
        merged_linear(torch.ones(3, 8), weights, biases)
    assert str(found.value) == str(expected.value)


# -- mutations ------------------------------------------------------------------------------------------------

MUTATIONS: dict[str, Callable[[fx.Node], None]] = {
    "biases dropped": lambda node: setattr(node, "args", node.args[:2]),
    "biases swapped": lambda node: node.args[2:] and node.update_arg(2, (node.args[2][0], *node.args[2][:0:-1])),  # type: ignore
    "two swapped": lambda node: node.update_arg(1, (node.args[1][0], *node.args[1][:0:-1])),  # type: ignore
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        made = QKV_MERGE.build(graph, inputs, scalars)
        MUTATIONS[name](made)
        return made

    assert any(failures_of(dataclasses.replace(QKV_MERGE, build=build_wrongly)))
