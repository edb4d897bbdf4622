"""Slapo's tests of replacing (``test_replace.py``), with ``replace`` and ``replace_all``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule import MatchError, NotApplicable, call_module
from tests.zoo import build

pytestmark = pytest.mark.unwritable("functions and modules of the test's own take others' places")


class Chain(nn.Module):
    """Three layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.linear(x)))


class Nested(nn.Module):
    """Layers of one type here, inside a module, in a list and in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.inner = nn.Linear(8, 8), nn.ReLU(), Chain()
        self.listed = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])
        self.chained = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.act(self.fc1(x)))
        for each in self.listed:
            x = each(x)
        return self.chained(x)


def kinds(model: nn.Module, *paths: str) -> list[type[nn.Module]]:
    return [type(model.get_submodule(path)) for path in paths]


def test_a_module_takes_anothers_place() -> None:
    sch = schedule.create_schedule(Chain())
    sch["act"].replace(nn.GELU())
    assert kinds(sch.module, "act") == [nn.GELU]


def test_all_modules_of_a_type_are_replaced() -> None:
    sch = schedule.create_schedule(Nested())
    sch.replace_all(nn.ReLU, lambda path, module: nn.GELU())
    assert kinds(sch.module, "act", "inner.act") == [nn.GELU] * 2


def test_all_modules_of_a_type_are_replaced_in_containers() -> None:
    sch = schedule.create_schedule(Nested())
    sch.replace_all(nn.Linear, lambda path, module: nn.Linear(4, 4))
    assert kinds(sch.module, "listed.0", "chained.0") == [nn.Linear] * 2
    assert (sch.module.listed[0].out_features, sch.module.chained[0].out_features) == (4, 4)


def test_what_replaces_a_module_may_depend_on_its_path_and_have_other_sizes() -> None:
    sizes = {"fc1": (8, 9), "inner.linear": (9, 10)}
    sch = schedule.create_schedule(Nested())
    sch.replace_all(nn.Linear, lambda path, module: nn.Linear(*sizes[path]) if path in sizes else module)
    assert [sch.module.get_submodule(path).out_features for path in sizes] == [9, 10]
    assert kinds(sch.module, "listed.0") == [nn.Linear]


def followed(path: str, module: nn.Module, activation: bool = False) -> nn.Module:
    return nn.Sequential(module, nn.ReLU()) if activation else module


def test_what_replaces_a_module_may_hold_it() -> None:
    """It is not replaced again inside."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    schedule.create_schedule(model).replace_all(nn.Linear, functools.partial(followed, activation=True))
    assert kinds(model, "0.0", "0.1", "1.0", "1.1") == [nn.Linear, nn.ReLU] * 2


def test_the_maker_of_replacements_takes_further_arguments() -> None:
    """By ``functools.partial``."""
    model = nn.Sequential(nn.Linear(8, 8))
    sch = schedule.create_schedule(model)
    with pytest.raises(NotApplicable, match="make returned"):
        sch.replace_all(nn.Linear, functools.partial(followed, activation=False))
    sch.replace_all(nn.Linear, functools.partial(followed, activation=True))
    assert kinds(model, "0") == [nn.Sequential]


# -- chains ------------------------------------------------------------------------------------------------------


def normalized(x: Tensor) -> Tensor:
    return call_module("bn")(call_module("linear")(x))


ROWS = torch.linspace(-1, 1, 32).view(4, 8)


def chain(hooked: str = "", register: str = "", name: str | None = None) -> tuple[nn.Module, list[str]]:
    """A model whose two layers one module has replaced, and what its hook has seen in a step."""
    model, seen = Chain(), []

    def hook(module: nn.Module, *values: Any) -> None:
        seen.append(type(module).__name__)

    if hooked:
        getattr(model.get_submodule(hooked), register)(hook)
    sch = schedule.create_schedule(model, ROWS)
    found = sch.find(normalized, expect=1)
    sch.replace(nn.Identity(), found, name=name)
    seen.clear()
    model(ROWS.clone().requires_grad_()).sum().backward()
    return model, seen


def test_a_chain_becomes_one_module() -> None:
    model, _ = chain()
    assert kinds(model, "scheduled_identity") == [nn.Identity]
    assert torch.equal(model(ROWS), F.relu(ROWS))


def test_the_module_for_a_chain_has_the_name_asked_for() -> None:
    assert kinds(chain(name="test")[0], "test") == [nn.Identity]


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_of_the_first_layer_moves_to_the_replacement_of_a_chain(register: str) -> None:
    """One intention each: of its input, or of its gradient."""
    assert chain("linear", register)[1] == ["Identity"]


def test_a_hook_of_a_value_inside_a_chain_refuses_its_replacement() -> None:
    with pytest.raises(MatchError, match="linear has a hook"):
        chain("linear", "register_forward_hook")


class Parallel(nn.Module):
    """Two projections of one input, each permuted by a method of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def heads(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.fc1(x)) + self.heads(self.fc2(x))


def projected(x: Tensor) -> Tensor:
    return call_module(r"fc[12]")(x).permute(0, 2, 1, 3)


class Twice(nn.Module):
    """As many results as there are projections."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


HEADS = torch.ones(2, 3, 4, 8)


def test_parallel_chains_become_one_module_with_several_results() -> None:
    sch = schedule.create_schedule(Parallel(), HEADS)
    found = sch.find_parallel(projected, expect=1)
    assert [[str(node.target) for node in match.nodes] for match in found[0]] == [
        ["fc1", "permute"],
        ["fc2", "permute"],
    ]
    sch.replace(Twice(), found, name="test")
    taken = [node for node in sch.graph.nodes if node.target is operator.getitem and node.args[0].target == "test"]
    assert [node.args[1] for node in taken] == [0, 1]
    assert torch.equal(sch.module(HEADS), 2 * HEADS)


def test_a_hook_in_parallel_chains_refuses_their_replacement() -> None:
    sch = schedule.create_schedule(Parallel(), HEADS)
    sch.module.fc1.register_forward_pre_hook(lambda module, inputs: None)
    found = sch.find_parallel(projected, expect=1)
    with pytest.raises(MatchError, match="fc1 has a hook"):
        sch.replace(Twice(), found)


# -- functions ---------------------------------------------------------------------------------------------------


class Function(nn.Module):
    """A function of its inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self.function(a, b, c)


THREE = tuple(torch.linspace(1, 2, 12).view(3, 4))


def relu_plus(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x) + y


class Sum(nn.Module):
    """More inputs than the pattern has."""

    def forward(self, x: Tensor, y: Tensor, z: float) -> Tensor:
        return x + y + z


def test_a_replacement_with_other_arguments_is_refused() -> None:
    sch = schedule.create_schedule(Function(lambda a, b, c: F.relu(a) + b), THREE)
    found = sch.find(relu_plus, expect=1)
    with pytest.raises(NotApplicable, match="missing a required argument: 'z'"):
        sch.replace(Sum(), found)


def test_arguments_of_a_replacement_can_be_given() -> None:
    """By ``functools.partial``."""
    sch = schedule.create_schedule(Function(lambda a, b, c: F.relu(a) + b), THREE)
    sch.replace(functools.partial(Sum().forward, z=3.0), sch.find(relu_plus, expect=1))
    torch.testing.assert_close(sch.module(*THREE), THREE[0] + THREE[1] + 3)


def identity(x: Tensor) -> Tensor:
    return x


def test_one_call_of_a_function_is_found_and_replaced() -> None:
    sch = schedule.create_schedule(Function(lambda a, b, c: F.relu(-a)), THREE)
    sch.replace(identity, sch.find(lambda x: F.relu(x), expect=1))
    assert [node.target for node in sch.graph.nodes].count(identity) == 1
    assert torch.equal(sch.module(*THREE), -THREE[0])


def product(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return a * b * y


def test_a_replacement_comes_after_all_of_its_inputs() -> None:
    sch = schedule.create_schedule(Function(lambda a, b, c: (a + b) + (c * 2)), THREE)
    sch.replace(product, sch.find(lambda a, b, y: (a + b) + y, expect=1))
    assert [node.name for node in sch.graph.nodes] == ["a", "b", "c", "mul", "product", "output"]


def in_turn(example: Any) -> nn.Module:
    """Two operators, replaced one after the other by lambdas."""
    sch = schedule.create_schedule(Function(lambda a, b, c: a - (a + b)), example)
    sch.replace(lambda a, b: a * b, sch.find(lambda a, b: a + b, expect=1))
    sch.replace(lambda a, b: b // a, sch.find(lambda a, b: a - b, expect=1))
    return sch.module


def test_lambdas_are_found_and_take_their_places_one_after_the_other() -> None:
    numbers = tuple(map(torch.tensor, (4, 10, 0)))
    assert in_turn(numbers)(*numbers) == 10


@pytest.mark.xfail(
    strict=True,
    reason="a number among the arguments is a constant of the graph, guarded by its value: patterns and rules compare "
    "constants, such as a dimension or a probability that is passed down, which they could not if it were open",
)
def test_a_model_is_called_with_plain_numbers() -> None:
    assert in_turn((4, 10, 0))(4, 10, 0) == 10


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_a_module_stay_when_it_is_traced(kind: str) -> None:
    model, seen = Chain(), []
    getattr(model, kind)(lambda *values: seen.append(kind))
    schedule.create_schedule(model, ROWS).trace()
    seen.clear()
    model(ROWS.clone().requires_grad_()).sum().backward()
    assert seen == [kind]


# -- an attention of transformers --------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    return call_module(r"query|key|value")(x).view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2)


def attention() -> Any:
    """BERT's, with its schedule."""
    return schedule.create_schedule(build("bert"))["bert.encoder.layer.0.attention.self"]


@pytest.mark.slow
def test_the_projections_of_an_attention_are_found_apart() -> None:
    (found,) = attention().find_parallel(heads, expect=1)
    assert [match.nodes[0].target for match in found] == ["query", "key", "value"]
    assert len({node for match in found for node in match.nodes}) == sum(len(match.nodes) for match in found) == 9


def thrice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts: Tensor = x.view(*x.shape[:-1], -1, 8).transpose(1, 2)
    return parts, parts, parts


class Thrice(nn.Module):
    """The same as a module."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return thrice(x)


@pytest.mark.slow
@pytest.mark.parametrize("new", [thrice, Thrice()])
def test_the_projections_of_an_attention_become_one_call(new: Any) -> None:
    """One intention each: of a function, or of a module."""
    node = attention()
    node.replace(new, node.find_parallel(heads, expect=1), name="qkv")
    taken = [each for each in node.graph.nodes if each.target is operator.getitem and each.args[0].name == "qkv"]
    assert [each.args[1] for each in taken] == [0, 1, 2]


class Scores(nn.Module):
    """An attention without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return attended(self.q(x), self.k(x), self.v(x))


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)) / 8**0.5
    return torch.matmul(F.softmax(scores, dim=-1), value)


TOKENS = torch.linspace(-2, 2, 48).view(2, 3, 8)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def swapped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(value, key, query)


@pytest.mark.slow
def test_an_attention_is_found_and_a_wrong_replacement_noticed() -> None:
    """It has the arguments in another order: it fits, and computes something else."""
    sch = schedule.create_schedule(Scores(), TOKENS)
    found = sch.find(attended, expect=1)
    with pytest.raises(schedule.VerificationError, match="replace"):  # noqa: SIM117
        with schedule.verify(sch, TOKENS, steps=0):
            sch.replace(swapped, found)


@pytest.mark.slow
def test_a_right_replacement_of_an_attention_is_verified() -> None:
    sch = schedule.create_schedule(Scores(), TOKENS)
    with schedule.verify(sch, TOKENS, steps=0):
        sch.replace(fused, sch.find(attended, expect=1))
