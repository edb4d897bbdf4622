"""Spaces: what can be declared, what is drawn, what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from schedule import NotApplicable, choice, number, splits
from schedule.tuning.space import Choice, Knob, Space


def drawn(space: Space, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)

    def suggest(name: str, knob: Knob) -> Any:
        return draw.choice(knob.values) if isinstance(knob, Choice) else draw.uniform(knob.low, knob.high)

    return space.draw(suggest)


def test_a_list_is_a_choice() -> None:
    assert Space({"every": [0, 1]}).knobs == {"every": choice(0, 1)}


@pytest.mark.parametrize(
    ("values", "ordered"),
    [((1, 2, 8), True), ((8, 2, 1), True), ((0, 2, 1), False), ((True, False), False), (("a", "b"), False)],
)
def test_numbers_in_order_are_a_scale(values: tuple[Any, ...], ordered: bool) -> None:
    assert choice(*values).ordered is ordered


def test_a_knob_that_does_not_matter_is_none() -> None:
    space = Space({"how": ["no", "every", "budget"], "every": choice(1, 2, when={"how": "every"})})
    for seed in range(20):
        point = drawn(space, seed)
        assert (point["every"] is not None) == (point["how"] == "every")
    assert list(space.points()) == [
        {"how": "no", "every": None},
        {"how": "every", "every": 1},
        {"how": "every", "every": 2},
        {"how": "budget", "every": None},
    ]


def test_a_knob_may_matter_for_several_values() -> None:
    space = Space({"what": ["no", "mlp", "all"], "every": choice(1, 2, when={"what": ["mlp", "all"]})})
    assert len(list(space.points())) == 5


def test_numbers_are_whole_if_both_ends_are() -> None:
    assert number(1, 8).whole and not number(1, 8.0).whole
    assert number(1, 8).size == 8 and number(0.0, 1.0).size == float("inf")


def test_splits_multiply_to_divisors() -> None:
    assert splits(4).values == ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
    assert all(8 % (a * b * c) == 0 for a, b, c in splits(8, ways=3).values)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({}, "nothing to tune"),
        ({"a": 3}, "the knob 'a' is 3"),
        ({"a": choice(1, when={"b": 1}), "b": [1]}, "declare 'b' before it"),
        ({"b": [1], "a": choice(1, when={"b": 2})}, "depends on b = 2, which is never so"),
        ({"b": number(0, 1), "a": choice(1, when={"b": 1})}, "as a choice that has this value"),
    ],
)
def test_wrong_spaces_are_refused(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(NotApplicable) as error:
        Space(declared)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "wrong", [lambda: choice(), lambda: choice(1, 1), lambda: number(2, 1), lambda: number(0, 1, True)]
)
def test_wrong_knobs_are_refused(wrong: Any) -> None:
    with pytest.raises(NotApplicable, match="fix: "):
        wrong()
