"""Auto-tuning: the knobs of a schedule function, searched under a memory bound."""

from typing import Any

from schedule.tuning.cost_model import Machine, ModeledStep, Network, Shape
from schedule.tuning.measuring import Measured, TrainingStep, Watch
from schedule.tuning.result import Tuning
from schedule.tuning.space import Choice, Number, choice, number, splits
from schedule.tuning.trial import Trial
from schedule.util.moved import warn_renamed

__all__ = [
    "Choice",
    "Machine",
    "Measured",
    "ModeledStep",
    "Network",
    "Number",
    "Shape",
    "TrainingStep",
    "Trial",
    "Tuning",
    "Watch",
    "choice",
    "number",
    "splits",
]


def __getattr__(name: str) -> Any:
    """A name of version 1."""
    if name == "ModelledStep":
        warn_renamed("schedule.tuning.ModelledStep", "ModeledStep")
        return ModeledStep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
