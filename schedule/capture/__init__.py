"""Capture of a forward: its calls recorded, its code traced, its graph guarded.

Everything outside imports from here. The rooms, each above those after it:

- ``specializing``: a graph of a module with the conditions for running it, from the signature to the checks.
- ``tracing``: one trace of one module, its submodules' calls, results, state, and the graph as data.
- ``python``: the forward as instrumented code; each read becomes a guard, each write is followed or refused.
- ``shapes``: sizes of results as expressions of the sizes of inputs.
- ``effects``: what calls in a graph change, and what is asked of objects that they may change.
- ``graph``: the interface of a trace, symbolic numbers, signatures, and the state of modules around it.
- ``guards``: conditions on Python state, their sources, and the code that checks them.
- ``recording``: the calls of all submodules in one run, and the structure of arguments and results.
- ``snapshots``: saved state of everything reachable from a model, compared and restored.
"""

from schedule.capture.effects.effects import (
    QUIET,
    RULE,
    changed,
    changes_object,
    drops,
    first_argument,
    is_check,
    is_random_name,
    mutates,
    updated_state,
    uses_random,
)
from schedule.capture.effects.later_reads import can_follow
from schedule.capture.effects.layers import SHARES
from schedule.capture.effects.opaque import Constant
from schedule.capture.effects.regions import REGION_FUNCTIONS, closing_regions, end_region
from schedule.capture.effects.replaying_calls import replayed
from schedule.capture.graph.messages import MESSAGES
from schedule.capture.graph.module_state import TRACING, state_unchanged, written
from schedule.capture.graph.signature import (
    FAST_PATH,
    Environment,
    Parameters,
    Signature,
    SignatureBuilder,
    autocast_dtype,
    device_condition,
    on_fast_path,
    parameter_conditions,
    quiet_autocast,
)
from schedule.capture.guards.guard_set import GuardSet, module_state_guards, shared_guard_set
from schedule.capture.guards.own_forward import (
    functions_called,
    has_own_forward,
    installed_forward,
    is_basic,
    is_batch_norm,
    is_conv1d,
    is_projection,
    is_shipped,
)
from schedule.capture.recording.hooks import (
    acts_now,
    acts_on_all,
    first_hook,
    is_hooked,
    nothing_collected,
    own_forward,
    runs_hooks_of,
)
from schedule.capture.recording.interception import interceptable, intercepted_calls
from schedule.capture.recording.recording import (
    Call,
    Recording,
    as_call,
    is_fully_sharded,
    record,
    recorded,
    undisturbed,
)
from schedule.capture.recording.structure import (
    Path,
    TensorSpec,
    generated_class,
    leaves,
    map_structure,
    module_source,
    original_class,
    rebuilt_sequence,
    tensors,
)
from schedule.capture.recording.user_lines import NeedsData
from schedule.capture.shapes.size_rules import size_read
from schedule.capture.snapshots.code_state import function_in, globals_named, members_named, names_in
from schedule.capture.snapshots.run_effects import modes_restored
from schedule.capture.snapshots.snapshot import Snapshot, restored
from schedule.capture.specializing.conditions import GuardMiss
from schedule.capture.specializing.expansion import Expansion, expand, unchanged
from schedule.capture.specializing.output_checks import OutputMiss, check_output
from schedule.capture.specializing.specialization import Inlined, Specialization, compiled, specialize
from schedule.capture.tracing.graph_data import has_constants, pack_graph, structural_key, unpack_graph

__all__ = [
    "FAST_PATH",
    "MESSAGES",
    "QUIET",
    "REGION_FUNCTIONS",
    "RULE",
    "SHARES",
    "TRACING",
    "Call",
    "Constant",
    "Environment",
    "Expansion",
    "GuardMiss",
    "GuardSet",
    "Inlined",
    "NeedsData",
    "OutputMiss",
    "Parameters",
    "Path",
    "Recording",
    "Signature",
    "SignatureBuilder",
    "Snapshot",
    "Specialization",
    "TensorSpec",
    "acts_now",
    "acts_on_all",
    "as_call",
    "autocast_dtype",
    "can_follow",
    "changed",
    "changes_object",
    "check_output",
    "closing_regions",
    "compiled",
    "device_condition",
    "drops",
    "end_region",
    "expand",
    "first_argument",
    "first_hook",
    "function_in",
    "functions_called",
    "generated_class",
    "globals_named",
    "has_constants",
    "has_own_forward",
    "installed_forward",
    "interceptable",
    "intercepted_calls",
    "is_basic",
    "is_batch_norm",
    "is_check",
    "is_conv1d",
    "is_fully_sharded",
    "is_hooked",
    "is_projection",
    "is_random_name",
    "is_shipped",
    "leaves",
    "map_structure",
    "members_named",
    "modes_restored",
    "module_source",
    "module_state_guards",
    "mutates",
    "names_in",
    "nothing_collected",
    "on_fast_path",
    "original_class",
    "own_forward",
    "pack_graph",
    "parameter_conditions",
    "quiet_autocast",
    "rebuilt_sequence",
    "record",
    "recorded",
    "replayed",
    "restored",
    "runs_hooks_of",
    "shared_guard_set",
    "size_read",
    "specialize",
    "state_unchanged",
    "structural_key",
    "tensors",
    "unchanged",
    "undisturbed",
    "unpack_graph",
    "updated_state",
    "uses_random",
    "written",
]
