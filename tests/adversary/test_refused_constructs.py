"""Python that no model is written in: refused with the line, and the forward runs as it is."""

from __future__ import annotations

import decimal
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch

import schedule
from tests.adversary.readings import Reading

DEFAULT = Decimal("1.25")


def by_match(m: Any) -> float:
    match m.held:
        case Decimal():
            return 1.0
        case _:
            return 2.0


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "match": (by_match, " holds a Match"),
    "held decimal": (lambda m: float(m.held + 1), "computes with decimals"),
    "made decimal": (lambda m: float(Decimal("1.25") + 1), "computes with decimals"),
    "of the module": (lambda m: float(decimal.Decimal("1.25") + 1), "computes with decimals"),
    "of a list": (lambda m: float(sum(m.pair)), "computes with decimals"),
    "default": (lambda m, d=DEFAULT: float(d + 1), "computes with decimals"),
    "global": (lambda m: float(DEFAULT + 1), "computes with decimals"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_a_reason(name: str) -> None:
    read, why = REFUSED[name]
    module = Reading(read)
    module.held, module.pair = Decimal("1.25"), [Decimal("1.25"), Decimal("1.5")]
    x = torch.randn(2, 4)
    before = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, x, cost_guard=False)
    assert not report.applied and why in str(report.to_json())
    torch.testing.assert_close(module(x), before, rtol=0, atol=0)
