"""``docs/coverage.md``: a row an architecture."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
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

_PLANS = """
## Tensor-parallel plans

The plan that `sch.shard_plan(2)` finds for every architecture that is called with tokens alone, carried out by two
simulated ranks. *covered*: outputs and gradients of both ranks equal the whole model's, and in every layer that tokens
reach the heads of the attention, or at least a quarter of the weights, are shared out. *attention*, *features*: layers
with the heads of an attention, or other features such as the width of an MLP, shared out, of all layers.
*column / row / whole*: projections. *shared*: of a layer's weights, in the layer with the least of it. *collectives*:
of all layers, forward + backward, and in brackets one each way for an attention or an MLP, which is the least there can
be; a list of several in a layer, such as experts, counts as one.

{summary}

{reasons}

| architecture | covered | attention | features | column / row / whole | shared | collectives | reason |
|---|---|---|---|---|---|---|---|
"""


def write(results: Results, page: Path, data: Path, total: int, plans: Results) -> str:
    """Write the page and the same as JSON; returns the summary lines.

    Args:
        total: how many config classes there are, with a result or without.
        plans: the same of tensor-parallel plans; those of text are shown.
    """
    line = summary(results) + (f" {total - len(results)} have no result yet." if total > len(results) else "")
    text = {name: plan for name, plan in plans.items() if plan.get("text")}
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    rows = "".join(_row(results[name]) for name in sorted(results))
    head = _HEAD.format(summary=line, reasons=_counted(results), **versions)
    planned = _PLANS.format(summary=plan_summary(plans), reasons=_counted(text))
    page.write_text(head + rows + planned + "".join(_plan_row(text[name]) for name in sorted(text)))
    kept = {"architectures": _kept(results), "plans": _kept(text)}
    data.write_text(json.dumps({**versions, **kept}, indent=1) + "\n")
    return f"{line}\n{plan_summary(plans)}"


def _counted(results: Results) -> str:
    counts = Counter(kind for result in results.values() for kind in result["reasons"])
    return "\n".join(f"- {count} × {kind}" for kind, count in counts.most_common())


def _kept(results: Results) -> list[dict[str, Any]]:
    return [{k: v for k, v in results[name].items() if k not in ("seconds", "of")} for name in sorted(results)]


def summary(results: Results) -> str:
    """Counts, in one line."""
    every = list(results.values())
    built = [result for result in every if result.get("built")]
    rewritten = [result for result in built if result.get("rules")]
    traced = [result for result in built if result.get("traced") == "whole"]
    bound = [result for result in traced if any(kind.startswith("traced for one") for kind in result["reasons"])]
    equal = [r for r in built if (r.get("equal") or r.get("trace_equal")) and not wrong(r)]
    followed = [result for result in built if not result.get("untraced")]
    holding = [result for result in built if any(result.get(each) for each in ("rules", "left", "untraced"))]
    everywhere = [result for result in holding if not (result.get("left") or result.get("untraced"))]
    return (
        f"{len(every)} config classes, {len(built)} built: {len(traced)} traced whole{_percent(traced, built)}, "
        f"{len(traced) - len(bound)} of them for every shape that was tried; every module traced that a rule is about, "
        f"in both modes, in {len(followed)}{_percent(followed, built)}; {len(rewritten)} rewritten, "
        f"of those with a construct {len(everywhere)} everywhere{_percent(everywhere, holding)}; "
        f"{len(equal)} checked and equal, {sum(map(wrong, built))} wrong."
    )


def _percent(some: Sized, every: Sized) -> str:
    """The share of ``some`` in ``every``, in brackets."""
    return f" ({100 * len(some) / len(every):.1f} %)" if every else ""


def plan_summary(plans: Results) -> str:
    """Counts of the plans, in one line."""
    text = [plan for plan in plans.values() if plan.get("text")]
    covered = [plan for plan in text if plan["covered"]]
    return (
        f"{len(text)} text architectures, {len(covered)} covered by a tensor-parallel plan{_percent(covered, text)}, "
        f"{sum(map(wrong, text))} wrong."
    )


def wrong(result: Mapping[str, Any]) -> bool:
    """Whether anything was computed that the original does not compute."""
    return any(kind.startswith("WRONG") for kind in result["reasons"])


def _row(result: Mapping[str, Any]) -> str:
    rules = ", ".join(f"{name} {count}" for name, count in (result.get("rules") or {}).items())
    inputs = ", ".join(result.get("inputs") or ())
    equal = f"{_mark(result.get('equal'))} / {_mark(result.get('trace_equal'))}" if result.get("built") else ""
    cells = (result["name"], result.get("model", ""), inputs, rules, result.get("traced") or "", equal, _why(result))
    return _cells(cells)


def _plan_row(plan: Mapping[str, Any]) -> str:
    layers, (forward, backward) = plan["layers"], plan["collectives"]
    return _cells(
        (
            plan["name"],
            "yes" if plan["covered"] else "no",
            f"{plan['attention']}/{layers}",
            f"{plan['features']}/{layers}",
            f"{plan['columns']} / {plan['rows']} / {plan['whole']}",
            f"{100 * plan['share']:.0f} %",
            f"{forward} + {backward} ({plan['minimum']} + {plan['minimum']})",
            _why(plan),
        )
    )


def _why(result: Mapping[str, Any]) -> str:
    return "; ".join(f"{kind}: {_short(why)}" for kind, why in result["reasons"].items())


def _cells(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _mark(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "–"}[value]


def _short(text: str) -> str:
    """One line without a path of this machine."""
    line = re.sub(r"/\S*/(site-packages/)?", "", " ".join(text.split()))
    return line if len(line) <= 160 else line[:159] + "…"
