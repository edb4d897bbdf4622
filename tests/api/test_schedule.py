"""Paths, globs, groups, the tree of nodes, wrapping again."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule import Group, Schedule
from schedule.primitives.registry import registered, unregister
from tests import zoo
from tests.fingerprint import fingerprint
from tests.small import Mlp, bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


def test_nothing_happens_to_the_model() -> None:
    model = small()
    sch = schedule.create_schedule(model)
    before = fingerprint(sch)
    sch.find  # noqa: B018 - looking at a primitive does nothing
    list(sch.named_schedules())
    assert fingerprint(sch) == before
    assert schedule.build(sch) is model


def test_one_node_per_module(sch: Schedule) -> None:
    assert sch["blocks.0.mlp"] is sch["blocks.0"]["mlp"]
    assert sch["blocks.0.mlp"].parent is sch["blocks.0"]
    assert sch["blocks.0.mlp"].root is sch
    assert sch.parent is None
    assert sch["blocks.0.mlp"].path == "blocks.0.mlp"
    assert sch.path == ""
    assert sch["blocks.0.mlp"].module is sch.module.blocks[0].mlp


def test_shared_modules_are_one_node() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2)] * 3)
    sch = schedule.create_schedule(model)
    assert sch["2"] is sch["0"]
    assert len(sch["*"]) == 1
    assert [name for name, _ in sch.named_schedules()] == ["", "0"]


def test_globs(sch: Schedule) -> None:
    assert sch["blocks.*.mlp"].paths == ["blocks.0.mlp", "blocks.1.mlp"]
    assert sch["**.fc1"].paths == ["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]  # and not fc10
    assert sch["blocks.**.q"].paths == ["blocks.0.attn.q", "blocks.1.attn.q"]
    assert sch["blocks.*"].paths == ["blocks.0", "blocks.1"]  # one component
    assert sch["blocks.1.mlp.fc*"].paths == ["blocks.1.mlp.fc1", "blocks.1.mlp.fc10"]
    assert sch["blocks.[1].attn"].paths == ["blocks.1.attn"]
    assert sch["blocks.[!0].attn"].paths == ["blocks.1.attn"]
    assert "head" in [node.path for node in sch["**"]]
    assert sch["blocks.0"]["**.fc1"].paths == ["blocks.0.mlp.fc1"]


def test_groups_are_ordered_sequences(sch: Schedule) -> None:
    group = sch["blocks.*"]
    assert isinstance(group, Group)
    assert len(group) == 2 and [node.path for node in group] == group.paths
    assert group[1] is sch["blocks.1"] and group[-1] is group[1]
    assert group[1:].paths == ["blocks.1"]
    assert group["mlp.fc1"].paths == ["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]
    assert group["mlp.*"].paths[:2] == ["blocks.0.mlp.fc1", "blocks.0.mlp.fc10"]
    assert sch["blocks.0"] in group and "blocks.1" in group and sch not in group
    with pytest.raises(schedule.PathError, match="is empty"):
        group[5:]


def test_a_wrong_path_names_the_nearest(sch: Schedule) -> None:
    with pytest.raises(KeyError, match=r"no module 'blocks.0.mpl'.*(?s:.*)'blocks.0.mlp'"):
        sch["blocks.0.mpl"]
    with pytest.raises(schedule.PathError, match=r"no module matches 'layers.\*.fc1'(?s:.*)'blocks.0.mlp.fc1'"):
        sch["layers.*.fc1"]
    with pytest.raises(schedule.PathError, match="it has embed, blocks"):
        sch["zzz"]
    with pytest.raises(schedule.PathError, match="a path is a string"):
        sch[0]


def test_contains(sch: Schedule) -> None:
    assert "blocks.0.mlp" in sch and "**.fc1" in sch
    assert "blocks.9" not in sch and "**.fc2" not in sch and 3 not in sch


def test_a_schedule_is_not_iterated_by_accident(sch: Schedule) -> None:
    with pytest.raises(TypeError, match="named_schedules"):
        list(sch)
    with pytest.raises(AttributeError, match="no attribute or primitive 'fusse'"):
        sch.fusse  # noqa: B018


def test_not_a_module() -> None:
    with pytest.raises(schedule.ScheduleError, match="not of dict"):
        schedule.create_schedule({})  # type: ignore[arg-type]
    with pytest.raises(schedule.ScheduleError, match=r"Schedule\(Linear\) was called[^$]*create_schedule\(model\)"):
        schedule.Schedule(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(schedule.ScheduleError, match=r"Schedule\(Linear\) was called") as raised:
        schedule.Schedule(torch.nn.Linear(2, 2), torch.randn(1, 2))  # type: ignore[arg-type]
    assert "Schedule object" in repr(raised.traceback[-1].frame.f_locals["self"])  # as debuggers show it


def test_a_property_tells_its_own_error(sch: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "broken", property(lambda self: self.module.missing), raising=False)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        sch.broken  # type: ignore[attr-defined]  # noqa: B018


def test_graph_is_that_of_training(sch: Schedule) -> None:
    assert [(s.training) for s in sch["blocks.0"].specializations] == [True, False]
    assert [n.target for n in sch["blocks.0.mlp"].graph.nodes if n.op == "call_module"] == ["fc1", "act", "fc10"]


class Session(nn.Module):
    """It takes an object of its own, which no trial can make."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(16)

    def forward(self, ids: torch.Tensor, session: Any) -> torch.Tensor:
        return self.mlp(session.embed(ids))


def test_no_example_inputs() -> None:
    sch = schedule.create_schedule(Session())
    asked = r"what is Session called with(?s:.*)batch=dict\(ids=…, session=…\)"
    with pytest.raises(schedule.NotApplicable, match=asked):
        sch["mlp"].find(bias_gelu)
    assert sch["mlp"].annotate("fc1.weight", "decay", 0.0)  # what does not trace needs none


def test_show_says_what_was_done(sch: Schedule, capsys: pytest.CaptureFixture[str]) -> None:
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find(bias_gelu, expect=2))
    sch["blocks.0.attn"].annotate("q.weight", "decay", 0.0)
    sch.show()
    text = capsys.readouterr().out
    assert text.count("mlp: Mlp  ← fuse(bias_gelu)") == 2
    assert "attn: Attention  ← annotate('q.weight', 'decay', 0.0)" in text
    sch.show(depth=1)
    assert "mlp" not in capsys.readouterr().out


def test_history_undo_redo(sch: Schedule) -> None:
    start = fingerprint(sch)
    mlp = sch["blocks.0.mlp"]
    mlp.annotate("fc1.weight", "decay", 0.0)
    first = fingerprint(sch)
    mlp.fuse(mlp.find(bias_gelu))
    second = fingerprint(sch)
    assert [step.primitive for step in sch.history] == ["annotate", "fuse"]
    assert sch.history[1].description == "fuse(bias_gelu) on blocks.0.mlp"
    assert sch.history[1].paths == ("blocks.0.mlp",)
    assert list(sch.history[1].arguments) == ["matches"]
    assert sch.undo() is sch
    assert fingerprint(sch) == first
    sch.undo()
    assert fingerprint(sch) == start
    with pytest.raises(schedule.NotApplicable, match="cannot undo: nothing was done yet"):
        sch.undo()
    sch.redo()
    assert fingerprint(sch) == first
    sch.redo()
    assert fingerprint(sch) == second
    with pytest.raises(schedule.NotApplicable, match="cannot redo"):
        sch.redo()
    sch.undo()
    mlp.annotate("fc10.weight", "decay", 0.0)
    with pytest.raises(schedule.NotApplicable, match="something was done since"):
        sch.redo()


def test_a_group_is_one_step(sch: Schedule) -> None:
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find(bias_gelu))
    (step,) = sch.history
    assert step.description == "fuse(bias_gelu) on blocks.*.mlp (2 modules)"
    assert step.paths == ("blocks.0.mlp", "blocks.1.mlp")
    sch.undo()
    assert type(sch.module.blocks[1].mlp).__name__ == "Mlp" and not sch.history


def test_a_group_does_all_or_nothing(sch: Schedule) -> None:
    before = fingerprint(sch)
    with pytest.raises(schedule.PathError, match="no module 'fc1' in head"):
        Group([sch["blocks.0.mlp"], sch["head"]], "mixed").annotate("fc1.weight", "decay", 0.0)
    assert fingerprint(sch) == before


def test_scheduled_models_can_be_wrapped_again(sch: Schedule) -> None:
    sch["blocks.0.mlp"].fuse(sch["blocks.0.mlp"].find(bias_gelu, expect=1))
    again = schedule.create_schedule(sch.module, batch=ids())
    assert again["blocks.0.mlp"].find(bias_gelu) == []
    again["blocks.1.mlp"].fuse(again["blocks.1.mlp"].find(bias_gelu, expect=1))
    again.undo()
    fused = [n.target for n in again["blocks.0.mlp"].graph.nodes if n.op == "call_function"]
    assert any(getattr(target, "__name__", "") == "bias_activation" for target in fused)


def test_scheduled_models_copy_and_pickle(sch: Schedule) -> None:
    mlps = sch["blocks.*.mlp"]
    mlps[:1].fuse(mlps[:1].find(bias_gelu))
    mlps[1:].fuse(mlps[1:].find(bias_gelu), compiler=None)
    model = schedule.build(sch).eval()
    expected = model(**ids())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**ids()), expected)
        assert twin.blocks[0].mlp.fc1.weight is not model.blocks[0].mlp.fc1.weight
        assert type(twin.blocks[0].mlp).__name__ == "Mlp"


def test_recording_happens_once(sch: Schedule) -> None:
    recording = sch.tree.graphs.recording
    graphs = [sch["blocks.0.mlp"].graph, sch["blocks.1.mlp"].graph]
    assert graphs[0] is sch["blocks.0.mlp"].graph
    assert sch.tree.graphs.recording is recording


@pytest.mark.unwritable("the primitive is registered while the test runs only")
def test_user_primitives_are_methods() -> None:
    @schedule.primitive
    def gelu_fused(sch: Schedule, expect: int = 1) -> int:
        """Fuse what bias_gelu finds."""
        sch.annotate("fc1.bias", "seen", True)
        matches = sch.find(bias_gelu, expect=expect)
        sch.fuse(matches)
        return len(matches)

    try:
        sch = schedule.create_schedule(small(), batch=ids())
        assert sch["blocks.*.mlp"].gelu_fused() == [1, 1]
        assert [step.description for step in sch.history] == ["gelu_fused() on blocks.*.mlp (2 modules)"]
        assert "gelu_fused" in dir(sch)
        assert schedule.list_primitives()["gelu_fused"] == "Fuse what bias_gelu finds."
        sch.undo()
        before = fingerprint(sch)
        with pytest.raises(schedule.MatchError, match="expected 7"):  # after annotate: that goes too
            sch["blocks.0.mlp"].gelu_fused(expect=7)
        assert fingerprint(sch) == before
        with pytest.raises(schedule.ScheduleError, match="already"):
            schedule.primitive(gelu_fused.__wrapped__)
    finally:
        unregister("gelu_fused")
    with pytest.raises(schedule.ScheduleError, match="a method 'undo' already"):

        @schedule.primitive
        def undo(sch: Schedule) -> None: ...


@pytest.mark.unwritable("the primitive is registered while the test runs only")
def test_a_primitive_may_go_on_after_one_that_failed() -> None:
    @schedule.primitive
    def try_both(sch: Schedule) -> None:
        """Replace what can be replaced."""
        sch.annotate("blocks.0.mlp.fc1.weight", "first", True)
        with contextlib.suppress(schedule.NotApplicable):
            sch.replace_all(  # the second one fails, after the first was replaced
                nn.Dropout, lambda path, module: nn.Identity() if "blocks.0" in path else None
            )

    try:
        sch = schedule.create_schedule(small(), batch=ids())
        sch.try_both()
        assert isinstance(sch.module.blocks[0].attn.dropout, nn.Dropout)
        assert sch.history[-1].touched == {"": 1}
        sch.undo()
        assert not sch.history and not vars(sch.module.blocks[0].mlp.fc1.weight)
    finally:
        unregister("try_both")


def test_primitives_are_documented_methods() -> None:
    for name, line in schedule.list_primitives().items():
        method = registered()[name]
        assert line and inspect.getdoc(method)
        assert inspect.signature(method).return_annotation is not inspect.Signature.empty
    for name in ("fuse", "replace", "decompose", "trace"):
        assert callable(getattr(Group, name))
        doc = getattr(Schedule, name).__doc__
        assert ("before:" in doc and "after:" in doc) or "flatten=False:" in doc
    assert str(inspect.signature(Schedule.fuse)).startswith("(sch: 'Schedule', matches: ")


def test_albert_one_layer_called_many_times() -> None:
    model = zoo.build("albert")
    sch = schedule.create_schedule(model, batch=zoo.batch("albert"))
    layers = sch["**.albert_layers.*"]
    assert len(layers) == 1
    rules = [rule.name for rule in schedule.list_rules() if layers.find(rule)]
    assert rules
    layers.fuse(layers.find(rules[0]))
    assert schedule.verify(sch, zoo.batch("albert"), steps=1)
