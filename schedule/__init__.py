"""A schedule-based rewriting compiler for PyTorch models: match, rewrite, verify, undo.

import schedule

sch = schedule.create_schedule(model, example_inputs=batch)
mlps = sch["transformer.h.*.mlp"]
mlps.fuse(mlps.find("bias_gelu_tanh", expect=12))
with schedule.verify(sch, batch):
    model = schedule.build(sch)
"""

from importlib import import_module
from types import ModuleType

from schedule.api.build import build
from schedule.api.optimize import optimize
from schedule.api.replay import load_recipe, replay
from schedule.api.schedule import Schedule, create_schedule
from schedule.api.tune import tune
from schedule.core.matching import Match
from schedule.patterns import any_of, call_module, optional, scalar, tensor
from schedule.primitives import list_primitives, primitive
from schedule.primitives.composing import Attempt, attempt, first_of, for_each, repeat
from schedule.primitives.group import Group
from schedule.recipes.files import save_recipe
from schedule.recipes.recipe import Recipe
from schedule.report.profiling import profile_step
from schedule.report.report import Report
from schedule.rules import Rule, list_rules, register_rule
from schedule.runtime.scheduled import FallbackWarning
from schedule.tuning import Tuning, choice, number, splits
from schedule.util.errors import (
    MatchError,
    NotApplicable,
    PathError,
    RecipeError,
    ScheduleError,
    ShardError,
    TraceError,
    VerificationError,
    did_you_mean,
)
from schedule.util.logs import set_logs, set_logs_by_environment
from schedule.util.moved import keep_old_names, new_name
from schedule.verify import equivalent, verify

__all__ = [
    "Attempt",
    "FallbackWarning",
    "Group",
    "Match",
    "MatchError",
    "NotApplicable",
    "PathError",
    "Recipe",
    "RecipeError",
    "Report",
    "Rule",
    "Schedule",
    "ScheduleError",
    "ShardError",
    "TraceError",
    "Tuning",
    "VerificationError",
    "any_of",
    "attempt",
    "build",
    "call_module",
    "choice",
    "create_schedule",
    "equivalent",
    "first_of",
    "for_each",
    "list_primitives",
    "list_rules",
    "load_recipe",
    "number",
    "optimize",
    "optional",
    "primitive",
    "profile_step",
    "register_rule",
    "repeat",
    "replay",
    "save_recipe",
    "scalar",
    "set_logs",
    "splits",
    "tensor",
    "tune",
    "verify",
]

keep_old_names()
set_logs_by_environment()


def __getattr__(name: str) -> ModuleType:
    """Return a moved module by its old name."""
    if new_name(f"{__name__}.{name}") is None:
        near = did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near and '; '}{near}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
