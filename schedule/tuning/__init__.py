"""Auto-tuning of the knobs of a schedule function under a memory bound."""

from schedule.tuning.cost_model import Machine, Mixture, Network, Shape
from schedule.tuning.measuring import Measured, TrainingStep, Watch
from schedule.tuning.modeled_step import ModeledStep
from schedule.tuning.result import Tuning
from schedule.tuning.space import Choice, Number, choice, number, splits
from schedule.tuning.trial import Trial

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
