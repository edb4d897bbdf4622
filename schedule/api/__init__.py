"""Public entry points: schedules, the functions on a model or its schedule, and all other names of ``schedule``."""

from schedule.api.build import build
from schedule.api.optimize import optimize
from schedule.api.replay import load_recipe, replay
from schedule.api.schedule import Schedule, create_schedule
from schedule.api.tune import tune
from schedule.core.matching import Match
from schedule.distributed.communication.rng_tracker import RNGStatesTracker
from schedule.patterns import any_of, call_module, optional, scalar, tensor
from schedule.primitives import list_primitives, primitive
from schedule.primitives.composing import Attempt, attempt, first_of, for_each, repeat
from schedule.primitives.group import Group
from schedule.recipes.recipe import Recipe
from schedule.recipes.recipe_files import save_recipe
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
)
from schedule.util.internal_errors import InternalError, InternalErrorWarning
from schedule.util.logs import set_logs
from schedule.verify import equivalent, verify

__all__ = [
    "Attempt",
    "FallbackWarning",
    "Group",
    "InternalError",
    "InternalErrorWarning",
    "Match",
    "MatchError",
    "NotApplicable",
    "PathError",
    "RNGStatesTracker",
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
