"""Auto-tuning of the knobs of a schedule function under a memory bound."""

from typing import Any

from schedule.tuning.cost_model import Machine, Mixture, Network, Shape
from schedule.tuning.measuring import Measured, TrainingStep, Watch
from schedule.tuning.modeled_step import ModeledStep
from schedule.tuning.result import Tuning
from schedule.tuning.space import Choice, Number, choice, number, splits
from schedule.tuning.trial import Trial
from schedule.util.moved import warn_renamed

__all__ = [
    "Choice",
    "Machine",
    "Measured",
    "Mixture",
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
    """Return an object under its name of version 1, with a warning."""
    if name == "ModelledStep":
        warn_renamed("schedule.tuning.ModelledStep", "ModeledStep")
        return ModeledStep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
