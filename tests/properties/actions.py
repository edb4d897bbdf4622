"""What a user may do to a schedule, right or wrong, chosen by numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import Match, NotApplicable, Schedule, scalar
from schedule.rules import Rule

Numbers = tuple[int, int, int]
Action = Callable[[Schedule, Numbers], Any]


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight) + bias


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def product_and_sum(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x * y + z


def sum_and_relu(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return total, F.relu(total)


def sum_and_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + y, (8,), w, b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, dim=-1)


def transposed_twice(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).transpose(1, 2)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scalar("s")


def relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


PATTERNS = (
    *(bias_gelu, gelu_tanh, projection, gated, product_and_sum, sum_and_relu, sum_and_norm, softmax),
    *(transposed_twice, scaled, relu),
)
"""All but ``scaled`` also stand for what they match: they are functions of their inputs alone."""

MEANT = (nn.Linear, nn.Dropout, nn.LayerNorm)
"""Called modules by type."""


FOREIGN, UNFIT = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Bilinear(8, 8, 8)
"""Another model, and a module that is called otherwise; made once, since that draws random numbers."""


def _pick(items: Any, number: int) -> Any:
    return items[number % len(items)]


def somewhere(sch: Schedule, number: int) -> Schedule:
    """A module: mostly one that has others, for those compute the most."""
    nodes = [node for _, node in sch.named_schedules()]
    inner = [node for node in nodes[1:] if next(node.module.children(), None) is not None] or nodes
    return _pick(nodes, number // 4) if number % 4 == 3 else _pick(inner, number // 4)


def _group_or_one(sch: Schedule, number: int) -> Any:
    globs = [each for each in ("**.fc1", "**.act", "**.dropout", "**.part", "body.*", "*.*") if each in sch]
    return sch[_pick(globs, number // 2)] if globs and number % 2 else somewhere(sch, number // 2)


def _wanted(number: int) -> Any:
    rules: list[Rule] = schedule.list_rules()
    return _pick([*PATTERNS, *MEANT, *(rule.name for rule in rules), *PATTERNS], number)


def _first_found(where: Any, number: int) -> list[Match]:
    """Matches of the first pattern from this one on that has any."""
    return next(filter(None, (where.find(_wanted(number + i)) for i in range(len(PATTERNS)))), [])


def fuse(sch: Schedule, n: Numbers) -> Any:
    """What is found, by its fused op or as one call; some of it, or all."""
    where = _group_or_one(sch, n[0])
    matches = _first_found(where, n[1])
    return where.fuse(matches[: 1 + n[2] % 3] if n[2] % 2 else matches, compiler=_compiler(matches))


def _compiler(matches: list[Match]) -> Literal["auto"] | None:
    """The fused op, where a rule was looked for; nothing is compiled, which takes seconds."""
    return "auto" if matches and all(match.rule for match in matches) else None


def replace_matches(sch: Schedule, n: Numbers) -> Any:
    """Matches by a function that computes the same."""
    where, own = _group_or_one(sch, n[0]), [pattern for pattern in PATTERNS if pattern is not scaled]
    found = ((pattern, where.find(pattern)) for pattern in (_pick(own, n[1] + i) for i in range(len(own))))
    pattern, matches = next((each for each in found if each[1]), (softmax, []))
    return where.replace(pattern, matches)


def replace_module(sch: Schedule, n: Numbers) -> Any:
    """A module by a copy of itself, as it was before it was scheduled."""
    node = somewhere(sch, n[0])
    return node.replace(copy.deepcopy(node.module))


def new_dropout(path: str, module: nn.Module) -> nn.Module:
    assert isinstance(module, nn.Dropout)
    return nn.Dropout(module.p)


def replace_all(sch: Schedule, n: Numbers) -> Any:
    return somewhere(sch, n[0]).replace_all(nn.Dropout, new_dropout)


def decompose(sch: Schedule, n: Numbers) -> Any:
    linear = [node for _, node in sch.named_schedules() if isinstance(node.module, nn.Linear)]
    return (_pick(linear, n[0]) if linear and n[1] % 4 else somewhere(sch, n[0])).decompose()


def optimize(sch: Schedule, n: Numbers) -> Any:
    """By the default rules, or by two of all."""
    rules = schedule.list_rules()
    some = [_pick(rules, n[1]).name, _pick(rules, n[1] // 5 + n[2]).name]
    return schedule.optimize(_group_or_one(sch, n[0]), rules=some if n[2] % 3 else "default", cost_guard=False)


def annotate(sch: Schedule, n: Numbers) -> Any:
    node = somewhere(sch, n[0])
    names = [name for name, _ in node.module.named_parameters()] or ["weight"]
    return node.annotate(_pick(names, n[1]), _pick(["decay", "lr", "grad", "no name"], n[2]), n[1])


def checkpoint(sch: Schedule, n: Numbers) -> Any:
    where = _group_or_one(sch, n[0])
    if n[1] % 3 == 0:
        return where.checkpoint(_first_found(where, n[2]))
    return where.checkpoint(budget=200 * n[2]) if n[1] % 3 == 1 and n[2] % 2 else where.checkpoint()


def trace(sch: Schedule, n: Numbers) -> Any:
    return _group_or_one(sch, n[0]).trace(flatten=bool(n[1] % 2), leaves=_pick([(), (nn.Linear,), ("act",)], n[2]))


def wrong(sch: Schedule, n: Numbers) -> Any:
    """What can only fail."""
    node, other = somewhere(sch, n[0]), schedule.create_schedule(FOREIGN, torch.zeros(1, 2, 8))
    return _pick(
        [
            lambda: sch["no.such.module"].decompose(),
            lambda: node.find(_wanted(n[1]), expect=99),
            lambda: node.replace(UNFIT),
            lambda: node.replace(sch.module),
            lambda: node.fuse([]),
            lambda: node.fuse(other.find(relu)),
            lambda: node.annotate("no.weight", "decay", 1),
            lambda: node.shard("weight", axis=0),
            lambda: node.replace_all(nn.Conv2d, new_dropout),
            lambda: schedule.optimize(sch, rules="no such rule"),
            lambda: node.checkpoint(every=0),
            lambda: sch.find("no such rule"),
        ],
        n[2],
    )()


def twice(sch: Schedule, n: Numbers) -> Any:
    """Matches used again, which have been consumed: an error that an attempt lets through, after all was undone."""

    def both(where: Schedule) -> None:
        matches = _first_found(where, n[1])
        where.fuse(matches, compiler=None)
        where.fuse(matches, compiler=_compiler(matches))

    done = schedule.attempt(both, somewhere(sch, n[0]))
    raise done.error or AssertionError("matches were fused twice")


def attempted(sch: Schedule, n: Numbers) -> Any:
    """Something, and then something that does not apply; nothing, all in all."""

    def both(sch: Schedule) -> None:
        schedule.attempt(lambda sch: _pick([decompose, replace_all, annotate, fuse], n[2])(sch, n), sch)
        raise NotApplicable("after all not", fix="none")

    done = schedule.attempt(both, sch)
    assert not done and "after all not" in done.why
    raise done.error or AssertionError


class Held:
    """Matches that were found earlier and are used now, whatever was done in between."""

    def __init__(self) -> None:
        self.matches: list[Match] = []

    def find(self, sch: Schedule, n: Numbers) -> None:
        """Look for something to keep."""
        self.matches += _first_found(somewhere(sch, n[0]), n[1])[:2]

    def use(self, sch: Schedule, n: Numbers) -> Any:
        """Fuse one of them, which may be gone."""
        matches = [_pick(self.matches, n[0])] if self.matches else []
        return sch.fuse(matches, compiler=_compiler(matches))


ACTIONS: tuple[Action, ...] = (
    *(fuse, fuse, replace_matches, replace_module, replace_all, decompose, optimize, annotate, checkpoint, trace),
    *(wrong, twice, attempted),
)
