"""Names and arguments that users guess: one for one thing, and old spellings still work and warn."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import fused
import fxschedule
import schedule
from schedule.api.simulate import simulate
from schedule.testing.graph_equality import graph_of
from schedule.util.wording import bytes_of
from schedule.verify.tolerances import tolerance_for
from tests.small import bias_gelu, ids, small


@pytest.mark.parametrize(
    "function",
    [schedule.create_schedule, schedule.optimize, schedule.verify, schedule.tune, schedule.replay, simulate, graph_of],
)
def test_the_inputs_of_a_model_are_its_batch(function: Any) -> None:
    assert "batch" in inspect.signature(function).parameters


def test_the_old_name_of_the_batch_works_and_warns() -> None:
    model = small()
    with pytest.warns(DeprecationWarning, match=r"create_schedule\(example_inputs=\) is batch= now"):
        sch = schedule.create_schedule(model, example_inputs=ids())  # type: ignore[call-arg]
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find(bias_gelu, expect=2))
    with pytest.warns(DeprecationWarning, match=r"replay\(example_inputs=\)"):
        schedule.replay(small(), sch.recipe(), example_inputs=ids())  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"graph_of\(example_inputs=\)"):
        graph_of(small(), example_inputs=ids())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="got batch= and its old name"):
        schedule.create_schedule(model, batch=ids(), example_inputs=ids())  # type: ignore[call-arg]


def test_a_model_is_verified_like_its_schedule() -> None:
    model = small()
    report = schedule.optimize(model, ids(), cost_guard=False)
    assert report.verified is None
    assert schedule.verify(model, ids(), steps=1)
    assert report.verified is not None and report.verified.equal and report.figures()[3].value == "equal"
    report.schedule.undo()  # type: ignore[union-attr]
    assert report.verified is None, "it was about other steps"


def test_a_model_that_nothing_is_known_of_is_not_verified() -> None:
    model = small()
    with pytest.raises(
        schedule.NotApplicable, match=r"no schedule of this Small(?s:.*)verify\(report\.schedule, batch\)"
    ):
        schedule.verify(model, ids())
    first, second = (schedule.create_schedule(model, ids()) for _ in range(2))
    first["blocks.0.mlp"].fuse("bias_gelu_tanh")
    second["blocks.1.mlp"].fuse("bias_gelu_tanh")
    with pytest.raises(schedule.NotApplicable, match=r"2 schedules changed this Small(?s:.*)verify\(sch, batch\)"):
        schedule.verify(model, ids())


def test_another_batch_is_not_ignored() -> None:
    batch, longer = ids(), {"ids": torch.randint(0, 16, (3, 9))}
    sch = schedule.create_schedule(small(), batch)
    sch["blocks.0.mlp"].find(bias_gelu)
    schedule.optimize(sch, longer, cost_guard=False)
    assert sch.tree.graphs.batch is longer, "nothing was applied yet"
    schedule.optimize(sch, dict(longer), cost_guard=False)  # of the same shapes
    with pytest.raises(
        schedule.NotApplicable, match=r"recorded with ids int64 \[3, 9\], and the batch is ids int64 \["
    ):
        schedule.optimize(sch, batch, cost_guard=False)
    sch.undo_all()
    schedule.optimize(sch, batch, cost_guard=False)


def test_a_guessed_batch_is_named_as_guessed() -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32))
    guessed = dict(schedule.optimize(model, cost_guard=False).facts())["batch"]
    assert guessed.endswith(", guessed from the model: none was given")
    assert "guessed" not in dict(schedule.optimize(small(), ids(), cost_guard=False).facts())["batch"]


def test_several_steps_are_undone_at_once() -> None:
    model = small()
    sch = schedule.create_schedule(model, ids())
    for path in ("blocks.0.mlp", "blocks.1.mlp"):
        sch[path].fuse("bias_gelu_tanh")
    sch["blocks.0.attn"].annotate("q.weight", "decay", 0.0)
    with pytest.raises(schedule.NotApplicable, match="only 3 steps can be undone"):
        sch.undo(steps=4)
    assert len(sch.history) == 3, "none was undone"
    assert len(sch.undo(steps=2).history) == 1
    assert not sch.undo_all().history and not sch.undo_all().history
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(schedule.NotApplicable, match="steps is a number from 1"):
            sch.undo(steps=wrong)  # type: ignore[arg-type]


def test_a_schedule_that_did_nothing_takes_nothing_back() -> None:
    model = small()
    report = schedule.optimize(model, ids(), cost_guard=False)
    with pytest.raises(schedule.NotApplicable, match=r"another one changed the model(?s:.*)report\.schedule"):
        schedule.create_schedule(model, ids()).undo_all()
    assert report.schedule is not None and not report.schedule.undo_all().history


def test_a_recipe_is_a_file_for_all_who_take_one(tmp_path: Path) -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.*.mlp"].fuse("bias_gelu_tanh")
    path = sch.recipe().save(tmp_path / "new" / "r.json")
    assert schedule.Recipe.load(path) == sch.recipe()
    assert schedule.replay(small(), str(path), ids()).recipe() == sch.recipe()
    loaded = schedule.load_recipe(path, schedule.create_schedule(small(), ids()))
    assert isinstance(loaded, schedule.Schedule) and len(loaded.history) == 1
    schedule.save_recipe(sch, tmp_path)
    assert len(schedule.replay(small(), tmp_path, ids()).history) == 1
    assert isinstance(schedule.load_recipe(tmp_path), schedule.Recipe)
    assert schedule.replay(small(), sch.recipe().to_json(), ids(), trust=True).recipe() == sch.recipe()


def test_primitives_take_the_name_of_a_rule() -> None:
    by_name, by_find = (schedule.create_schedule(small(), ids()) for _ in range(2))
    by_name["blocks.*.mlp"].fuse("bias_gelu_tanh")
    mlps = by_find["blocks.*.mlp"]
    mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
    assert str(by_name["blocks.0.mlp"].graph) == str(by_find["blocks.0.mlp"].graph)
    assert str(by_name["blocks.1.mlp"].graph) == str(by_find["blocks.1.mlp"].graph)
    assert schedule.verify(by_name, ids(), steps=1)
    again = schedule.create_schedule(small(), ids())
    again["blocks.0.mlp"].checkpoint("bias_gelu_tanh")
    assert schedule.verify(again, ids(), steps=1)
    with pytest.raises(schedule.MatchError, match=r"no rule 'bias_gelu_tahn'(?s:.*)did you mean 'bias_gelu_tanh'"):
        again["blocks.1.mlp"].fuse("bias_gelu_tahn")
    with pytest.raises(schedule.MatchError, match="cross_entropy was found 0 times"):
        again["blocks.1.mlp"].fuse("cross_entropy")


@pytest.mark.parametrize("wrong", [bias_gelu, None, ["bias_gelu_tanh"], 3])
@pytest.mark.parametrize("path", ["blocks.0.mlp", "blocks.*.mlp"])
def test_what_is_no_match_is_refused(wrong: Any, path: str) -> None:
    with pytest.raises(schedule.MatchError, match=r"(?s)is not (a match|what find\(\) returned).*find\("):
        schedule.create_schedule(small(), ids())[path].fuse(wrong)


def test_a_tolerance_may_be_a_number() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.*.mlp"].fuse("bias_gelu_tanh")
    assert schedule.verify(sch, ids(), steps=1, tolerance=1e-3)
    row, wider = tolerance_for(small()), tolerance_for(small(), 1e-3)
    assert (wider.forward, wider.gradient) == (1e-3, pytest.approx(row.gradient * 1e-3 / row.forward))
    for given in ({"tolerance": "1e-3"}, {"tolerance": -1}, {"steps": -1}, {"steps": "2"}, {"training": "no"}):
        with pytest.raises(schedule.NotApplicable, match="cannot verify"):
            schedule.verify(sch, ids(), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [None, 3, []])
def test_no_rules_are_an_error_of_the_caller(rules: Any) -> None:
    with pytest.raises(schedule.MatchError, match="no rule is named by"):
        schedule.optimize(small(), ids(), rules=rules)


def test_a_pattern_of_what_is_no_operation_says_so() -> None:
    mlp = schedule.create_schedule(small(), ids())["blocks.0.mlp"]
    with pytest.raises(schedule.MatchError, match=r"the pattern \S+ calls \.gellu, which is no operation of torch"):
        mlp.find(lambda x, bias: (x + bias).gellu())
    assert mlp.find(lambda x: torch.special.erfcx(x)) == [], "an operation of torch that is not there"


def test_a_users_rule_joins_a_set_only_if_asked() -> None:
    def rule(**settings: Any) -> schedule.Rule:
        return schedule.Rule("squared", "powers", (lambda x: x * x,), lambda graph, inputs, scalars: None, **settings)

    assert rule().sets == ()
    try:
        first = schedule.register_rule(rule())
        with pytest.raises(schedule.MatchError, match=r"already(?s:.*)replace=True"):
            schedule.register_rule(rule())
        second = schedule.register_rule(rule(sets=("default",)), replace=True)
        assert schedule.list_rules("powers") == [second] and second is not first
    finally:
        schedule.rules.unregister_rule("squared")


def test_the_version_can_be_imported() -> None:
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert schedule.__version__ == fused.__version__ == fxschedule.__version__
    assert re.search(rf"^## .*\b{re.escape(schedule.__version__)}\b", text, re.M)


def test_dir_shows_each_public_name_once() -> None:
    sch = schedule.create_schedule(small(), ids())
    for owner in (sch, schedule, fused):
        names = dir(owner)
        assert len(names) == len(set(names)) and not [name for name in names if name.startswith("_")]
    assert {"fuse", "undo_all", "optimize", "module"} <= set(dir(sch))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("800 mb", 8 * 10**8),
        ("17", 17),
        (1e9, 10**9),
        (5, 5),
        ("many", None),
        ("-1GB", None),
        (1.5, None),
        (True, None),
        (None, None),
    ],
)
def test_sizes_are_numbers_or_texts(text: object, count: int | None) -> None:
    assert bytes_of(text) == count


def test_a_budget_may_be_a_text() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.*"].checkpoint(budget="1GB")
    with pytest.raises(schedule.NotApplicable, match=r"a budget is a number of bytes, not 'much'(?s:.*)2GB"):
        sch["blocks.*"].checkpoint(budget="much")


X = torch.randn(2, 3, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: fused.gelu(X), lambda: F.gelu(X)),
        (lambda: fused.gelu(X, "tanh"), lambda: F.gelu(X, approximate="tanh")),
        (lambda: fused.mish(X), lambda: F.mish(X)),
        (lambda: fused.masked_softmax(X, None, 0.5), lambda: (0.5 * X).softmax(-1)),
        (lambda: fused.causal_softmax(X[..., :3]), lambda: _causal(X[..., :3])),
        (lambda: fused.SwiGLU()(X), lambda: F.silu(X[..., :4]) * X[..., 4:]),
        (lambda: fused.SwiGLU()(X, 2 * X), lambda: F.silu(X) * 2 * X),
        (lambda: fused.GEGLU()(X, X), lambda: F.gelu(X, approximate="tanh") * X),
        (lambda: fused.GEGLU("none")(X, X), lambda: F.gelu(X) * X),
        (lambda: fused.RMSNorm(8, dtype=X.dtype)(X), lambda: nn.RMSNorm(8, 1e-6, dtype=X.dtype)(X)),
        (lambda: fused.RMSNorm(8, casting="gemma", dtype=X.dtype)(X), lambda: nn.RMSNorm(8, 1e-6, dtype=X.dtype)(X)),
        (lambda: fused.LayerNorm(8, dtype=X.dtype)(X), lambda: nn.LayerNorm(8, dtype=X.dtype)(X)),
        (lambda: fused.CrossEntropyLoss()(X[0], TARGETS), lambda: F.cross_entropy(X[0], TARGETS)),
        (
            lambda: fused.LinearCrossEntropyLoss(reduction="sum")(X[0], X[1], TARGETS),
            lambda: F.cross_entropy(X[0] @ X[1].T, TARGETS, reduction="sum"),
        ),
    ],
)
def test_ops_have_the_names_that_people_guess(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours(), theirs())


TARGETS = torch.tensor([0, 2, 1])


def _causal(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_modules_keep_the_names_of_torchs_parameters(name: str) -> None:
    ours, theirs = getattr(fused, name)(8), getattr(nn, name)(8)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs)) and "eps" in repr(ours)
    assert copy.deepcopy(ours).state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("op", ["swiglu", "geglu", "reglu", "quick_geglu"])
def test_two_tensors_point_to_the_op_that_takes_them(op: str) -> None:
    with pytest.raises(TypeError, match=rf"{op}: .*it takes gate and up in one tensor.*gated_activation\(gate, up"):
        getattr(fused, op)(X, X)
