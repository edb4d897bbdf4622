"""Layers whose inputs are computed again: what is rewritten, what is saved, and training as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.primitives.activations.saved import measure_saved
from schedule.rules import list_rules
from tests.zoo import batch, build

OURS = [rule.name for rule in list_rules("recomputed_input")]
BY_ONEDNN = [rule.name for rule in list_rules("linear")]


def saved(model: nn.Module, inputs: object) -> int:
    return measure_saved(model, inputs).saved()


class Convolutions(nn.Module):
    """A residual block, with norms and activations of three kinds between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third, self.down = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1, stride=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.group = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        y = F.relu(self.norms[1](self.second(x)) + x)
        return self.down(F.silu(self.group(self.third(y))))


class Perceptron(nn.Module):
    """Linear layers behind a norm, an activation and a gated activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.gate, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.out(F.silu(self.gate(x)) * self.value(x))


CONVOLVED = {"batch_norm_relu": 2, "group_norm_silu": 1, "recomputed_conv2d": 4}
MULTIPLIED = {
    "called_layer_norm": 1,
    "bias_gelu": 1,
    "gated_silu": 1,
    "recomputed_linear": 4,
    "recomputed_linear_bias": 1,
}
# Of convolutions, the results of the norms without a residual; of the linear layers, those of norm, GELU and gate.
CASES = [
    pytest.param(Convolutions, (2, 3, 8, 8), CONVOLVED, 4 * 2 * 8 * 64 * 2, id="convolutions"),
    pytest.param(Perceptron, (4, 6, 16), MULTIPLIED, 4 * 4 * 6 * (16 + 64 + 16), id="linear layers"),
]


@pytest.mark.parametrize(("cls", "shape", "rewritten", "less"), CASES)
def test_layers_train_as_before_and_save_less(
    cls: type[nn.Module], shape: tuple[int, ...], rewritten: dict[str, int], less: int
) -> None:
    torch.manual_seed(0)
    model, x = cls(), torch.randn(shape)
    twin, default = copy.deepcopy(model), copy.deepcopy(model)
    schedule.optimize(default, x, rules=[rule for rule in rewritten if rule not in OURS], cost_guard=False)
    sch = schedule.create_schedule(model, x)
    applied = sch.optimize(rules="memory", cost_guard=False).applied
    assert rewritten.items() <= applied.items()
    assert saved(default, x) - saved(model, x) == less
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]
    for step in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            each(x * (step + 1)).square().mean().backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    while sch.history:
        sch.undo()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), twin.eval()(x))


def test_layers_by_another_library_save_as_little() -> None:
    model, other, x = Perceptron(), Perceptron(), torch.randn(4, 6, 16)
    schedule.optimize(other, x, rules="memory", cost_guard=False)
    applied = schedule.optimize(model, x, rules=["memory", *BY_ONEDNN], cost_guard=False).applied
    layers = {rule: number for rule, number in applied.items() if rule in (*OURS, *BY_ONEDNN)}
    assert layers == {rule: number for rule, number in MULTIPLIED.items() if rule in OURS}
    assert saved(model, x) == saved(other, x)


class Projections(nn.Module):
    """Layers of several widths behind norms, one of them read by two layers, through views."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(64), nn.ModuleList(nn.Linear(64, width, bias=False) for width in widths)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self.norm(x).view(-1, 64)
        return tuple(layer(normed.unsqueeze(0)) for layer in self.layers)


@pytest.mark.parametrize(("widths", "number"), [((64,), 0), ((64, 64), 0), ((896,), 1), ((448, 448), 2)])
def test_only_layers_with_many_features_have_their_input_computed_again(widths: tuple[int, ...], number: int) -> None:
    x = torch.randn(4, 1024, 64)
    report = schedule.optimize(Projections(*widths), x, rules="memory")
    assert report.applied == ({"called_layer_norm": 1, "recomputed_linear": number} if number else {})
    declined = [entry for entry in report.entries if entry.status == "declined"]
    assert bool(declined) is not bool(number)
    assert all("computing 262,144 elements again takes about" in entry.reason for entry in declined)
    assert schedule.optimize(Projections(*widths), x, rules="memory", cost_guard=False).applied == {
        "called_layer_norm": 1,
        "recomputed_linear": len(widths),
    }


def test_a_small_input_is_not_computed_again() -> None:
    assert not schedule.optimize(Projections(4096), torch.randn(2, 64), rules="memory").applied


def test_a_product_of_two_results_is_no_layer() -> None:
    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            normed = self.norm(x)
            return self.layer(normed), normed @ normed.transpose(1, 2)

    assert not schedule.optimize(Compared(), torch.randn(4, 1024, 64), rules="memory").applied


def test_the_windows_of_a_convolution_count() -> None:
    class Block(nn.Module):
        def __init__(self, kernel: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 96, kernel, padding=kernel // 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.relu(self.norm(x)))

    rules = ["batch_norm_relu", "recomputed_conv2d"]
    found = {
        kernel: schedule.optimize(Block(kernel), torch.randn(2, 16, 128, 128), rules=rules).applied for kernel in (1, 3)
    }
    assert "recomputed_conv2d" not in found[1] and found[3]["recomputed_conv2d"] == 1


def test_a_norm_that_others_read_is_rewritten_for_them() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.tanh())

    assert schedule.optimize(Last(), torch.randn(4, 64), rules="memory").applied == {"called_layer_norm": 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "layers"), [("gpt2", 8), ("llama", 12), ("bert", 18)])
def test_transformers_save_less(name: str, layers: int) -> None:
    inputs, model, without = batch(name), build(name), build(name)
    rules = [rule for rule in list_rules() if "memory" in rule.sets and rule.name not in OURS]
    schedule.optimize(without, inputs, rules=rules, cost_guard=False)
    sch = schedule.create_schedule(model, inputs)
    applied = sch.optimize(rules="memory", cost_guard=False).applied
    assert sum(applied.get(rule, 0) for rule in OURS) == layers
    assert saved(model, inputs) < 0.85 * saved(without, inputs)
    schedule.verify(sch, inputs, steps=2)
    assert not sch.optimize(rules="memory", cost_guard=False).applied


def test_layers_of_other_layers_are_left_alone() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(self.one(torch.cat([x, x])).view(-1, 4)))

    assert not schedule.optimize(Chain(), torch.ones(2, 4), rules="memory", cost_guard=False).applied


def test_layers_of_attention_are_left_alone_by_a_second_schedule() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.into(F.gelu(x)).view(2, -1, 2, 12).transpose(1, 2).chunk(3, -1)
            weights = F.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
            return self.out((weights @ v).transpose(1, 2).reshape(2, -1, 8))

    model, x = Heads(), torch.randn(2, 3, 8)
    applied = [schedule.optimize(model, x, rules="all", cost_guard=False).applied for _ in range(2)]
    assert sum(applied[0].get(rule, 0) for rule in OURS) == 1 and not applied[1]
