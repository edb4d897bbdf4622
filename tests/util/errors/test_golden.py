"""How each kind of error reads, compared with a file; ``UPDATE_GOLDEN=1`` writes the files anew."""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import schedule
from schedule.primitives import composing
from schedule.util.errors import (
    MatchError,
    NotApplicable,
    PathError,
    RecipeError,
    ScheduleError,
    ShardError,
    TraceError,
    VerificationError,
)
from tests.small import Mlp, bias_gelu, ids, small

HERE = Path(__file__).parent
X = torch.linspace(-1, 1, 2 * 3 * 16).reshape(2, 3, 16)


class Leaking(nn.Module):
    """The activation's input is read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(16, 16, bias=False), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        biased = self.fc(x) + self.bias
        active = F.gelu(biased, approximate="tanh")
        return active * biased


class Narrow(nn.Module):
    """It takes inputs of one width, and says so in words of its own: torch's differ from release to release."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 16:
            raise ValueError(f"expected 16 features, got {x.shape[-1]}")
        return F.gelu(x + 1, approximate="tanh")


class Mutating(nn.Module):
    """What a match reads changes between its parts."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        self.fc, self.bias = nn.Linear(16, 16, bias=False), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        biased = hidden + self.bias
        hidden.add_(1)
        return F.gelu(biased, approximate=self.approximate) + hidden


class Loud(nn.Module):
    """Its forward branches on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().numpy().sum() > 0:
            return x * 2
        return x


class Holder(nn.Module):
    """A module below the root, so that the path says something."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def wrong_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The exact one, which the model does not compute."""
    return F.gelu(x + bias)


def schedule_of(inner: nn.Module) -> schedule.Schedule:
    return schedule.create_schedule(Holder(inner), X)


def no_such_module() -> None:
    schedule.create_schedule(small(), ids())["blocks.0.mpl"]


def data_dependent_forward() -> None:
    schedule_of(Loud())["inner"].trace()


def near_miss() -> None:
    schedule_of(Mlp(16))["inner"].find(wrong_gelu, expect=1)


def near_misses_of_a_group() -> None:
    schedule.create_schedule(small(), ids())["blocks.*.mlp"].find(wrong_gelu, expect=2)


def too_many_matches() -> None:
    schedule.create_schedule(small(), ids())["blocks.*.mlp"].find(bias_gelu, expect=1)


def interior_value_used_outside() -> None:
    schedule_of(Leaking())["inner"].find(bias_gelu, expect=1)


def mutation_amid_a_match() -> None:
    sch = schedule_of(Mutating())["inner"]
    sch.fuse(sch.find(bias_gelu, expect=1))


def consumed_match() -> None:
    sch = schedule_of(Mlp(16))["inner"]
    matches = sch.find(bias_gelu, expect=1)
    sch.fuse(matches)
    sch.fuse(matches)


def strict_leftovers() -> None:
    exact = Mutating(approximate="none")  # without its bias, this activation alone is no match
    schedule.optimize(schedule_of(exact), rules="bias_activation", strict=True, cost_guard=False)


class Session(nn.Module):
    """Called with an object of its own, which cannot be made up."""

    def forward(self, hidden: torch.Tensor, session: object) -> torch.Tensor:
        return session.embed(hidden)  # type: ignore[attr-defined, no-any-return]


def no_batch() -> None:
    schedule.create_schedule(Session()).graph  # noqa: B018 - the property traces


def shard_without_a_mesh() -> None:
    schedule_of(Mlp(16))["inner.fc1"].shard("weight", axis=0)


def wrong_replacement() -> None:
    sch = schedule_of(Mlp(16))
    sch["inner.act"].replace(nn.ReLU())
    schedule.verify(sch, X)


def unreadable_recipe() -> None:
    schedule.Recipe.from_json('{"version": 1, "architecture"')


def newer_recipe() -> None:
    schedule.Recipe.from_json(fused_recipe().to_json().replace('"version": 1', '"version": 99'))


def unknown_primitive_in_a_recipe() -> None:
    schedule.Recipe.from_json(fused_recipe().to_json().replace('"call": "fuse"', '"call": "fuze"'))


def recipe_for_another_architecture() -> None:
    schedule.replay(Mlp(16), fused_recipe(), X)


def replay_that_diverges() -> None:
    other = small()
    other.blocks[1].mlp.act = nn.ReLU()
    recipe = dataclasses.replace(fused_recipe(), made_with={"torch": "2.13.0"})
    schedule.replay(other, recipe, ids())


def argument_that_no_recipe_can_hold() -> None:
    sch = schedule_of(Mlp(16))
    sch["inner"].replace(lambda x, bias: bias_gelu(x, bias), sch["inner"].find(bias_gelu))
    sch.recipe()


def fused_recipe() -> schedule.Recipe:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find("bias_gelu_tanh", expect=2))
    return sch.recipe()


def none_of_the_alternatives() -> None:
    def fuse_gelu(sch: schedule.Schedule) -> None:
        sch.fuse(sch.find(bias_gelu))

    schedule.first_of(fuse_gelu, schedule.Schedule.decompose)(schedule_of(nn.ReLU())["inner"])


def repetition_without_an_end() -> None:
    def tag(sch: schedule.Schedule) -> None:
        sch.annotate("fc1.weight", "decay", 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composing, "ENDLESS", 10)
        schedule.repeat(tag)(schedule_of(Mlp(16))["inner"])


def module_that_was_replaced() -> None:
    sch = schedule_of(Mlp(16))
    act = sch["inner.act"]
    sch["inner"].replace(nn.Linear(16, 16))
    act.replace(nn.ReLU())


def match_in_what_was_replaced() -> None:
    sch = schedule_of(Mlp(16))["inner"]
    matches = sch.find(bias_gelu, expect=1)
    sch["act"].replace(nn.GELU())
    sch.fuse(matches)


def misspelt_rule_to_find() -> None:
    schedule_of(Mlp(16))["inner"].find("bias_gelu_tahn")


def unknown_rule() -> None:
    schedule.optimize(schedule_of(Mlp(16)), rules="bias_gelu_tahn")


def nothing_to_undo() -> None:
    schedule_of(Mlp(16)).undo()


def nothing_to_fuse() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.*.attn"].fuse(sch["blocks.*.attn"].find(bias_gelu))


def another_signature() -> None:
    schedule_of(Mlp(16))["inner"].replace(nn.Bilinear(16, 16, 16))


def middle_of_anothers_graph() -> None:
    sch = schedule_of(Mlp(16))
    sch.trace(flatten=True)
    sch["inner"].replace(Mlp(16))


def budget_out_of_reach() -> None:
    schedule_of(Mlp(16)).checkpoint(budget=1)


def tag_on_no_parameter() -> None:
    schedule_of(Mlp(16))["inner"].annotate("fc1.wieght", "decay", 0.0)


def compiled_model() -> None:
    model = Holder(Mlp(16))
    model.inner.compile(backend="eager")
    schedule.create_schedule(model, X)


def refused_inputs() -> None:
    schedule.create_schedule(Holder(Narrow()), torch.zeros(2, 3, 4)).find(bias_gelu)


def plan_of_a_part() -> None:
    schedule_of(Mlp(16))["inner"].shard_plan(2)


def plan_of_what_is_rewritten() -> None:
    sch = schedule_of(Mlp(16))
    sch["inner"].fuse(sch["inner"].find(bias_gelu))
    sch.shard_plan(2)


def plan_without_logits() -> None:
    schedule_of(Mlp(16)).shard_plan(2, parallel_loss=True)


KINDS: list[tuple[type[ScheduleError], Callable[[], Any]]] = [
    (PathError, no_such_module),
    (PathError, module_that_was_replaced),
    (TraceError, data_dependent_forward),
    (MatchError, near_miss),
    (MatchError, near_misses_of_a_group),
    (MatchError, too_many_matches),
    (MatchError, interior_value_used_outside),
    (MatchError, mutation_amid_a_match),
    (MatchError, consumed_match),
    (MatchError, match_in_what_was_replaced),
    (MatchError, misspelt_rule_to_find),
    (MatchError, unknown_rule),
    (MatchError, strict_leftovers),
    (NotApplicable, nothing_to_fuse),
    (NotApplicable, nothing_to_undo),
    (NotApplicable, another_signature),
    (NotApplicable, middle_of_anothers_graph),
    (NotApplicable, budget_out_of_reach),
    (NotApplicable, tag_on_no_parameter),
    (NotApplicable, none_of_the_alternatives),
    (NotApplicable, no_batch),
    (NotApplicable, refused_inputs),
    (NotApplicable, compiled_model),
    (NotApplicable, plan_of_a_part),
    (NotApplicable, plan_of_what_is_rewritten),
    (ShardError, plan_without_logits),
    (ShardError, shard_without_a_mesh),
    (ScheduleError, repetition_without_an_end),
    (VerificationError, wrong_replacement),
    (RecipeError, unreadable_recipe),
    (RecipeError, newer_recipe),
    (RecipeError, unknown_primitive_in_a_recipe),
    (RecipeError, recipe_for_another_architecture),
    (RecipeError, replay_that_diverges),
    (RecipeError, argument_that_no_recipe_can_hold),
]
"""Every kind of error, by what causes it; the file has the name of the function."""


def caught(kind: type[ScheduleError], cause: Callable[[], Any]) -> ScheduleError:
    with pytest.raises(kind) as info:
        cause()
    return info.value


def normalized(text: str) -> str:
    """Without what differs between machines: folders of files, and the line numbers of this file."""
    text = re.sub(r"[^\s:(]*/(?=[\w.]+\.py\b)", "", text)
    text = re.sub(r"(?<=test_golden\.py:)\d+", "N", text)
    text = re.sub(r"(?<=small\.py:)\d+", "N", text)
    return re.sub(r"^( +)\d+(?= \| )", r"\1N", text, flags=re.MULTILINE) + "\n"


@pytest.mark.unwritable("some are about a lambda, or a module with weights")
@pytest.mark.parametrize(("kind", "cause"), KINDS, ids=[cause.__name__ for _, cause in KINDS])
def test_an_error_reads_as_its_file_says(kind: type[ScheduleError], cause: Callable[[], Any]) -> None:
    text, golden = normalized(str(caught(kind, cause))), HERE / f"{cause.__name__}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert "\n  fix: " in text


def test_every_file_has_its_error() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == {cause.__name__ for _, cause in KINDS}


def test_a_terminal_shows_the_same_in_colors_and_a_log_none() -> None:
    error = caught(MatchError, mutation_amid_a_match)
    shown = {}
    for system in ("standard", None):
        buffer = io.StringIO()
        Console(file=buffer, width=400, force_terminal=True, color_system=system, highlight=False).print(error)
        shown[system] = buffer.getvalue()
    assert shown[None].rstrip("\n") == str(error) and "\x1b" not in str(error)
    assert "\x1b[1;31m" in shown["standard"]
    assert re.sub(r"\x1b\[[\d;]*m", "", shown["standard"]).rstrip("\n") == str(error)


def test_what_markup_would_eat_is_shown() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(ScheduleError("shapes [2, 3] and [red]", fix="pass [/bold]"))
    assert console.file.getvalue() == "shapes [2, 3] and [red]\n  fix: pass [/bold]\n"  # type: ignore[attr-defined]


def test_the_marked_node_is_the_one_that_is_named() -> None:
    lines = str(caught(MatchError, mutation_amid_a_match)).splitlines()
    marked = lines[next(i for i, line in enumerate(lines) if line.strip().startswith("^^^")) - 1]
    assert marked.strip().startswith("add_ = ")
    assert any(line.strip().endswith("| hidden.add_(1)") for line in lines)


def test_errors_travel_between_processes() -> None:
    error = caught(MatchError, mutation_amid_a_match)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_as_data() -> None:
    told = caught(MatchError, mutation_amid_a_match).to_dict()
    assert told["kind"] == "MatchError" and told["module"] == "inner" and "add_" in told["where"]
    assert any(line.startswith("add_ = ") for line in told["graph"])


def test_whatever_does_not_apply_has_a_fix() -> None:
    """Wherever it is raised: the fix is what the user can do, and none is an error without help."""
    without = []
    for file in (HERE.parents[2] / "schedule").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "NotApplicable":
                without += [f"{file.name}:{node.lineno}"] * (not any(k.arg == "fix" for k in node.keywords))
    assert not without
