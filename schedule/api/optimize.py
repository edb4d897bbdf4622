"""``optimize``: apply every rule wherever it fits."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.optimizer import Rules, optimize_by
from schedule.primitives.group import Group
from schedule.report.entries import Entry
from schedule.report.report import Report
from schedule.rules import listed, select_rules
from schedule.util.arguments import keywords_checked
from schedule.util.internal_errors import InternalError, contained, own_errors


@keywords_checked()
def optimize(
    model: nn.Module | Schedule | Group[Any],
    batch: Any = None,
    *,
    rules: Rules = "default",
    strict: bool = False,
    cost_guard: bool = True,
    measure: bool = False,
) -> Report:
    """Apply every rewrite rule wherever it fits, and return a report with reasons.

    ::

        report = schedule.optimize(model, batch)      # model is the same object, faster and smaller
        print(report)

    The report lists the rewritten, skipped and nearly matching call sites. Running it again changes nothing more. Each
    rule with matches is one step of the schedule's history. A module that cannot be traced is left alone, and the
    report says why.

    Args:
        model: a model, or a schedule or group of schedules to optimize only these modules and all below.
        batch: example inputs of the model, with the sizes it will run at; used only if the schedule has none yet.
            If None, it is made from the model (:mod:`schedule.batches`).
        rules: a set (``"default"``, ``"memory"``, ``"attention"``, ``"inference"``, ``"all"``), the name of a rule or
            family, or a list of names and rules.
        strict: raise, and change nothing, if anything resembling a rule's pattern cannot be rewritten.
        cost_guard: skip rewrites without a gain at the sizes in the recorded run (:mod:`schedule.rules.thresholds`).
        measure: run a training step before and after as well, for the report (:meth:`Report.measure`). If the model
            does not train on its example inputs, the report says so.

    Raises:
        NotApplicable: the model refuses the batch, or none was given and none can be made from it.
        MatchError: there is no such rule; or, with ``strict``, something could not be rewritten.
        InternalError: with ``strict``, our own code failed; without it, the report shows the error.
    """
    try:
        with own_errors("optimizing"):
            rules = listed(rules)
            target = model if isinstance(model, (Schedule, Group)) else create_schedule(model, batch)
            report = optimize_by(select_rules(rules), target, batch, rules=rules, strict=strict, cost_guard=cost_guard)
    except InternalError as error:
        if strict:
            raise
        return Report([Entry.of(contained(error))], _module_of(model))
    if measure:
        report.measure_if_possible()
    return report


def _module_of(model: nn.Module | Schedule | Group[Any]) -> nn.Module:
    node = next(iter(model)) if isinstance(model, Group) else model
    return node if isinstance(node, nn.Module) else node.module
