"""Every case, and which of them are quick."""

from __future__ import annotations

from collections.abc import Iterator

from tests.adversary.calls import ANY, FLOATING, STEP, TRAINED
from tests.adversary.cases import Case
from tests.adversary.disturbances import NOTHING, PROCESS, RAISING, WHOLE
from tests.adversary.models import MODELS
from tests.adversary.statements import STATEMENTS


def _disturbed() -> Iterator[Case]:
    for each in [*STATEMENTS, *PROCESS, *WHOLE, *RAISING]:
        for name in each.models:
            for when in each.whens:
                yield Case(MODELS[name], "default", each, when, (each.call or STEP, TRAINED))


def _called() -> Iterator[Case]:
    for name in ("Layer", "Attended", "gpt2", "llama", "bert", "t5"):
        for call in (*ANY, *(FLOATING if name in ("Layer", "Attended") else ())):
            for sizes in ((), (1, 5)):
                yield Case(MODELS[name], "default", NOTHING, "after", (call,), sizes)


def _left_over() -> Iterator[Case]:
    for model in MODELS.values():
        rules_of = ("default", "memory", "attention", "all", "fuse")
        for rules in rules_of if model.name in _HEAVIER else ("default", "all", "fuse"):
            yield Case(model, rules, NOTHING, "after", (STEP, TRAINED))


_HEAVIER = ("Attended", "Headed", "gpt2", "llama", "bert", "t5")
"""Models that the rules which are asked for are about."""


def _by_other_rules() -> Iterator[Case]:
    for rules in ("all", "attention", "memory", "fuse"):
        for each in [*STATEMENTS, *WHOLE]:
            for name in (name for name in each.models if name in _HEAVIER or (name, rules) == ("Normed", "all")):
                for when in each.whens:
                    if (rules, each.name, when) != _WITHOUT_WORK:
                        yield Case(MODELS[name], rules, each, when, (STEP, TRAINED))


_WITHOUT_WORK = ("attention", "model.config._attn_implementation = 'sdpa'", "before")
"""Rules whose work a disturbance does before them."""


def cases() -> list[Case]:
    """Every case."""
    return [*_left_over(), *_disturbed(), *_called(), *_by_other_rules()]


def is_quick(case: Case, index: int) -> bool:
    """Whether a case is among those of every run: disturbances of small models, and few of all else."""
    if case.model.name in ("llama", "bert", "t5"):
        return False
    if case.model.name == "gpt2":
        return case.rules == "all" and index % 40 == 0
    if case.rules != "default":
        return index % 60 == 0
    if case.disturbance is NOTHING:
        return not case.sizes and index % 3 == 0
    return (case.when == "before") == (index % 5 == 0) and index % 6 == 0
