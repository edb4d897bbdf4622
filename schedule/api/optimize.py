"""``optimize``: every rule wherever it fits."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.optimizer import Rules, optimize_by
from schedule.primitives.group import Group
from schedule.report.report import Report
from schedule.rules import select_rules


def optimize(
    model: nn.Module | Schedule | Group[Any],
    batch: Any = None,
    *,
    rules: Rules = "default",
    strict: bool = False,
    cost_guard: bool = True,
) -> Report:
    """Apply every rewrite rule wherever it fits, and report where it did, where not, and why.

    ::

        report = schedule.optimize(model, batch)      # model is the same object, faster and smaller
        print(report)

    Running it again changes nothing more. Each rule that found something is one step of the schedule's history.
    A module that cannot be traced is left alone, and the report says why.

    Args:
        model: a model, or a schedule or group of schedules: then only those modules and all below.
        batch: what the model is called with, of the sizes it will run at; not needed for a schedule that has one.
            Made from the model if there is none (:mod:`schedule.capture.examples`).
        rules: a set (``"default"``, ``"memory"``, ``"attention"``, ``"all"``), the name of a rule or family, or a list
            of names and rules.
        strict: raise, and change nothing, if anything that looks like a rule's construct cannot be rewritten.
        cost_guard: leave alone what would not pay, by the sizes in the recorded run (:mod:`schedule.rules.thresholds`).

    Raises:
        NotApplicable: the model refuses the batch, or none was given and none can be made from it.
        MatchError: no such rule; or, with ``strict``, what could not be rewritten.
    """
    rules = rules if isinstance(rules, str) else list(rules)
    target = model if isinstance(model, (Schedule, Group)) else create_schedule(model, batch)
    return optimize_by(select_rules(rules), target, batch, rules=rules, strict=strict, cost_guard=cost_guard)
