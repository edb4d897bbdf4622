"""The reference of the primitives, from their docstrings."""

from __future__ import annotations

from docs.generate.docstrings import documented, signature
from schedule.primitives.registry import registered

GROUPS = {
    "Look": ("find", "find_parallel", "trace", "trace_until"),
    "Rewrite": ("fuse", "replace", "replace_all", "decompose", "optimize"),
    "Memory and random numbers": ("checkpoint", "fork_rng", "annotate"),
    "Several devices": (
        *("shard", "shard_experts", "sync", "context_parallel"),
        *("shard_plan", "apply_plan", "cut_pipeline_stage"),
    ),
}


def primitive_reference() -> str:
    """Every primitive: how it is called, the graph before and after, what it raises."""
    found = {name: function for name, function in registered().items() if _ours(function.__module__)}
    grouped = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"Further": tuple(name for name in found if name not in grouped)}
    parts: list[str] = []
    for group, names in groups.items():
        if not names:
            continue
        parts.append(f"## {group}\n")
        for name in names:
            call = signature(f"sch.{name}", found[name], leave_out=["sch"])
            parts += [f"### {name}\n", call, documented(found[name])]
    return "\n".join(parts)


def _ours(module: str) -> bool:
    return module.split(".")[0] == "schedule"
