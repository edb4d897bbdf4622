"""Recipes as text: what is wrong with one is said, and no text does anything but that."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedule import Recipe, RecipeError
from schedule.recipes.recipe import from_data
from schedule.recipes.recipe_values import Items, Joined, Made, ModuleCall, Picked, Reference, Table, Torch
from schedule.recipes.steps import Call, Find, Undo

MATCHES = {"matches": "m1", "which": "all"}


def data() -> dict[str, Any]:
    """A recipe with every kind of step."""
    return {
        "version": 1,
        "architecture": "Small",
        "made_with": {"torch": "2.13"},
        "steps": [
            {"find": "m1", "at": ["h.*"], "pattern": "bias_activation", "counts": 1},
            {"call": "fuse", "at": ["h.*"], "arguments": {"matches": dict(MATCHES), "compiler": None}},
            {"call": "optimize", "at": [""], "arguments": {"rules": ["all"]}, "rules": ["sdpa"]},
            {"undo": 1},
        ],
    }


def test_it_reads_and_writes_every_kind_of_value() -> None:
    values = (
        Items("list", (1, Items("tuple", (True, None)))),
        Table((("a b", 0.5), ("matches", "x"))),
        Reference("torch.nn:Linear"),
        Torch("dtype", "bfloat16"),
        Torch("device", "cuda:1"),
        ModuleCall(Reference("torch.nn:Linear")),
        ModuleCall("c_fc"),
        Made(Reference("torch.nn:Dropout"), (("p", 0.25),)),
        Picked("m1"),
        Picked("m1", "parallel"),
        Picked("m1", "each", (0, 2)),
        Picked("m1", "these", (0, (1, 2))),
        Picked("m1", "one", (3,)),
        Joined((Picked("m1"), Picked("m1", "each", (1,)))),
        float("-inf"),
        "'''\\\" \ud800",
        2**80,
    )
    steps = [Find("m1", ("a", "b"), ModuleCall("x"), (1, 0)), Undo(2)]
    calls = [Call("annotate", ("",), (("name", "w"), ("key", "k"), ("value", value))) for value in values]
    recipe = Recipe("", (*steps, *calls))
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert from_data(json.loads(recipe.to_json())) == recipe
    compile(recipe.to_python(), "script", "exec")
    assert str(recipe) and not recipe.diff(Recipe.from_json(recipe.to_json()))
    live = [call.arguments[2][1].live({}) for call in calls[:6]]
    assert live[:4] == [[1, (True, None)], {"a b": 0.5, "matches": "x"}, torch.nn.Linear, torch.bfloat16]
    assert calls[7].arguments[2][1].live({}).p == 0.25


WRONG: list[tuple[list[Any], Any, str, str]] = [
    (["version"], 2, "version 2, and this release reads up to 1", "version"),
    (["version"], True, "a number from 1", "version"),
    (["version"], None, "a number from 1", "version"),
    (["architecture"], 3, "a string, got a int", "architecture"),
    (["made_with"], {"torch": 2}, "a string", "made_with.torch"),
    (["steps"], {}, "a list", "steps"),
    (["more"], 1, "no field 'more'", "the recipe"),
    (["steps", 0], "undo", "an object with one of", "steps[0]"),
    (["steps", 0, "find"], "import os", "a name such as m1", "steps[0].find"),
    (["steps", 0, "at"], [], "at least one path", "steps[0].at"),
    (["steps", 0, "pattern"], 7, "the name of a rule", "steps[0].pattern"),
    (["steps", 0, "counts"], -1, "a number from 0", "steps[0].counts"),
    (["steps", 0, "counts"], [1, "x"], "a number from 0", "steps[0].counts[1]"),
    (["steps", 1, "call"], "fuze", "did you mean 'fuse'", "steps[1].call"),
    (["steps", 1, "call"], "find", "no primitive 'find'", "steps[1].call"),
    (["steps", 1, "call"], "__class__", "import the module that registers it", "steps[1].call"),
    (["steps", 1, "arguments"], {}, "missing a required argument: 'matches'", "steps[1].arguments"),
    (["steps", 1, "arguments", "speed"], 9, "unexpected keyword argument 'speed'", "steps[1].arguments"),
    (["steps", 1, "arguments", "a b"], 9, "not the name of a parameter", "steps[1].arguments"),
    (["steps", 1, "arguments", "sch"], 9, "multiple values", "steps[1].arguments"),
    (["steps", 1, "arguments", "matches"], {**MATCHES, "matches": "m2"}, "no find before it", "steps[1]"),
    (["steps", 1, "arguments", "matches"], {**MATCHES, "which": "x"}, "one of all,", "arguments.matches.which"),
    (["steps", 1, "arguments", "matches"], {**MATCHES, "which": "each"}, "as many numbers", "matches.positions"),
    (["steps", 1, "arguments", "compiler"], {"what": 1}, "an object with one of", "arguments.compiler"),
    (["steps", 1, "arguments", "compiler"], {"reference": "os.system"}, "package.module:function", "compiler"),
    (["steps", 1, "arguments", "compiler"], {"reference": "os:system()"}, "package.module:function", "compiler"),
    (["steps", 1, "arguments", "compiler"], {"dtype": "save"}, "the name of a dtype", "compiler"),
    (["steps", 1, "arguments", "compiler"], {"device": "cpu')"}, "a device", "compiler"),
    (["steps", 1, "arguments", "compiler"], {"float": "1"}, "nan, inf or -inf", "compiler"),
    (["steps", 1, "arguments", "compiler"], {"plan": {"ranks": 2}}, "it is not a plan", "compiler"),
    (["steps", 1, "arguments", "compiler"], {"make": "a:b", "arguments": {"1": 2}}, "names of parameters", "compiler"),
    (["steps", 1, "rules"], ["sdpa"], "for optimize only", "steps[1].rules"),
    (["steps", 2, "rules"], [], "for optimize only", "steps[2].rules"),
    (["steps", 3, "undo"], 0, "a number from 1", "steps[3].undo"),
    (["steps", 3], {"find": "m1", "at": [""], "pattern": "x", "counts": 0}, "two finds are called m1", "steps[3].find"),
]


@pytest.mark.parametrize(("path", "value", "why", "where"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said(path: list[Any], value: Any, why: str, where: str) -> None:
    wrong = data()
    assert from_data(wrong)
    at: Any = wrong
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    for read in (lambda: from_data(wrong), lambda: Recipe.from_json(json.dumps(wrong))):
        with pytest.raises(RecipeError) as caught:
            read()
        assert why in str(caught.value) and where in caught.value.where
        assert caught.value.asked == "read the recipe" and caught.value.fix


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no JSON"),
        ("{", "it is no JSON"),
        ('{"version": NaN}', "NaN is no JSON"),
        ('{"version": 1, "version": 1}', "a key occurs twice"),
        ("[" * 100_000, "it is no JSON"),
        ("9" * 10_000, "it is no JSON"),
        ("[]", "expected an object"),
        (b"\xff", "it is no JSON"),
        (None, "expected JSON text"),
    ],
    ids=range(9),
)
def test_what_is_no_recipe(text: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.from_json(text)


def test_values_nested_too_deep() -> None:
    wrong, value = data(), [1]
    for _ in range(300):
        value = [value]  # type: ignore[list-item]
    wrong["steps"][1]["arguments"]["compiler"] = value
    with pytest.raises(RecipeError, match="nested more than"):
        from_data(wrong)


def test_reading_and_writing_import_nothing() -> None:
    wrong = data()
    wrong["steps"][0]["pattern"] = {"reference": "this:s"}
    sys.modules.pop("this", None)
    recipe = from_data(wrong)
    assert "this.s" in recipe.to_python() and recipe.references == ("this:s",)
    assert str(recipe) and "this" not in sys.modules


def test_no_text_ends_up_as_code() -> None:
    hostile = "\"\"\"\nimport os\nos.system('x')\n'''"
    wrong = data()
    wrong["architecture"], wrong["made_with"] = hostile, {hostile: hostile}
    wrong["steps"][0]["at"] = wrong["steps"][1]["at"] = [hostile, hostile]
    wrong["steps"][0]["pattern"] = hostile
    wrong["steps"][1]["arguments"]["compiler"] = {"dict": {hostile: hostile}}
    text = from_data(wrong).to_python()
    assert [line for line in text.splitlines() if line.startswith("import")] == ["import schedule"]
    compile(text, "script", "exec")


SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
PIECES = st.sampled_from(
    [None, True, 0, 1, -1, 1e999, "m1", "", "fuse", "a:b", "find", [], {}, MATCHES, ["h.*"], {"undo": 1}, {"dict": {}}]
).map(deepcopy)
STEP_KEYS = [
    "version",
    "architecture",
    "steps",
    "find",
    "at",
    "pattern",
    "counts",
    "call",
    "arguments",
    "rules",
    "undo",
]
VALUE_KEYS = ["matches", "which", "positions", "reference", "tuple", "dict", "float", "dtype", "device", "plan", "make"]
KEYS = st.sampled_from([*STEP_KEYS, *VALUE_KEYS, "joined", "call_module", "compiler", "made_with"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | PIECES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def only_a_recipe_error(read: Any) -> None:
    try:
        recipe = read()
    except RecipeError as error:
        assert str(error)
        return
    assert isinstance(recipe, Recipe)
    compile(recipe.to_python(), "script", "exec")
    assert Recipe.from_json(recipe.to_json()).to_json() == recipe.to_json()
    assert recipe.simplified() is not None and isinstance(str(recipe), str)


@SETTINGS
@given(st.text() | JSON.map(json.dumps))
def test_any_text(text: str) -> None:
    only_a_recipe_error(lambda: Recipe.from_json(text))


@SETTINGS
@given(JSON)
def test_any_data(value: Any) -> None:
    only_a_recipe_error(lambda: from_data(value))


@SETTINGS
@given(st.data())
def test_a_recipe_with_something_changed(drawn: st.DataObject) -> None:
    changed = data()
    for _ in range(drawn.draw(st.integers(1, 2))):
        at: Any = changed
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = drawn.draw(st.sampled_from(keys))
            if not isinstance(at[key], (dict, list)) or drawn.draw(st.integers(0, 3)) == 0:
                break
            at = at[key]
        if keys and drawn.draw(st.booleans()):
            at[key] = drawn.draw(JSON)
        elif isinstance(at, dict):
            at[drawn.draw(KEYS)] = drawn.draw(JSON)
        elif keys:
            del at[key]
    only_a_recipe_error(lambda: from_data(changed))


@SETTINGS
@given(st.data())
def test_the_text_of_a_recipe_with_something_changed(drawn: st.DataObject) -> None:
    text = from_data(data()).to_json()
    for _ in range(drawn.draw(st.integers(1, 3))):
        position = drawn.draw(st.integers(0, len(text) - 1))
        text = text[:position] + drawn.draw(st.text(max_size=2)) + text[position + drawn.draw(st.integers(0, 2)) :]
        text = text or " "
    only_a_recipe_error(lambda: Recipe.from_json(text))
