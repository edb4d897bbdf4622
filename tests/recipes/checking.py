"""A recipe is right: it comes back from JSON and from Python as it was, and does the same to the same model again."""

from __future__ import annotations

import copy
import difflib
import warnings
from itertools import zip_longest
from types import NoneType
from typing import Any

import torch
from torch import nn

import schedule
from schedule import Recipe
from schedule.capture.graph.module_state import is_settings
from schedule.capture.recording.structure import tensors
from schedule.core.graphs import as_call
from schedule.core.node import Tree
from schedule.distributed.communication.mesh import SimulatedMesh
from schedule.runtime.scheduled import state_of
from schedule.util.generators import seed_all
from tests.recipes.reading_scripts import check_script


def check_text(recipe: Recipe) -> Recipe:
    """Through JSON, and through the script without a model; the recipe as it is read again."""
    read = Recipe.from_json(recipe.to_json())
    check_same(recipe, read, "JSON")
    check_script(recipe)
    return read


def check_same(recipe: Recipe, other: Recipe, after: str) -> None:
    """Fails with the first step that differs."""
    steps = zip_longest(recipe.steps, other.steps)
    for number, (step, again) in enumerate(steps, 1):
        assert step == again, f"step {number} differs after {after}: {again}, it was {step}"
    assert recipe == other, f"the recipe differs after {after}: {other.architecture}, it was {recipe.architecture}"


def check_replay(tree: Tree, before: nn.Module, recipe: Recipe) -> None:
    """On ``before`` it makes the same steps, the same graphs, and the same results to the bit.

    Without tensors' data, or as one of several simulated ranks, it ends at the graphs.

    Args:
        tree: the schedule of which the recipe is.
        before: a copy of its model as it was when the schedule was made.
    """
    inputs = tree.graphs.batch
    twin = schedule.replay(schedule.create_schedule(before, inputs, tree.mesh), recipe)
    check_same(recipe, twin.recipe(), "the replay")
    for path, module in tree.root.named_modules():
        assert graphs_of(module) == graphs_of(twin.tree.root.get_submodule(path)), graphs_differ(path, tree, twin.tree)
    waits = isinstance(tree.mesh, SimulatedMesh)  # for the other ranks, which have ended
    if inputs is not None and not waits and not any(p.is_meta for p in tree.root.parameters()):
        same_state(tree.root, twin.tree.root)
        for training in (True, False):
            ours, theirs = (results(model, inputs, training) for model in (tree.root, twin.tree.root))
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                same = torch.equal(value, theirs[name]) if name != "error" else value == theirs[name]
                assert same, f"{name} differs after the replay, {training=}"


def graphs_of(module: nn.Module) -> list[str]:
    """The code of the graphs that it runs."""
    state = state_of(module)
    return [] if state is None else [made.graph.python_code("self").src for made in state.specializations]


def graphs_differ(path: str, tree: Tree, twin: Tree) -> str:
    """Which lines do."""
    ours, theirs = ("".join(graphs_of(each.root.get_submodule(path))) for each in (tree, twin))
    lines = "\n".join(difflib.unified_diff(ours.splitlines(), theirs.splitlines(), "before", "replayed", "", "", 1))
    return f"the graphs of {path or 'the root'} differ after the replay:\n{lines}"


PLAIN = (bool, int, float, str, NoneType)


def same_state(model: nn.Module, twin: nn.Module) -> None:
    """What training has changed since, flags, modes and the settings in configs are handed to the twin."""
    for path, module in model.named_modules():
        other = twin.get_submodule(path)
        _same_settings(module, other)
        for name, value in vars(module).items():
            if is_settings(value):
                _same_settings(value, getattr(other, name))
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is not None:
                    getattr(other, kind)[name].data = tensor.detach().clone()


def _same_settings(holder: Any, other: Any) -> None:
    vars(other).update({name: value for name, value in vars(holder).items() if isinstance(value, PLAIN)})


def results(model: nn.Module, inputs: Any, training: bool) -> dict[str, Any]:
    """Outputs, and gradients in training; or what is raised, where the test's model refuses its inputs by now."""
    model.train(training)
    args, kwargs = as_call(copy.deepcopy(inputs))
    seed_all(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = list(tensors(model(*args, **kwargs)))
    except (RuntimeError, TypeError, ValueError) as error:
        return {"error": str(error)}
    found = {f"output {number}": each for number, each in enumerate(outputs)}
    total = [each.float().square().mean() for each in outputs if each.requires_grad]
    if training and total:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(sum(total), [p for _, p in named], allow_unused=True)
        found |= {f"gradient of {n}": g for (n, _), g in zip(named, gradients, strict=True) if g is not None}
    return {name: value.detach() for name, value in found.items()}
