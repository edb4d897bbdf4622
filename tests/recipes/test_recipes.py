"""Recipes of a small model: what is recorded, JSON and Python, other depths, divergences, simplification."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import schedule
from schedule import Match, Recipe, RecipeError, Schedule
from schedule.recipes.describing import described
from schedule.recipes.steps import Call, Find, Undo
from tests.fingerprint import fingerprint
from tests.recipes.helpers import (
    gelu_of_sum,
    half_dropout,
    projection,
    projections,
    round_trip,
    scripted,
    softmax_dropout,
)
from tests.small import bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), ids())


def test_every_primitive_replays_bit_exact(sch: Schedule) -> None:
    sch["blocks.*.norm"].annotate("weight", "decay", 0.0)
    sch["blocks.*"].replace_all(nn.Dropout, half_dropout)
    sch["blocks.*.mlp"].trace(flatten=True, leaves=(nn.Linear, "fc1"))
    sch["blocks.*.mlp.fc1"].decompose()
    mlps = sch["blocks.*.mlp"]
    mlps.replace(gelu_of_sum, mlps.find(bias_gelu, expect=2))
    attn = sch["blocks.*.attn"]
    attn.fuse(attn.find(softmax_dropout, expect=2), compiler=None)
    sch["blocks.*"].checkpoint(every=2)
    recipe = round_trip(sch, small, ids())
    assert [step.primitive for step in recipe.steps if isinstance(step, Call)] == [
        "annotate",
        "replace_all",
        "trace",
        "decompose",
        "replace",
        "fuse",
        "checkpoint",
    ]


def test_parallel_matches(sch: Schedule) -> None:
    attn = sch["blocks.*.attn"]
    attn.replace(projections, attn.find_parallel(projection, expect=2))
    recipe = round_trip(sch, small, ids())
    assert "parallel_of(m1)" in recipe.to_python()
    twelve = schedule.replay(small(4), recipe, ids())
    assert len(twelve.history[-1].touched) == 4


def test_optimize_by_its_rules_or_singly(sch: Schedule) -> None:
    schedule.optimize(sch, rules="all", cost_guard=False)
    assert len(sch.history) > 1
    recipe = round_trip(sch, small, ids())
    assert [str(step).partition("(")[0] for step in recipe.steps] == ["optimize"]
    singly = sch.recipe(singly=True)
    assert {step.primitive for step in singly.steps if isinstance(step, Call)} == {"fuse"}
    twin = schedule.replay(small(), singly, ids())
    assert twin.recipe() == singly and len(twin.history) == len(sch.history)
    sch.undo()
    recipe = round_trip(sch, small, ids())
    assert recipe.steps[-1] == Undo(1)


def test_what_layers_get_one_by_one_is_said_once(sch: Schedule) -> None:
    for index in range(2):
        mlp = sch[f"blocks.{index}.mlp"]
        mlp.fuse(mlp.find(bias_gelu, expect=1))
        sch[f"blocks.{index}.attn"].checkpoint()
    recipe = round_trip(sch, small, ids())
    assert [step.at for step in recipe.steps if not isinstance(step, Undo)] == [
        ("blocks.*.mlp",),
        ("blocks.*.mlp",),
        ("blocks.*.attn",),
    ]
    deep = schedule.replay(small(12), recipe, ids())
    assert len(deep.history) == 2 and all(len(step.touched) == 12 for step in deep.history)
    by_hand = schedule.create_schedule(small(12), ids())
    scripted(recipe, by_hand)
    assert by_hand.recipe() == deep.recipe() == recipe
    assert schedule.verify(deep, ids())


def test_what_one_layer_gets_is_not_for_all(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    mlp.fuse(mlp.find(bias_gelu, expect=1))
    recipe = round_trip(sch, small, ids())
    deep = schedule.replay(small(3), recipe, ids())
    assert list(deep.history[0].touched) == ["blocks.0.mlp"]


def test_some_matches_of_each_module(sch: Schedule) -> None:
    attn = sch["blocks.*.attn"]
    matches = attn.find(projection, expect=8)
    attn.fuse([matches[1], matches[5]], compiler=None)
    recipe = round_trip(sch, small, ids())
    assert "each_of(m1, [1])" in recipe.to_python()
    assert len(schedule.replay(small(3), recipe, ids()).history[0].touched) == 3


def test_matches_found_before_earlier_steps(sch: Schedule) -> None:
    """A later find of the same pattern would find fewer: the find keeps its place in the recipe."""
    attn = sch["blocks.0.attn"]
    matches = attn.find(projection, expect=4)
    attn.fuse(matches[:1], compiler=None)
    attn.fuse([matches[2], matches[1]], compiler=None)
    recipe = round_trip(sch, small, ids())
    assert [type(step) for step in recipe.steps] == [Find, Call, Call]


def test_finds_of_all_layers_before_what_uses_them(sch: Schedule) -> None:
    mlps = [sch[f"blocks.{i}.mlp"] for i in range(2)]
    found = [mlp.find(bias_gelu, expect=1) for mlp in mlps]
    for matches in found:
        sch.fuse(matches, compiler=None)
    recipe = round_trip(sch, small, ids())
    assert [type(step) for step in recipe.steps] == [Find, Find, Call, Call]


def test_matches_of_several_finds(sch: Schedule) -> None:
    mlp, attn = sch["blocks.0.mlp"], sch["blocks.0.attn"]
    sch.fuse([*mlp.find(bias_gelu, expect=1), *attn.find(softmax_dropout, expect=1)], compiler=None)
    round_trip(sch, small, ids())


@pytest.mark.unwritable("the primitive is registered while the test runs only")
def test_modules_without_state_and_a_primitive_of_the_users(sch: Schedule) -> None:
    from schedule.primitives.registry import unregister

    @schedule.primitive
    def softened(sch: Schedule, match: Match, **options: float) -> None:
        """Takes one match, and any options."""
        sch.fuse([match], compiler=None)

    try:
        sch["blocks.0.mlp.act"].replace(nn.GELU(approximate="none"))
        mlp = sch["blocks.1.mlp"]
        mlp.softened(mlp.find(bias_gelu, expect=1)[0], strength=float("inf"))
        recipe = sch.recipe()
        assert recipe.steps[0] == Recipe.from_json(recipe.to_json()).steps[0]
        twin = schedule.replay(small(), recipe, ids())
        assert twin.recipe() == recipe == Recipe.from_json(recipe.to_json())
        assert twin.module.blocks[0].mlp.act.approximate == "none"
    finally:
        unregister("softened")


def test_paths_that_no_glob_means(sch: Schedule) -> None:
    deep = schedule.create_schedule(small(4), ids())
    deep["blocks.*"][1:3].checkpoint()
    recipe = round_trip(deep, lambda: small(4), ids())
    assert recipe.steps == (Call("checkpoint", ("blocks.1", "blocks.2")),)


@pytest.mark.unwritable("that is what it is about")
@pytest.mark.parametrize("what", ["lambda", "local", "weights", "tensor", "main"])
def test_what_cannot_be_written_down(sch: Schedule, what: str) -> None:
    mlp = sch["blocks.0.mlp"]
    if what == "lambda":
        mlp.fuse(mlp.find(lambda x, b: torch.nn.functional.gelu(x + b, approximate="tanh"), expect=1), compiler=None)
    elif what == "local":

        def make(path: str, module: nn.Module) -> nn.Module:
            return nn.Identity()

        mlp.replace_all(nn.GELU, make)
    elif what == "weights":
        mlp["fc1"].replace(nn.Linear(16, 32))
    elif what == "tensor":
        mlp.annotate("fc1.weight", "scale", torch.ones(1))
    else:
        made = type("Made", (nn.Identity,), {"__module__": "__main__"})
        mlp["act"].replace(made())
    with pytest.raises(RecipeError) as caught:
        sch.recipe()
    assert caught.value.asked.startswith("write ") and caught.value.where and caught.value.fix
    words = {"lambda": "a lambda", "local": "make", "weights": "parameters", "tensor": "Tensor", "main": "script"}
    assert words[what] in str(caught.value)
    sch.undo()
    assert not sch.recipe().steps


def fused(sch: Schedule) -> Recipe:
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find(bias_gelu, expect=2))
    sch["blocks.*"].checkpoint()
    return sch.recipe()


def test_a_failing_replay_leaves_all_as_it_was(sch: Schedule) -> None:
    recipe = fused(sch)
    other = small()
    other.blocks[1].mlp.act = nn.ReLU()
    twin = schedule.create_schedule(other, ids())
    twin["blocks.0"].annotate("norm.weight", "decay", 0.0)
    torch.rand(3)
    before = fingerprint(twin)
    more = dataclasses.replace(recipe, steps=(Call("checkpoint", ("blocks.0.attn",)), *recipe.steps))
    with pytest.raises(RecipeError) as caught:
        schedule.replay(twin, more)
    assert fingerprint(twin) == before
    text = str(caught.value)
    assert "replay step 2, find" in text and "found once in 2 modules" in text and "nearest" in text and "relu" in text


def test_another_architecture(sch: Schedule) -> None:
    recipe = fused(sch)
    with pytest.raises(RecipeError, match="made for a Small, and this is a Linear"):
        schedule.replay(nn.Linear(2, 2), recipe)
    with pytest.raises(RecipeError, match=r"no module matches 'blocks\.\*\.mlp'"):
        schedule.replay(nn.Linear(2, 2), dataclasses.replace(recipe, architecture=""), torch.zeros(2, 2))


def test_other_rules_than_then(sch: Schedule) -> None:
    schedule.optimize(sch, rules="all", cost_guard=False)
    recipe = sch.recipe()
    other = small()
    for block in other.blocks:
        block.mlp.act = nn.ReLU()
        block.attn.q = nn.Identity()
    twin = schedule.create_schedule(other, ids())
    with pytest.raises(RecipeError, match=r"replay step 1, optimize: .* found"):
        schedule.replay(twin, recipe)
    assert not twin.history


def test_wrong_arguments_and_too_many_undos(sch: Schedule) -> None:
    for steps, why in [
        ((Call("trace", ("blocks.0",), (("leaves", 3),)),), "not iterable"),
        ((Undo(),), "0 steps of this recipe to undo"),
        ((Call("checkpoint", ("",), (("every", "x"),)),), "a number from 1"),
    ]:
        with pytest.raises(RecipeError, match=why):
            schedule.replay(sch, Recipe("Small", steps))
        assert not sch.history


def test_simplified(sch: Schedule) -> None:
    find = Find("m1", ("blocks.*.mlp",), "bias_activation", 1)
    annotate = Call("annotate", ("head",), (("name", "weight"), ("key", "decay"), ("value", 0.1)))
    again = Call("annotate", ("head",), (("name", "weight"), ("key", "decay"), ("value", 0.2)))
    checkpoint, optimize = Call("checkpoint", ("blocks.*",)), Call("optimize", ("",), (), ("a", "b"))
    for steps, expected in [
        ((checkpoint, Undo()), ()),
        ((annotate, checkpoint, find, Undo(2)), ()),
        ((annotate, again), (again,)),
        ((annotate, checkpoint, again), (annotate, checkpoint, again)),
        ((optimize, Undo()), (optimize, Undo())),
        ((optimize, Undo(), Undo()), ()),
        ((checkpoint, optimize, Undo(3)), ()),
    ]:
        assert Recipe("Small", steps).simplified().steps == expected
    recipe = fused(sch)
    assert recipe.simplified() == recipe
    assert recipe.diff(dataclasses.replace(recipe, steps=recipe.steps[:-1])) == "- checkpoint() on blocks.*"
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.architecture = ""  # type: ignore[misc]


def test_redo_after_a_replay_and_history_as_it_was(sch: Schedule) -> None:
    recipe = fused(sch)
    twin = schedule.replay(small(), recipe, ids())
    assert [step.description for step in twin.history] == [step.description for step in sch.history]
    twin.undo().undo()
    assert not twin.recipe().steps
    twin.redo().redo()
    assert twin.recipe() == recipe


def test_files(sch: Schedule, tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path)) / "model"
    recipe = fused(sch)
    path = schedule.save_recipe(sch, folder)
    assert json.loads(path.read_text())["version"] == 1 and [f.name for f in folder.iterdir()] == [path.name]
    assert schedule.load_recipe(folder) == schedule.load_recipe(path) == recipe
    model = small()
    assert schedule.load_recipe(folder, schedule.create_schedule(model, ids()), trust="tests").recipe() == recipe
    assert schedule.create_schedule(model, ids()).module.blocks[0].mlp.__class__ is not type(small().blocks[0].mlp)
    with pytest.raises(RecipeError, match="cannot be read"):
        schedule.load_recipe(folder / "none")
    with pytest.raises(RecipeError, match="cannot be written"):
        schedule.save_recipe(sch, path)


def test_it_prints(sch: Schedule) -> None:
    lines = str(fused(sch)).splitlines()
    assert lines[0].startswith("Recipe for Small (torch ")
    assert lines[1] == "   1  m1 = find(tests.small.bias_gelu) in blocks.*.mlp: 1 in each"
    assert lines[2] == "   2  fuse(matches=m1) on blocks.*.mlp"
    assert sch.recipe().references == ("tests.small:bias_gelu",)


def test_a_sharing_plan(sch: Schedule) -> None:
    plan = sch.shard_plan(2)
    assert plan.shards
    recipe = Recipe("Small", (Call("apply_plan", ("",), (("plan", described(plan)),)),))
    read = Recipe.from_json(recipe.to_json())
    assert read == recipe and isinstance(read.steps[0], Call)
    assert read.steps[0].arguments[0][1].live({}) == plan
    compile(read.to_python(), "script", "exec")
    with pytest.raises(RecipeError, match="replay step 1, apply_plan"):  # no mesh
        schedule.replay(sch, read)


def test_one_match_of_a_groups_find_is_no_group_of_parallel_ones() -> None:
    sch = schedule.create_schedule(small(), ids())
    matches = sch["blocks.*.mlp"].find("bias_gelu_tanh", expect=2)
    for match in reversed(matches):
        match.schedule.fuse([match])
    recipe = round_trip(sch, small, ids())
    assert [str(step) for step in recipe.steps[1:]] == [
        "fuse(matches=[m1[1]]) on blocks.1.mlp",
        "fuse(matches=[m1[0]]) on blocks.0.mlp",
    ]
