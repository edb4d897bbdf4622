"""``annotate``: a tag that stays with the place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import schedule
from tests.fingerprint import fingerprint
from tests.small import small


def test_a_tag_is_an_attribute_and_can_be_undone() -> None:
    sch = schedule.create_schedule(small())
    before = fingerprint(sch)
    sch["blocks.*.mlp"].annotate("fc1.weight", "decay", 0.0)
    assert sch.module.blocks[1].mlp.fc1.weight.decay == 0.0
    assert sch.tree.annotations["blocks.1.mlp.fc1.weight", "decay"] == 0.0
    sch["blocks.1.mlp.fc1"].annotate("weight", "decay", 0.1)
    assert sch.module.blocks[1].mlp.fc1.weight.decay == 0.1
    sch.undo()
    assert sch.module.blocks[1].mlp.fc1.weight.decay == 0.0
    sch.undo()
    assert fingerprint(sch) == before


@pytest.mark.unwritable("a module with weights takes another's place")
def test_a_tag_survives_replace() -> None:
    sch = schedule.create_schedule(small())
    sch["blocks.0.mlp"].annotate("fc1.weight", "decay", 0.0)
    new = nn.Linear(16, 32)
    sch["blocks.0.mlp.fc1"].replace(new)
    assert new.weight.decay == 0.0  # type: ignore[attr-defined]
    sch.undo()
    assert not vars(new.weight)
    assert sch.module.blocks[0].mlp.fc1.weight.decay == 0.0
    whole = type(sch.module.blocks[0].mlp)(16)
    sch["blocks.0.mlp"].replace(whole)
    assert whole.fc1.weight.decay == 0.0


@pytest.mark.parametrize(
    ("name", "key", "error", "message"),
    [
        ("wieght", "decay", schedule.NotApplicable, "no parameter or buffer 'wieght'(?s:.*)did you mean 'weight'"),
        ("weight", "grad", schedule.NotApplicable, "tensors have an attribute of that name"),
        ("weight", "no name", schedule.NotApplicable, "'no name' cannot be a tag"),
        ("inner.weight", "decay", schedule.PathError, "no module 'inner' in blocks.0.mlp.fc1"),
    ],
)
def test_refusals(name: str, key: str, error: type[Exception], message: str) -> None:
    sch = schedule.create_schedule(small())
    before = fingerprint(sch)
    with pytest.raises(error, match=message):
        sch["blocks.0.mlp.fc1"].annotate(name, key, 0.0)
    assert fingerprint(sch) == before
    assert not torch.is_tensor(sch.tree.annotations)
