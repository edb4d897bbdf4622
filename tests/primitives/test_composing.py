"""Functions over schedules put together: attempt, first_of, repeat, for_each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule import (
    Attempt,
    Match,
    NotApplicable,
    Schedule,
    attempt,
    first_of,
    for_each,
    repeat,
)
from schedule.primitives import composing
from schedule.primitives.registry import unregister
from tests.fingerprint import fingerprint
from tests.small import bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), ids())


def fuse_gelu(mlp: Any) -> int:
    """Applies to what has a GELU."""
    matches = mlp.find(bias_gelu)
    mlp.fuse(matches)
    return len(matches)


def tag_then_refuse(mlp: Any, draw: bool = False) -> None:
    """Changes something, then does not apply."""
    mlp.annotate("fc1.weight", "seen", True)
    if draw:
        torch.rand(3), random.random()
    raise NotApplicable("it is not the one", fix="try another")


def tag_then_break(mlp: Any) -> None:
    """Changes something, then has a bug."""
    mlp.annotate("fc1.weight", "seen", True)
    raise TypeError("a bug")


def described(sch: Schedule) -> list[str]:
    return [step.description for step in sch.history]


# -- attempt --------------------------------------------------------------------------------------------------


def test_an_attempt_that_applies_is_as_if_it_were_called(sch: Schedule) -> None:
    done = attempt(fuse_gelu, sch["blocks.0.mlp"])
    assert done and done.value == 1 and not done.why
    assert described(sch) == ["fuse(bias_gelu) on blocks.0.mlp"]


@pytest.mark.parametrize("where", ["blocks.0.mlp", "blocks.*.mlp"])
def test_an_attempt_that_does_not_apply_changes_nothing_and_says_why(sch: Schedule, where: str) -> None:
    sch["blocks.0.attn"].annotate("q.weight", "decay", 0.0)
    sch["blocks.0.attn"].annotate("k.weight", "decay", 0.0)
    sch.undo()
    before, recipe = fingerprint(sch), sch.recipe()
    done = attempt(tag_then_refuse, sch[where], draw=True)
    assert not done and done.value is None and isinstance(done.error, NotApplicable)
    assert "it is not the one" in done.why and "try another" in done.why
    assert fingerprint(sch) == before and sch.recipe() == recipe
    sch.redo()  # what was undone before is still there to be done again
    assert "'k.weight'" in described(sch)[-1]


def test_steps_undone_inside_come_back(sch: Schedule) -> None:
    sch["blocks.0.mlp"].fuse(sch["blocks.0.mlp"].find(bias_gelu))
    sch["blocks.1"].checkpoint()
    before, steps = fingerprint(sch), sch.history

    def undo_and_refuse(sch: Schedule) -> None:
        sch.undo().undo()
        sch["blocks.0.mlp"].decompose()

    assert "neither a Linear" in attempt(undo_and_refuse, sch).why
    assert all(a is b for a, b in zip(sch.history, steps, strict=True))
    assert fingerprint(sch) == before


@pytest.mark.parametrize("error", [TypeError, schedule.MatchError, KeyboardInterrupt])
def test_a_real_error_goes_through_and_leaves_nothing(sch: Schedule, error: type[BaseException]) -> None:
    def broken(sch: Schedule) -> None:
        sch["blocks.0"].checkpoint()
        raise error("no")

    before = fingerprint(sch)
    for run in (attempt, lambda fn, sch: first_of(fn, fuse_gelu)(sch), lambda fn, sch: repeat(fn)(sch)):
        with pytest.raises(error):
            run(broken, sch)
        assert fingerprint(sch) == before


def test_what_is_no_schedule(sch: Schedule) -> None:
    for wrong in (sch.module, fuse_gelu, "blocks.0"):
        with pytest.raises(schedule.ScheduleError, match=r"is not a schedule(?s:.*)attempt\(function, sch"):
            attempt(fuse_gelu, wrong)
    with pytest.raises(schedule.ScheduleError, match=r"repeat\(fuse_gelu\)\(sch"):
        repeat(fuse_gelu)(3)


@pytest.mark.unwritable("the primitive is registered while the test runs only")
def test_in_a_primitive_it_is_part_of_the_step(sch: Schedule) -> None:
    @schedule.primitive
    def polish(sch: Schedule) -> int:
        """Do what can be done."""
        sch.annotate("embed.weight", "first", True)
        assert not attempt(tag_then_refuse, sch["blocks.0.mlp"], draw=True)
        done = for_each("blocks.*.mlp", lambda mlp: attempt(fuse_gelu, mlp))(sch)
        return sum(map(bool, done))

    @schedule.primitive
    def polish_wrongly(sch: Schedule) -> None:
        """Do it, and fail."""
        sch.polish()
        raise NotApplicable("no")

    try:
        before = fingerprint(sch)
        with pytest.raises(NotApplicable):
            sch.polish_wrongly()
        assert fingerprint(sch) == before
        assert not attempt(lambda s: s.polish_wrongly(), sch)
        assert fingerprint(sch) == before
        assert sch.polish() == 2
        assert described(sch) == ["polish() on the root"]
        assert sch.history[0].touched == {"": 1, "blocks.0.mlp": 1, "blocks.1.mlp": 1}
        assert not hasattr(sch.module.blocks[0].mlp.fc1.weight, "seen")
        sch.undo()
        assert {k: v for k, v in fingerprint(sch).items() if "generator" not in k} == {
            k: v for k, v in before.items() if "generator" not in k
        }
    finally:
        unregister("polish")
        unregister("polish_wrongly")


@pytest.mark.unwritable("the primitive is registered while the test runs only")
def test_in_a_groups_step(sch: Schedule) -> None:
    """A primitive of the user's on a group: attempts within each member, all or nothing for the group."""

    @schedule.primitive
    def fuse_if_first(mlp: Schedule) -> bool:
        """Fuse the first only."""
        if mlp.path == "blocks.1.mlp":
            return bool(attempt(tag_then_refuse, mlp))
        return bool(attempt(fuse_gelu, mlp))

    try:
        assert sch["blocks.*.mlp"].fuse_if_first() == [True, False]
        assert len(sch.history) == 1 and list(sch.history[0].touched) == ["blocks.0.mlp"]
        sch.undo()
        assert "Scheduled" not in type(sch.module.blocks[0].mlp).__qualname__ and not sch.history
    finally:
        unregister("fuse_if_first")


def test_attempts_nest(sch: Schedule) -> None:
    def outer(sch: Schedule) -> None:
        assert attempt(fuse_gelu, sch["blocks.0.mlp"])
        assert not attempt(tag_then_refuse, sch["blocks.1.mlp"])
        sch["blocks.1"].checkpoint()
        raise NotApplicable("after all", fix="none")

    before = fingerprint(sch)
    assert attempt(outer, sch).error
    assert fingerprint(sch) == before and not sch.recipe().steps


# -- first_of, repeat, for_each ----------------------------------------------------------------------------------


def test_first_of(sch: Schedule) -> None:
    either = first_of(tag_then_refuse, fuse_gelu)
    assert either(sch["blocks.0.mlp"]) == 1
    assert described(sch) == ["fuse(bias_gelu) on blocks.0.mlp"]
    before = fingerprint(sch)
    with pytest.raises(NotApplicable) as caught:
        either(sch["blocks.0.mlp"])
    assert fingerprint(sch) == before
    assert str(caught.value) == (
        "cannot first_of(tag_then_refuse, fuse_gelu): none of 2 alternatives applies\n"
        "  where: blocks.0.mlp\n"
        "    tag_then_refuse: it is not the one\n"
        "    fuse_gelu: no matches were given\n"
        "  fix: try another"
    )
    with pytest.raises(schedule.ScheduleError, match="nothing to choose from"):
        first_of()


def one_dropout(sch: Schedule) -> None:
    """Take one dropout out."""
    found = [node for _, node in sch.named_schedules() if type(node.module) is nn.Dropout]
    if not found:
        raise NotApplicable("there is no dropout left", fix="none is needed")
    found[0].replace(nn.Identity())


def test_repeat(sch: Schedule) -> None:
    assert repeat(one_dropout, times=1)(sch) == 1
    assert repeat(one_dropout)(sch) == 1 and repeat(one_dropout)(sch) == 0
    assert repeat(lambda sch: None)(sch) == 0  # it changes nothing
    assert repeat(lambda sch: sch["blocks.0"].checkpoint() and sch.undo())(sch) == 0
    assert repeat(one_dropout, times=0)(sch) == 0
    assert len(sch.history) == 2
    for wrong in (-1, 1.5, True):
        with pytest.raises(schedule.ScheduleError, match="times is a number from 0"):
            repeat(one_dropout, times=wrong)  # type: ignore[arg-type]


def test_repeat_ends(sch: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composing, "ENDLESS", 5)
    before = fingerprint(sch)
    with pytest.raises(schedule.ScheduleError, match=r"repeat\(tag\): tag still changes the model after 5 times"):

        def tag(sch: Schedule) -> None:
            sch.annotate("embed.weight", "again", True)

        repeat(tag)(sch)
    assert fingerprint(sch) == before


def test_for_each_module(sch: Schedule) -> None:
    assert for_each("blocks.*.mlp", fuse_gelu)(sch) == [1, 1]
    sch.undo()
    sch.undo()
    assert for_each(sch["blocks.*.mlp"], fuse_gelu)(sch) == [1, 1]
    sch.undo()
    assert for_each("mlp", fuse_gelu)(sch["blocks.1"]) == [1]
    assert for_each("mlp.fc1", lambda fc: fc.path)(sch["blocks.*"]) == ["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]
    with pytest.raises(schedule.PathError, match="no module matches"):
        for_each("layers.*", fuse_gelu)(sch)


def test_for_each_is_all_or_nothing_unless_each_is_an_attempt(sch: Schedule) -> None:
    fuse_gelu(sch["blocks.1.mlp"])
    before = fingerprint(sch)
    with pytest.raises(NotApplicable, match="no matches were given"):
        for_each("blocks.*.mlp", fuse_gelu)(sch)
    assert fingerprint(sch) == before
    done = for_each("blocks.*.mlp", lambda mlp: attempt(fuse_gelu, mlp))(sch)
    assert [bool(each) for each in done] == [True, False]


def test_for_each_match(sch: Schedule) -> None:
    def fuse_it(match: Match) -> str:
        match.schedule.fuse([match])
        return match.path

    mlps = sch["blocks.*.mlp"]
    assert for_each(bias_gelu, fuse_it)(mlps) == mlps.paths
    with pytest.raises(NotApplicable, match=r"cannot for_each\(bias_gelu, fuse_it\): the pattern occurs nowhere"):
        for_each(bias_gelu, fuse_it)(mlps)
    assert repeat(for_each(bias_gelu, fuse_it))(mlps) == 0
    sch.undo()
    sch.undo()
    assert for_each(mlps.find("bias_gelu_tanh"), fuse_it)(sch) == mlps.paths
    other = schedule.create_schedule(small(), ids())
    for where, wrong in (([other], "of another schedule"), (["mlp"], "a str is neither")):
        with pytest.raises(schedule.ScheduleError, match=wrong):
            for_each(where, fuse_it)(sch)


def test_they_compose(sch: Schedule) -> None:
    """And the recipe has what stood in the end, which makes the same of a deeper model."""
    whole = for_each("blocks.*.mlp", first_of(tag_then_refuse, repeat(fuse_gelu)))
    assert whole.__name__ == "for_each('blocks.*.mlp', first_of(tag_then_refuse, repeat(fuse_gelu)))"
    assert attempt(whole, sch) == Attempt([1, 1])
    recipe = sch.recipe()
    assert len(recipe.steps) == 2, "one find, one fuse, for all blocks"
    deep = schedule.replay(small(4), recipe, ids())
    twin = schedule.create_schedule(small(4), ids())
    attempt(whole, twin)
    deep.module.eval(), twin.module.eval()
    assert torch.equal(deep.module(**ids()), twin.module(**ids())) and not deep.recipe().diff(twin.recipe())


def test_whole_recipes_and_optimize_are_taken_back(sch: Schedule) -> None:
    fuse_gelu(sch["blocks.0.mlp"])
    recipe = sch.recipe()
    sch.undo()

    def both(sch: Schedule, last: Callable[[Schedule], Any]) -> None:
        schedule.replay(sch, recipe)
        schedule.optimize(sch, cost_guard=False)
        assert len(sch.history) > 1
        last(sch)

    before = fingerprint(sch)
    assert not attempt(both, sch, lambda sch: sch["head"].decompose())
    assert fingerprint(sch) == before
    with pytest.raises(NotApplicable, match=r"cannot replay: (?s:.*)is still running(?s:.*)fix: replay outside"):

        @schedule.primitive
        def replayed(sch: Schedule) -> None:
            """A recipe is steps, and a primitive is one."""
            schedule.replay(sch, recipe)

        try:
            sch.replayed()
        finally:
            unregister("replayed")
