"""``replace_all``: every module of a type or by predicate."""

from __future__ import annotations

import pytest
from torch import nn

import schedule
from schedule import Schedule
from tests.fingerprint import fingerprint
from tests.primitives.test_replace import Doubled
from tests.small import Attention, Mlp, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


@pytest.mark.unwritable("what is put in is defined inside the test")
def test_every_module_of_a_type(sch: Schedule) -> None:
    before = fingerprint(sch)
    seen = []

    def make(path: str, module: nn.Module) -> nn.Module:
        seen.append(path)
        return nn.Identity()

    paths = sch.replace_all(nn.Dropout, make)
    assert paths == seen == ["blocks.0.attn.dropout", "blocks.1.attn.dropout"]
    assert len(sch.history) == 1
    assert sch.history[0].description == "replace_all(Dropout, make) on the root"
    sch.undo()
    assert fingerprint(sch) == before


@pytest.mark.unwritable("modules are chosen by a lambda")
def test_by_predicate_and_outermost_only(sch: Schedule) -> None:
    paths = sch["blocks.0"].replace_all(
        lambda path, module: "fc1" in path or path == "mlp",
        lambda path, module: Doubled() if path == "mlp" else module,
    )
    assert paths == ["mlp"]


def test_replace_all_refusals(sch: Schedule) -> None:
    before = fingerprint(sch)
    with pytest.raises(schedule.NotApplicable, match="no module in the root is a Conv2d"):
        sch.replace_all(nn.Conv2d, lambda path, module: nn.Identity())
    with pytest.raises(schedule.NotApplicable, match="returned each of the 2 modules itself"):
        sch.replace_all(Attention, lambda path, module: module)
    with pytest.raises(schedule.NotApplicable, match="not by NoneType"):
        sch.replace_all((Attention, Mlp), lambda path, module: Doubled() if "mlp" in path else None)  # type: ignore
    assert fingerprint(sch) == before
