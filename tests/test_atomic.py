"""A fault at any step inside any primitive changes nothing; nor does any bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import Schedule
from schedule.core import history
from tests.fingerprint import fingerprint
from tests.primitives.test_replace import Act, Doubled, projection, qkv
from tests.small import bias_gelu, ids, small

Attempt = Callable[[Schedule], Any]


def _made(path: str, module: nn.Module) -> nn.Module:
    return nn.Dropout(torch.rand(()).item())  # draws: that must be taken back too


PRIMITIVES: dict[str, Attempt] = {
    "trace": lambda sch: sch["blocks.*"].trace(flatten=True),
    "trace_until": lambda sch: sch.trace_until("blocks.*.mlp"),
    "fuse by rule": lambda sch: sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu)),
    "fuse by inductor": lambda sch: sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu), "inductor"),
    "fuse as one call": lambda sch: sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu), None),
    "replace a module": lambda sch: sch["blocks.0.mlp"].replace(SPARES["mlp"]),
    "replace a tied module": lambda sch: sch["head"].replace(SPARES["head"]),
    "replace chains": lambda sch: sch["blocks.*.mlp"].replace(bias_gelu, sch["blocks.*.mlp"].find(bias_gelu)),
    "replace a chain by a module": lambda sch: sch.replace(SPARES["act"], sch["blocks.0.mlp"].find(bias_gelu)),
    "replace parallel chains": lambda sch: sch["blocks.0.attn"].replace(
        qkv, sch["blocks.0.attn"].find_parallel(projection)
    ),
    "replace_all": lambda sch: sch.replace_all(nn.Dropout, _made),
    "decompose": lambda sch: sch["blocks.*.mlp.fc1"].decompose(),
    "annotate": lambda sch: sch["blocks.*.mlp"].annotate("fc1.weight", "decay", 0.0),
    "checkpoint": lambda sch: sch["blocks.*"].checkpoint(),
    "checkpoint what has graphs": lambda sch: sch["blocks.1.attn"].checkpoint(),
    "checkpoint matches": lambda sch: sch["blocks.*.mlp"].checkpoint(sch["blocks.*.mlp"].find(bias_gelu)),
    "checkpoint within a budget": lambda sch: sch["blocks.*"].checkpoint(budget=8000),
    "cut_pipeline_stage": lambda sch: sch["blocks.0"].cut_pipeline_stage(),
    "optimize": lambda sch: sch["blocks.*.mlp"].optimize(cost_guard=False),
    "find": lambda sch: sch["blocks.*.mlp"].find(bias_gelu),
    "find_parallel": lambda sch: sch["blocks.0.attn"].find_parallel(projection),
}


SPARES: dict[str, nn.Module] = {}
ELSEWHERE = {"fork_rng", "shard", "shard_experts", "sync", "context_parallel", "shard_plan", "apply_plan"}
"""These need a mesh: see ``tests/distributed``."""


def test_every_primitive_is_here() -> None:
    here = {name.split()[0] for name in PRIMITIVES}
    assert here >= schedule.list_primitives().keys() - ELSEWHERE


class Session(nn.Module):
    """Called with an object of its own, which cannot be made up."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor, session: Any) -> Any:
        """Ask the object."""
        return self.inner(session.embed(ids))


class Fault(Exception):
    """The injected one."""


def _scheduled() -> Schedule:
    """A schedule with something done, something undone, hooks and tags."""
    SPARES.update(mlp=Doubled(), head=nn.Linear(16, 32, bias=False), act=Act())
    sch = schedule.create_schedule(small(), batch=ids())
    sch["blocks.1.attn"].fuse(sch["blocks.1.attn"].find(lambda s: F.softmax(s, dim=-1)), compiler=None)
    sch["blocks.0.mlp.fc1"].annotate("weight", "seen", True)
    sch["blocks.0.mlp.fc1"].annotate("weight", "undone", True)
    sch.undo()
    sch.module.blocks[0].mlp.register_forward_hook(_hook)
    sch.module.blocks[0].attn.register_forward_pre_hook(_pre_hook, with_kwargs=True)
    return sch


def _hook(module: nn.Module, args: Any, output: Any) -> None: ...
def _pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None: ...


def _without_hooks(sch: Schedule) -> None:
    """Flattening would swallow them."""
    sch.module.blocks[0].mlp._forward_hooks.clear()
    sch.module.blocks[0].attn._forward_pre_hooks.clear()
    sch.module.blocks[0].attn._forward_pre_hooks_with_kwargs.clear()


@pytest.mark.one_in(9)
@pytest.mark.unwritable("a lambda is looked for, and modules with weights take others' places")
@pytest.mark.parametrize("name", PRIMITIVES)
@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt])
def test_a_fault_at_any_step_changes_nothing(
    name: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step = PRIMITIVES[name], 0
    while True:
        sch = _scheduled()
        if name.startswith("trace"):
            _without_hooks(sch)
        points: list[str] = []

        def reached(point: str, points: list[str] = points, step: int = step) -> None:
            points.append(point)
            if len(points) == step + 1:
                raise kind(point)

        before = fingerprint(sch, *SPARES.values())
        with monkeypatch.context() as patch:
            patch.setattr(history, "reached", reached)
            try:
                run(sch)
            except kind:
                pass
            else:
                break
        now = fingerprint(sch, *SPARES.values())
        changed = [key for key in before if before[key] != now.get(key)]
        assert now == before, f"a fault at {points[-1]!r} (step {step}) changed {changed}"
        sch.redo()  # what could be redone still can
        step += 1
    assert step >= (0 if name.startswith("find") else 4), f"only {step} steps: {points}"


@pytest.mark.unwritable("a lambda is looked for, and modules with weights take others' places")
@pytest.mark.parametrize("name", [name for name in PRIMITIVES if not name.startswith("find")])
def test_undo_is_exact_and_redo_too(name: str) -> None:
    sch = _scheduled()
    if name.startswith("trace"):
        _without_hooks(sch)
    before, count = fingerprint(sch), len(sch.history)
    PRIMITIVES[name](sch)
    assert len(sch.history) == count + 1
    after = fingerprint(sch)
    assert after != before
    for _ in range(2):
        sch.undo()
        assert _but_generator(fingerprint(sch)) == _but_generator(before)
        sch.redo()
        assert _but_generator(fingerprint(sch)) == _but_generator(after)


def _but_generator(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if "generator" not in key}


# -- bad input ----------------------------------------------------------------------------------------------


class TwoArguments(nn.Module):
    def forward(self, hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return hidden


def _foreign(sch: Schedule) -> list[schedule.Match]:
    with torch.random.fork_rng():
        other = schedule.create_schedule(small(), batch=ids())
    return other["blocks.0.mlp"].find(bias_gelu)


def _consumed(sch: Schedule) -> list[schedule.Match]:
    (step,) = [step for step in sch.history if step.primitive == "fuse"]
    found: list[schedule.Match] = step.arguments["matches"]
    return found


BAD_INPUT: dict[str, tuple[Attempt, type[Exception], str]] = {
    "unknown path": (lambda s: s["blocks.0.mpl"], schedule.PathError, "blocks.0.mlp"),
    "nothing matches": (
        lambda s: s["blocks.*.mlp"].find(lambda x, b: F.silu(x + b), expect=12),
        schedule.MatchError,
        r"found 0 times in 2 modules, expected 12",
    ),
    "another signature": (
        lambda s: s["blocks.1.mlp"].replace(TwoArguments()),
        schedule.NotApplicable,
        "another signature",
    ),
    "a function of another signature": (
        lambda s: s["blocks.1.mlp"].replace(lambda x: x, s["blocks.1.mlp"].find(bias_gelu)),
        schedule.NotApplicable,
        "another signature than the pattern",
    ),
    "untraceable": (lambda s: s["branching"].find(bias_gelu), schedule.TraceError, r"small\.py:\d+"),
    "untraceable in the middle": (lambda s: s.trace(flatten=True), schedule.TraceError, "leaves="),
    "match of another model": (
        lambda s: s["blocks.1.mlp"].fuse(_foreign(s)),
        schedule.MatchError,
        "from another model",
    ),
    "match consumed": (
        lambda s: s["blocks.0.mlp"].fuse(_consumed(s)),
        schedule.MatchError,
        r"consumed by fuse\(bias_gelu\) on blocks.0.mlp",
    ),
    "interior node used outside": (
        lambda s: s["leaky"].find(lambda x: torch.tanh(torch.exp(x)), expect=1),
        schedule.MatchError,
        "expected no use outside the match, found a use by add",
    ),
    "swallowed hook": (
        lambda s: s["blocks.1"].replace(lambda h: h, s["blocks.1"].find("mlp")),
        schedule.MatchError,
        "mlp has a hook that the rewrite would swallow",
    ),
    "swallowed hook by flattening": (
        lambda s: s["blocks.1"].trace(flatten=True),
        schedule.TraceError,
        "would be swallowed",
    ),
    "middle of another graph": (
        lambda s: s["nested.0"].find(bias_gelu),
        schedule.NotApplicable,
        "in the middle of the graph of nested",
    ),
    "example inputs that the model refuses": (
        lambda s: schedule.create_schedule(s.module, {"idx": ids()["ids"]}).find(bias_gelu),
        schedule.NotApplicable,
        r"refused the example inputs: TypeError(?s:.*)'idx'(?s:.*)forward\(",
    ),
    "no example inputs": (
        lambda s: schedule.create_schedule(Session(s.module)).find(bias_gelu),
        schedule.NotApplicable,
        r"pass a batch: batch=dict\(ids=…, session=…\)",
    ),
}


class Leaky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.exp(x)
        return torch.tanh(inner) + inner


class WithMore(nn.Module):
    """The small model and what bad input needs."""

    def __init__(self) -> None:
        super().__init__()
        inner = small()
        self.embed, self.blocks, self.branching, self.head = inner.embed, inner.blocks, inner.branching, inner.head
        self.leaky, self.nested = Leaky(), nn.Sequential(type(inner.blocks[0].mlp)(16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.branching(self.leaky(self.nested(hidden))))


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_has_its_own_error_and_changes_nothing(name: str) -> None:
    attempt, kind, message = BAD_INPUT[name]
    sch = schedule.create_schedule(WithMore(), batch=ids())
    sch.module.blocks[1].mlp.register_forward_hook(_hook)
    sch["nested"].trace(flatten=True)
    mlp = sch["blocks.0.mlp"]
    mlp.fuse(mlp.find(bias_gelu))
    sch.undo()
    sch.redo()
    before = fingerprint(sch)
    with pytest.raises(kind, match=message) as caught:
        attempt(sch)
    if name != "unknown path":
        assert "cannot " in str(caught.value), "says what was asked"
    assert fingerprint(sch) == before
