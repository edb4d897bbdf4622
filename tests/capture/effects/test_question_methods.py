"""Methods with the names of questions: those that may change state are not taken for questions."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import cache_utils

import schedule
from schedule.capture.effects.question_methods import PREFIXES, may_change


class Asked:
    """Questions, and methods that are only called like questions."""

    def __init__(self) -> None:
        self.n, self.log, self.late, self.items = 1, list[int](), False, iter([1, 2, 3])

    def get_number(self) -> int:
        return max(self.n, len(self.log), int(torch.ones(2).sum().item()) - 1)

    def get_first(self) -> int:
        return next(each for each in [self.n, *self.log] if each)

    def is_late(self) -> bool:
        return self.late and self.get_number() > 0

    def get_counted(self) -> int:
        if self.late:
            self.n += 1
        return self.n

    def get_logged(self) -> int:
        if self.late:
            self.log.append(1)
        return self.n

    def has_other(self) -> bool:
        return self.late and self.count() > 0

    def get_item(self) -> int:
        return next(self.items) if self.late else 1

    def count(self) -> int:
        self.n += 1
        return self.n


QUESTIONS = ("get_number", "get_first", "is_late")
CHANGING = ("get_counted", "get_logged", "get_item")


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_are_recognized(name: str) -> None:
    assert not may_change(getattr(Asked(), name))


@pytest.mark.parametrize("name", CHANGING)
def test_what_may_change_something_is_none(name: str) -> None:
    assert may_change(getattr(Asked(), name))


def test_the_questions_of_transformers_caches_are_recognized() -> None:
    classes = [cls for cls in vars(cache_utils).values() if inspect.isclass(cls) and "Cache" in cls.__name__]
    methods = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if name.startswith(PREFIXES) and may_change(method)
    ]
    assert classes and methods == []


class Asking(nn.Module):
    """A forward that asks a question and ignores the answer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc, self.name = nn.Linear(8, 8), name

    def forward(self, x: Tensor, given: Any) -> Tensor:
        h = F.gelu(self.fc(x))
        getattr(given, self.name)()
        return h


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("name", [*QUESTIONS, *CHANGING, "has_other"])
def test_a_call_that_changes_its_object_only_later_is_kept(name: str) -> None:
    model, x = Asking(name), torch.randn(2, 8)
    twin = copy.deepcopy(model)
    schedule.optimize(model, (x, Asked()), cost_guard=False)
    found = []
    for each in (model, twin):
        given = Asked()
        given.late = True
        result = each(x, given)
        found.append((result.sum().item(), given.n, given.log, [*given.items]))
    assert found[0][1:] == found[1][1:] and abs(found[0][0] - found[1][0]) < 1e-5
