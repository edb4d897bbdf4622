"""``docs/coverage.md`` and ``docs/plans.md``: a row an architecture."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

_COVERAGE = """# Coverage

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

_BEYOND = """# Beyond transformers

One model of every family of timm {timm} (a small one, on the smallest images that it takes, without stochastic depth),
classes of diffusers {diffusers}, tiny, x-transformers {x_transformers} over its options, and torch.nn's own, torch
{torch}. Written by `make sweep-beyond`; the columns are those of [coverage](coverage.md).

{summary}

{reasons}

| model | class | inputs | rewritten | traced | equal | reason |
|---|---|---|---|---|---|---|
"""

_PLANS = """# Tensor-parallel plans

The plan that `sch.shard_plan(2)` finds for every architecture of transformers {transformers} that is called with tokens
alone, carried out by two simulated ranks, torch {torch}. Written by `python -m tests.sweep --plans`. *covered*: outputs
and gradients of both ranks equal the whole model's, and in every layer that tokens reach the heads of the attention, or
at least a quarter of the weights, are sharded. *attention*, *features*: layers with the heads of an attention, or
other features such as the width of an MLP, sharded, of all layers. *column / row / whole*: projections. *shared*: of
a layer's weights, in the layer with the least of it. *collectives*: of all layers, forward + backward, and in brackets
one each way for an attention or an MLP, which is the least there can be; a list of several in a layer, such as experts,
counts as one. *experts*: a plan shards the experts of a mixture along their width; on a mesh with a dimension `"ep"`,
or with `experts=True`, it spreads whole experts over the ranks instead. That plan is simulated as well: modules of
experts that are spread, with equal outputs and gradients, of all that are called.

{summary}

{reasons}

| architecture | covered | attention | features | column / row / whole | shared | collectives | experts | reason |
|---|---|---|---|---|---|---|---|---|
"""

NOTHING_TO_COMPARE = frozenset(
    {"original not finite", "original not repeatable", "original refuses training", "too large"}
)
"""Why a tiny model that was made does not count as built: it does not run, or nothing it computes can be compared."""


@dataclass(frozen=True)
class Page:
    """How results are shown.

    Attributes:
        head: text with places for versions, summary and the counts of reasons.
        row: of one result.
        counted: what there is of all of them.
        summary: that in one line.
        packages: those with versions in the head.
    """

    head: str
    row: Callable[[Mapping[str, Any]], str]
    counted: Callable[[Results], dict[str, int]]
    summary: Callable[[Mapping[str, int]], str]
    packages: tuple[str, ...] = ("transformers", "torch")

    def write(self, results: Results, total: int, older: int, page: Path, data: Path) -> str:
        """Write the page, and its counts as JSON, which other pages quote; returns the summary line.

        Args:
            total: how many architectures there are, with a result or without.
            older: how many results are not of the code as it is.
        """
        counts = self.counted(results)
        line = self.summary(counts)
        line += f" {total - len(results)} have no result yet." if total > len(results) else ""
        line += f" {older} of the results are of earlier code." if older else ""
        versions = {name: importlib.metadata.version(name) for name in self.packages}
        head = self.head.format(summary=line, reasons=_reasons(results), **versions)
        page.write_text(head + "".join(self.row(results[name]) for name in sorted(results)))
        counts |= {"no result yet": total - len(results), "of earlier code": older}
        data.write_text(json.dumps({"versions": versions, "counts": counts}, indent=1) + "\n")
        return line


def _reasons(results: Results) -> str:
    counts = Counter(kind for result in results.values() for kind in result["reasons"])
    return "\n".join(f"- {count} × {kind}" for kind, count in counts.most_common())


def counted(results: Results) -> dict[str, int]:
    """How many there are, and of how many what is known."""
    every = list(results.values())
    built = [r for r in every if r.get("built") and NOTHING_TO_COMPARE.isdisjoint(r["reasons"])]
    traced = [result for result in built if result.get("traced") == "whole"]
    elsewhere = [result for result in traced if not _kinds(result) & {"traced for one shape", "trace never runs"}]
    everyhow = [result for result in elsewhere if not any(kind.startswith("traced for") for kind in _kinds(result))]
    every_rule = [result for result in built if result.get("every_rule")]
    followed = [result for result in built if not result.get("untraced")]
    holding = [result for result in built if any(result.get(each) for each in ("rules", *_LEFT))]
    found = {
        "all": every,
        "built": built,
        "whole": traced,
        "at other shapes": elsewhere,
        "at every shape": everyhow,
        "with further graphs": [result for result in everyhow if result.get("trace_further")],
        "innermost": followed,
        "around them": [result for result in followed if not result.get("untraced_around")],
        "rewritten": [result for result in built if result.get("rules")],
        "with a construct": holding,
        "everywhere": [result for result in holding if not any(map(result.get, _LEFT))],
        "equal": [r for r in built if (r.get("equal") or r.get("trace_equal")) and not wrong(r)],
        "by all rules": every_rule,
        "equal by all rules": [result for result in every_rule if result["every_equal"]],
        "wrong": [result for result in built if wrong(result)],
    }
    return {name: len(some) for name, some in found.items()}


def summary(counts: Mapping[str, int], of: str = "config classes") -> str:
    """The counts in one line."""

    def share(name: str, text: str = "", whole: str = "built") -> str:
        return f"{counts[name]}{text}{_percent(counts[name], counts[whole])}"

    return (
        f"{counts['all']} {of}, {counts['built']} built: {share('whole', ' traced whole')}, "
        f"{share('at other shapes', ' of them right at other shapes')} and "
        f"{share('at every shape', ' at every shape that was tried, in both modes')}, {counts['with further graphs']} "
        "of these with further graphs for other numbers of rows or lengths; every attention, MLP, norm and other "
        f"innermost module that a rule is about traced in {share('innermost')}, those around them too in "
        f"{share('around them')}; "
        f"{counts['rewritten']} rewritten, of those with a construct "
        f"{share('everywhere', ' everywhere', 'with a construct')}; {counts['equal']} checked and equal, "
        f"{counts['equal by all rules']} of {counts['by all rules']} rewritten by all rules are equal, "
        f"{counts['wrong']} wrong."
    )


_LEFT = ("left", "untraced", "untraced_around")


def _kinds(result: Mapping[str, Any]) -> set[str]:
    return set(result["reasons"])


def _percent(some: int, every: int) -> str:
    """The share of ``some`` in ``every``, in brackets."""
    return f" ({100 * some / every:.1f} %)" if every else ""


def counted_plans(plans: Results) -> dict[str, int]:
    """How many plans there are, and of how many what is known."""
    mixtures = [plan for plan in plans.values() if plan["experts"][1]]
    return {
        "all": len(plans),
        "covered": sum(plan["covered"] for plan in plans.values()),
        "mixtures": len(mixtures),
        "spread": sum(plan["experts"][0] == plan["experts"][1] for plan in mixtures),
        "wrong": sum(map(wrong, plans.values())),
    }


def plan_summary(counts: Mapping[str, int]) -> str:
    """The counts of the plans in one line."""
    return (
        f"{counts['all']} text architectures, {counts['covered']} covered by a tensor-parallel "
        f"plan{_percent(counts['covered'], counts['all'])}; {counts['mixtures']} of them mixtures of experts, "
        f"{counts['spread']} with the experts spread over the ranks{_percent(counts['spread'], counts['mixtures'])}; "
        f"{counts['wrong']} wrong."
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
    layers, (forward, backward), (spread, mixtures) = plan["layers"], plan["collectives"], plan["experts"]
    return _cells(
        (
            plan["name"],
            "yes" if plan["covered"] else "no",
            f"{plan['attention']}/{layers}",
            f"{plan['features']}/{layers}",
            f"{plan['columns']} / {plan['rows']} / {plan['whole']}",
            f"{100 * plan['share']:.0f} %",
            f"{forward} + {backward} ({plan['minimum']} + {plan['minimum']})",
            f"{spread}/{mixtures}" if mixtures else "",
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


COVERAGE = Page(_COVERAGE, _row, counted, summary)
BEYOND = Page(
    _BEYOND, _row, counted, partial(summary, of="models"), packages=("timm", "diffusers", "x_transformers", "torch")
)
PLANS = Page(_PLANS, _plan_row, counted_plans, plan_summary)
