"""Plausible mistakes of users, each with the message that they read: ``mistakes.txt``.

``UPDATE_GOLDEN=1`` writes the file anew.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fused
import schedule
from tests.small import ids, small

GOLDEN = Path(__file__).with_name("mistakes.txt")


def scheduled() -> Any:
    return schedule.create_schedule(small(), ids())


def recipe() -> schedule.Recipe:
    sch = scheduled()
    sch["blocks.*.mlp"].fuse("bias_gelu_tanh")
    return sch.recipe()


def _newer() -> schedule.Recipe:
    return schedule.Recipe.from_json(recipe().to_json().replace('"version": 1', '"version": 99'))


def _registered_twice() -> None:
    rule = schedule.Rule("twice", "powers", (lambda x: x * x,), lambda graph, inputs, scalars: None)
    try:
        schedule.register_rule(rule)
        schedule.register_rule(rule)
    finally:
        schedule.rules.unregister_rule("twice")


GATE = torch.ones(2, 4)

MISTAKES: dict[str, Callable[[], Any]] = {
    'schedule.optimize(model, batch, rule="memory")': lambda: schedule.optimize(small(), ids(), rule="memory"),  # type: ignore
    'schedule.optimize("gpt2", batch)': lambda: schedule.optimize("gpt2", ids()),  # type: ignore
    'schedule.optimize(model, {"pixel_values": images})': lambda: schedule.optimize(small(), {"pixel_values": GATE}),
    'schedule.optimize(model, batch, rules="bias_gelu_tahn")': lambda: schedule.optimize(
        small(), ids(), rules="bias_gelu_tahn"
    ),
    "schedule.optimise(model, batch)": lambda: schedule.optimise(small(), ids()),  # type: ignore
    "schedule.optimize(torch.compile(model), batch)": lambda: schedule.optimize(
        torch.compile(small(), backend="eager"),  # type: ignore
        ids(),
    ),
    "schedule.verify(model, batch), never scheduled": lambda: schedule.verify(small(), ids()),
    "schedule.verify(model, batch of another model)": lambda: schedule.verify(
        schedule.replay(small(), recipe(), ids()), {"pixel_values": GATE}
    ),
    "report.timed(batch)": lambda: schedule.optimize(small(), ids(), cost_guard=False).timed(ids()),  # type: ignore
    "schedule.verify(report, batch)": lambda: schedule.verify(schedule.optimize(small(), ids()), ids()),  # type: ignore
    "schedule.replay(recipe, model)": lambda: schedule.replay(recipe(), small()),  # type: ignore
    "schedule.replay(model, recipe of a newer release)": lambda: schedule.replay(small(), _newer()),
    "schedule.replay(another model, recipe)": lambda: schedule.replay(nn.Linear(2, 2), recipe()),
    "schedule.load_recipe(model, folder)": lambda: schedule.load_recipe(small(), "folder"),  # type: ignore
    'schedule.replay(model, "none.json")': lambda: schedule.replay(small(), "none.json"),
    'schedule.tune(model, plan, space, batch, memory="lots")': lambda: schedule.tune(
        small(), lambda sch, n: None, {"n": [1]}, ids(), memory="lots"
    ),
    "schedule.register_rule(rule), twice": _registered_twice,
    'sch["blocks.0.mpl"]': lambda: scheduled()["blocks.0.mpl"],
    "sch[module]": lambda: scheduled()[nn.Linear(2, 2)],
    "sch.fues(matches)": lambda: scheduled().fues([]),
    "sch.fuse([])": lambda: scheduled().fuse([]),
    'mlp.fuse("bias_gelu_tahn")': lambda: scheduled()["blocks.0.mlp"].fuse("bias_gelu_tahn"),
    "mlp.find(pattern, expected=1)": lambda: scheduled()["blocks.0.mlp"].find("bias_gelu_tanh", expected=1),
    "mlp.find(lambda x: x.gellu())": lambda: scheduled()["blocks.0.mlp"].find(lambda x: (x + 1).gellu()),
    "sch.undo(), nothing was done": lambda: scheduled().undo(),
    "sch.undo(5), too many": lambda: schedule.replay(small(), recipe(), ids()).undo(5),
    'sch.checkpoint(budget="much")': lambda: scheduled().checkpoint(budget="much"),
    "for module in sch": lambda: list(scheduled()),
    "fused.swiglu(gate, up)": lambda: fused.swiglu(GATE, GATE),  # type: ignore
    "fused.rms_norm(x, weight) of other features": lambda: fused.rms_norm(GATE, torch.ones(3)),
    "schedule.Schedule(model)": lambda: schedule.Schedule(small()),  # type: ignore
}


def _message(make: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        make()
    text = str(caught.value).replace(str(Path(__file__).parents[2]), "…").replace(tempfile.gettempdir(), "…")
    return "\n".join(f"    {line}" for line in f"{type(caught.value).__name__}: {text}".splitlines())


def test_each_mistake_is_told_what_to_do() -> None:
    text = "\n\n".join(f"{what}\n{_message(make)}" for what, make in MISTAKES.items()) + "\n"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_there_are_twenty_and_none_is_left_without_a_way_out() -> None:
    parts = GOLDEN.read_text(encoding="utf-8").strip().split("\n\n")
    assert len(parts) == len(MISTAKES) >= 20
    helpful = ("fix:", "did you mean", "use ", "for two,", "must have")
    assert not [part for part in parts if not any(word in part for word in helpful)]
