"""Wrong calls, each an error in mypy; it is not run."""

from __future__ import annotations

from torch import nn

import schedule


def wrong(model: nn.Module) -> None:
    """Make each mistake once."""
    sch = schedule.create_schedule(model)
    sch.fues(1)  # wrong: misspelled
    sch.fuse(1)  # wrong: not a match
    sch.optimize(rule="memory")  # wrong: no such argument
    sch.shard("weight", "rows")  # wrong: an axis is a number
    schedule.verify(model, steps="five")  # wrong: not a number
    sch["layers.*"].decomposed()  # wrong: misspelled, on a group
    schedule.optimize(model).applied.append("rule")  # wrong: a dict
