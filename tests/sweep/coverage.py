"""``docs/coverage.md``: a row an architecture."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

_HEAD = """# Coverage

Every config class of transformers {transformers}, shrunk to a tiny model with random weights, eager attention, torch
{torch}. Written by `make sweep`. *rewritten*: places that each rule was applied in. *traced*: the root as one graph,
`calls` where modules with parts of their own stay calls in it. *equal*: of the rewritten model outputs, gradients and
an AdamW update, and everything undone to the bit / of the traced one outputs and gradients; both in train and eval,
at the recorded shape and at others that the model takes.

{summary}

{reasons}

| architecture | model | inputs | rewritten | traced | equal | reason |
|---|---|---|---|---|---|---|
"""


def write(results: Results, page: Path, data: Path, total: int) -> str:
    """Write the page and the same as JSON; returns the summary line.

    Args:
        total: how many config classes there are, with a result or without.
    """
    line = summary(results) + (f" {total - len(results)} have no result yet." if total > len(results) else "")
    counts = Counter(kind for result in results.values() for kind in result["reasons"])
    reasons = "\n".join(f"- {count} × {kind}" for kind, count in counts.most_common())
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    rows = "".join(_row(results[name]) for name in sorted(results))
    page.write_text(_HEAD.format(summary=line, reasons=reasons, **versions) + rows)
    kept = [{k: v for k, v in results[name].items() if k not in ("seconds", "of")} for name in sorted(results)]
    data.write_text(json.dumps({**versions, "architectures": kept}, indent=1) + "\n")
    return line


def summary(results: Results) -> str:
    """Counts, in one line."""
    every = list(results.values())
    built = [result for result in every if result.get("built")]
    rewritten = [result for result in built if result.get("rules")]
    traced = [result for result in built if result.get("traced") == "whole"]
    equal = [r for r in built if (r.get("equal") or r.get("trace_equal")) and not wrong(r)]
    return (
        f"{len(every)} config classes, {len(built)} built: {len(traced)} traced whole, {len(rewritten)} rewritten, "
        f"{len(equal)} checked and equal, {sum(map(wrong, built))} wrong."
    )


def wrong(result: Mapping[str, Any]) -> bool:
    """Whether anything was computed that the original does not compute."""
    return any(kind.startswith("WRONG") for kind in result["reasons"])


def _row(result: Mapping[str, Any]) -> str:
    rules = ", ".join(f"{name} {count}" for name, count in (result.get("rules") or {}).items())
    inputs = ", ".join(result.get("inputs") or ())
    equal = f"{_mark(result.get('equal'))} / {_mark(result.get('trace_equal'))}" if result.get("built") else ""
    reason = "; ".join(f"{kind}: {_short(why)}" for kind, why in result["reasons"].items())
    cells = (result["name"], result.get("model", ""), inputs, rules, result.get("traced") or "", equal, reason)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _mark(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "–"}[value]


def _short(text: str) -> str:
    """One line without a path of this machine."""
    line = re.sub(r"/\S*/(site-packages/)?", "", " ".join(text.split()))
    return line if len(line) <= 160 else line[:159] + "…"
