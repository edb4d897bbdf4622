"""The stages of a model's life in one row: after each it equals an untouched twin that went through the same.

Stages that make a schedule or take it back do nothing to the twin.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from tests.adversary.curves import (
    LOSS_TOLERANCE,
    UPDATE_TOLERANCE,
    Curve,
    Run,
    Tensors,
    fallbacks,
    optimizer_for,
    plain_step,
    scheduled,
    trained,
    values,
    worst_loss,
    worst_update,
)
from tests.adversary.test_curves import mutated

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.unreplayable("the model is trained, cast and loaded beside the schedule"),
]

STEPS = 6
_BFLOAT16 = 2e-2
"""Relative: 8 bits, over some layers."""


@dataclass
class Life:
    """A model, or its twin, and what was seen of it.

    Attributes:
        run: how it is built and scheduled.
        model: as it is now.
            schedule: the one that is on it.
        seen: of the stage that ran last: losses, and parameters before and after.
    """

    run: Run
    model: nn.Module
    schedule: schedule.Schedule | None = None
    seen: list[Curve] = field(default_factory=list)

    @property
    def is_twin(self) -> bool:
        """Whether nothing is ever scheduled."""
        return self.run.rules is None

    def observe(self, model: nn.Module, steps: int = STEPS) -> None:
        """Train; how it went is compared."""
        optimizer = optimizer_for(model.parameters())
        self.seen.append(trained(model, self.run, plain_step, optimizer, range(steps)))
        self.look(model)

    def look(self, model: nn.Module) -> None:
        """The loss and gradients by it, without a step."""
        model.train()
        torch.manual_seed(11)
        loss = model(**self.run.batch(1)).loss
        loss.backward()
        gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        zero = {name: torch.zeros_like(each) for name, each in gradients.items()}
        self.seen.append(Curve([float(loss.detach())], zero, gradients))


def scheduled_and_trained(life: Life) -> None:
    """Schedule; train."""
    schedule_it(life)
    life.observe(life.model)


def schedule_it(life: Life) -> None:
    """Schedule what has no schedule."""
    if not life.is_twin:
        life.schedule = schedule.create_schedule(life.model, life.run.batch(0))
        report = schedule.optimize(life.schedule, rules=life.run.rules, cost_guard=False)
        assert report.applied and scheduled(life.model)


def copied(life: Life) -> None:
    """Copy it and train the copy; the original stays."""
    before = values(life.model)
    copy_of = copy.deepcopy(life.model)
    assert scheduled(copy_of) == scheduled(life.model)
    life.observe(copy_of)
    assert all(torch.equal(value, before[name]) for name, value in values(life.model).items())
    life.look(life.model)


def undone(life: Life) -> None:
    """Take the schedule back; train."""
    while life.schedule is not None and life.schedule.history:
        life.schedule.undo()
    assert not scheduled(life.model)
    life.observe(life.model)


def pickled(life: Life) -> None:
    """Schedule again, pickle, unpickle; train."""
    schedule_it(life)
    was = scheduled(life.model)
    life.model = pickle.loads(pickle.dumps(life.model))
    assert scheduled(life.model) == was
    life.observe(life.model)


def saved(life: Life) -> None:
    """``save_pretrained``; what ``from_pretrained`` makes of it is plain, equal and trains alike."""
    with tempfile.TemporaryDirectory() as folder:
        life.model.save_pretrained(folder)
        plain = type(life.run.build()).from_pretrained(folder, attn_implementation="eager")
    assert type(plain) is type(life.run.build()) and not scheduled(plain)
    theirs = values(plain)
    assert all(torch.equal(value, theirs[name]) for name, value in values(life.model).items())
    life.observe(plain)


def loaded(life: Life, assign: bool) -> None:
    """A state dict of before training is loaded after it."""
    state = copy.deepcopy(life.model.state_dict())
    life.observe(life.model)
    life.model.load_state_dict(state, assign=assign)
    life.model.tie_weights()
    for name, value in life.model.state_dict().items():
        assert torch.equal(value, state[name])
    life.observe(life.model)


def cast(life: Life) -> None:
    """To bfloat16 for a look, and back."""
    life.model.to(torch.bfloat16)
    life.look(life.model)
    life.model.to(torch.float32)
    life.observe(life.model)


_CHILD = {
    "gpt2": "transformer.ln_f",
    "llama": "lm_head",
    "bert": "cls.predictions.transform.dense",
    "t5": "decoder.block.1.layer.2.DenseReluDense",
}


def cast_in_part(life: Life) -> None:
    """One child computes in float64 between casts, and comes back."""
    child = life.model.get_submodule(_CHILD[life.run.name])
    child.double()
    into = child.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    out = child.register_forward_hook(lambda module, args, result: result.float())
    life.look(life.model)
    into.remove(), out.remove()
    child.float()
    life.observe(life.model)


def halved(life: Life) -> None:
    """One child is cast to half and nothing else: it computes what the twin does, or raises where the twin raises."""
    child = next(module for name, module in life.model.named_modules() if name.endswith(("mlp", "output", "layer.1")))
    before = values(life.model)
    child.half()
    try:
        life.look(life.model)
    except RuntimeError as error:
        assert "dtype" in str(error)
        life.seen.append(Curve([-1.0]))
    child.float()
    life.model.load_state_dict(before, strict=False)
    life.model.zero_grad()
    life.observe(life.model)


def generated(life: Life) -> None:
    """Evaluation, and tokens where the model makes some."""
    life.model.eval()
    batch = {name: value for name, value in life.run.batch(2).items() if name != "labels"}
    with torch.no_grad():
        outputs = life.model(**batch, **({"labels": batch["input_ids"]} if life.run.name == "t5" else {}))
        found: Tensors = {"logits": outputs.logits}
        if life.run.name != "bert":
            tokens: Tensor = life.model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)
            life.seen.append(Curve([float(each) for each in tokens.flatten()]))
    life.seen.append(Curve([float(outputs.logits.std())], {"logits": torch.zeros(())}, found))
    life.model.train()


_LAYER = {"gpt2": "transformer.h.0", "llama": "model.layers.0", "bert": "bert.encoder.layer.0", "t5": "encoder.block.0"}


def scheduled_twice(life: Life) -> None:
    """A second schedule over the first, which finds nothing more to rewrite and checkpoints a layer; take it back."""
    if not life.is_twin:
        second = schedule.create_schedule(life.model, life.run.batch(3))
        was = scheduled(life.model)
        assert not schedule.optimize(second, rules=life.run.rules, cost_guard=False).applied
        second[_LAYER[life.run.name]].checkpoint()
    life.observe(life.model)
    if not life.is_twin:
        second.undo()
        assert not second.history and scheduled(life.model) == was
    life.observe(life.model)


STAGES: list[tuple[str, Callable[[Life], None]]] = [
    ("schedule, train", scheduled_and_trained),
    ("copy, train the copy", copied),
    ("undo, train", undone),
    ("schedule again, pickle, train", pickled),
    ("save_pretrained", saved),
    ("load_state_dict", lambda life: loaded(life, False)),
    ("load_state_dict, assign", lambda life: loaded(life, True)),
    ("bfloat16 and back", cast),
    ("a child in float64 and back", cast_in_part),
    ("a child in half", halved),
    ("generate", generated),
    ("two schedules", scheduled_twice),
]


def compare(ours: Life, theirs: Life, stage: str) -> None:
    """Fail unless both saw the same."""
    assert len(ours.seen) == len(theirs.seen) > 0
    for number, (mine, other) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
        low = any(value.dtype in (torch.bfloat16, torch.float16) for value in other.end.values())
        off = worst_loss(mine, other)
        assert off <= (_BFLOAT16 if low else LOSS_TOLERANCE), f"{stage}, {number}: losses differ by {off:.1e}"
        for_updates = [name for name, value in other.end.items() if not torch.equal(value, other.start[name])]
        assert mine.end.keys() == other.end.keys()
        if for_updates and not low:
            by, name = worst_update(mine, other)
            assert by <= UPDATE_TOLERANCE, f"{stage}, {number}: {name} differs by {by:.1e}"
    ours.seen.clear(), theirs.seen.clear()
    with torch.no_grad():  # each stage begins with equal parameters, so that rounding does not pile up
        for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
            mine.copy_(other)


def cases() -> list[Any]:
    """Every model with each set of rules; all but one are marked slow."""
    names = ["gpt2", "llama", "bert", "t5"]
    quick = {("bert", "all")}
    pairs = [(name, rules) for name in names for rules in ("default", "all")]
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.one_in(3)
@pytest.mark.unwritable("the rule is registered while the test runs only")
def test_a_wrong_constant_shows() -> None:
    theirs = Life(Run("gpt2", None), Run("gpt2", None).build())
    with mutated() as rule:
        ours = Life(Run("gpt2", [rule]), theirs.run.build())
        for life in (ours, theirs):
            scheduled_and_trained(life)
    with pytest.raises(AssertionError, match="differ"):
        compare(ours, theirs, "train")


@pytest.mark.parametrize(("name", "rules"), cases())
def test_a_whole_life(name: str, rules: str) -> None:
    ours, theirs = (Life(Run(name, each), Run(name, each).build()) for each in (rules, None))
    for stage, happen in STAGES:
        happen(theirs)
        happen(ours)
        compare(ours, theirs, stage)
        assert type(ours.model).__name__ == type(theirs.model).__name__
        assert list(ours.model.state_dict()) == list(theirs.model.state_dict()), stage
    assert fallbacks(theirs.model) == 0
