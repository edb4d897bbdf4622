"""The primitives, one file each, all of them methods of schedules and groups."""

from schedule.primitives.annotate import annotate
from schedule.primitives.checkpoint import checkpoint
from schedule.primitives.context_parallel import context_parallel
from schedule.primitives.cut_pipeline_stage import cut_pipeline_stage
from schedule.primitives.decompose import decompose
from schedule.primitives.find import find, find_parallel
from schedule.primitives.fork_rng import fork_rng
from schedule.primitives.fuse import fuse
from schedule.primitives.plan import apply_plan, shard_plan
from schedule.primitives.registry import list_primitives, primitive
from schedule.primitives.replace import replace, replace_all
from schedule.primitives.shard import shard
from schedule.primitives.shard_experts import shard_experts
from schedule.primitives.sync import sync
from schedule.primitives.trace import trace, trace_until

__all__ = [
    "annotate",
    "apply_plan",
    "checkpoint",
    "context_parallel",
    "cut_pipeline_stage",
    "decompose",
    "find",
    "find_parallel",
    "fork_rng",
    "fuse",
    "list_primitives",
    "primitive",
    "replace",
    "replace_all",
    "shard",
    "shard_experts",
    "shard_plan",
    "sync",
    "trace",
    "trace_until",
]
