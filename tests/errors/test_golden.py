"""How each kind of error reads, compared with a file; ``UPDATE_GOLDEN=1`` writes the files anew."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import schedule
from schedule.errors import (
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


class Mutating(nn.Module):
    """What a match reads changes between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(16, 16, bias=False), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        biased = hidden + self.bias
        hidden.add_(1)
        return F.gelu(biased, approximate="tanh") + hidden


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
    schedule.optimize(schedule_of(Mutating()), rules="bias_activation", strict=True, cost_guard=False)


def no_batch() -> None:
    schedule.create_schedule(Mlp(16)).graph  # noqa: B018 - the property traces


def shard_without_a_mesh() -> None:
    schedule_of(Mlp(16))["inner.fc1"].shard("weight", axis=0)


def wrong_replacement() -> None:
    sch = schedule_of(Mlp(16))
    sch["inner.act"].replace(nn.ReLU())
    schedule.verify(sch, X)


def unreadable_recipe() -> None:
    raise RecipeError(
        "step 3, fuse(bias_gelu) on h.7.mlp, found nothing to fuse",
        asked="replay",
        module="h.7.mlp",
        fix="record the recipe again on this architecture",
    )


KINDS: list[tuple[type[ScheduleError], Callable[[], None]]] = [
    (PathError, no_such_module),
    (TraceError, data_dependent_forward),
    (MatchError, near_miss),
    (MatchError, near_misses_of_a_group),
    (MatchError, too_many_matches),
    (MatchError, interior_value_used_outside),
    (MatchError, mutation_amid_a_match),
    (MatchError, consumed_match),
    (MatchError, strict_leftovers),
    (NotApplicable, no_batch),
    (ShardError, shard_without_a_mesh),
    (VerificationError, wrong_replacement),
    (RecipeError, unreadable_recipe),
]
"""Every kind of error, by what causes it; the file has the name of the function."""


def caught(kind: type[ScheduleError], cause: Callable[[], None]) -> ScheduleError:
    with pytest.raises(kind) as info:
        cause()
    return info.value


def normalised(text: str) -> str:
    """Without what differs between machines: folders of files, and the line numbers of this file."""
    text = re.sub(r"[^\s:(]*/(?=[\w.]+\.py\b)", "", text)
    text = re.sub(r"(?<=test_golden\.py:)\d+", "N", text)
    text = re.sub(r"(?<=small\.py:)\d+", "N", text)
    return re.sub(r"^( +)\d+(?= \| )", r"\1N", text, flags=re.MULTILINE) + "\n"


@pytest.mark.parametrize(("kind", "cause"), KINDS, ids=[cause.__name__ for _, cause in KINDS])
def test_an_error_reads_as_its_file_says(kind: type[ScheduleError], cause: Callable[[], None]) -> None:
    text, golden = normalised(str(caught(kind, cause))), HERE / f"{cause.__name__}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert "\n  fix: " in text


def test_every_file_has_its_error() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == {cause.__name__ for _, cause in KINDS}


def test_a_terminal_shows_the_same_in_colours_and_a_log_none() -> None:
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
