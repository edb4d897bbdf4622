"""Decimals: their arithmetic reads a context that no code names, and sets flags in it."""

from __future__ import annotations

import decimal
import operator
import statistics
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import reduce
from typing import Any

import pytest
import torch

import schedule
from tests.adversary.readings import Reading, as_untouched

DEFAULT = Decimal("1.25")
READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda m: float(m.held + Decimal("1.5")),
    "sum of made ones": lambda m: float(Decimal("1.25") + Decimal("1.5")),
    "imported by itself": lambda m: float(decimal.Decimal("1.25") + 1),
    "product": lambda m: float(m.held * 5),
    "negation": lambda m: float(-m.held),
    "magnitude": lambda m: float(abs(m.held)),
    "power": lambda m: float(m.held**2),
    "of a list": lambda m: float(sum([m.held, m.held])),
    "of items": lambda m: float(m.pair[0] + m.pair[1]),
    "of all items": lambda m: float(sum(m.pair)),
    "by a function": lambda m: float(reduce(operator.add, m.pair)),
    "default": lambda m, d=DEFAULT: float(d + 1),
    "global": lambda m: float(DEFAULT + 1),
    "by its type": lambda m: float(type(m.held)("1.25") + 1),
}


@pytest.fixture
def context() -> Iterator[decimal.Context]:
    with decimal.localcontext() as own:
        yield own


@pytest.mark.parametrize("name", READS)
def test_the_precision_is_guarded(name: str, context: decimal.Context) -> None:
    module, twin = Reading(READS[name]), Reading(READS[name])
    twin.load_state_dict(module.state_dict())
    for each in (module, twin):
        each.held, each.pair = Decimal("1.25"), [Decimal("1.25"), Decimal("1.5")]
    as_untouched(module, lambda m: setattr(context, "prec", 2), twin=twin, once=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda m: float(m.held / 3),
        lambda m: float(m.held.sqrt()),
        lambda m: float(statistics.mean([m.held, Decimal(1), Decimal(2)])),
    ],
)
def test_a_forward_that_sets_flags_is_refused(read: Callable[[Any], Any], context: decimal.Context) -> None:
    module = Reading(read)
    module.held = Decimal("1.25")
    context.clear_flags()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, torch.randn(2, 4), cost_guard=False)
    assert not report.applied
    assert "decimal" in str(report.to_json())
    assert not any(context.flags.values()), "scheduling leaves no flags"
    module(torch.randn(2, 4))
    assert context.flags[decimal.Inexact]
