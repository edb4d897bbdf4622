"""The reference of the rules, from the registry: what each matches, what it becomes, and what is proven."""

from __future__ import annotations

import sys

import torch

from docs.generate.docstrings import as_table, inline, markdown
from docs.generate.sources import listing
from schedule.rules import Proof, Rule, list_rules, thresholds
from schedule.rules.proof import SLACK, TOLERANCES


def rule_reference() -> str:
    """The sets, every rule by the file that it is in, and the thresholds."""
    parts = [_overview(), ""]
    shown = ""
    for rule in list_rules():
        if rule.build.__module__ != shown:
            shown = rule.build.__module__
            title, about = shown.removeprefix("schedule.rules.").replace("_", " "), sys.modules[shown].__doc__ or ""
            parts += [f"## {title.capitalize()}\n", markdown(about)]
        parts += [f"### {rule.name}\n", *_about(rule)]
    parts += ["## Thresholds\n", _thresholds(), markdown(thresholds.__doc__ or "")]
    return "\n".join(parts)


def _overview() -> str:
    rows = [["rule", "becomes", "sets"]]
    for rule in list_rules():
        rows.append([f"[{rule.name}](#{rule.name})", f"`{rule.summary}`", ", ".join(rule.sets) or "by name"])
    return "\n".join(as_table(rows))


def _about(rule: Rule) -> list[str]:
    patterns = ", ".join(f"`{pattern.name}`" for pattern in rule.patterns)
    lines = [
        f"- **Matches** {patterns}",
        f"- **Becomes** `{rule.summary}`",
        f"- **Sets**: {', '.join(rule.sets) or 'none; asked for by name'}; family `{rule.family}`",
    ]
    lines += [f"- **Left alone**: {_reason(reason)}" for _, reason in rule.bystanders if isinstance(reason, str)]
    if rule.proof is None:
        return ["\n".join([*lines, "- **Proof**: none", ""])]
    return ["\n".join([*lines, f"- **Proven**: {_proven(rule.proof)}", ""]), _forms(rule.proof)]


def _reason(text: str) -> str:
    return inline(text) + "."


def _proven(proof: Proof) -> str:
    allowed = "; ".join(f"{str(dtype).removeprefix('torch.')} {_allowed(dtype)}" for dtype in proof.dtypes)
    shapes = ", ".join(f"`{list(shape)}`" for shape in proof.shapes)
    refused = f"; lookalikes that are refused: {len(proof.refused)}" if proof.refused else ""
    return f"outputs and gradients of {len(proof.forms)} forms at {shapes}: {allowed}{refused}"


def _allowed(dtype: torch.dtype) -> str:
    if dtype not in TOLERANCES:
        return f"{SLACK} × eager's own error"
    relative, absolute = TOLERANCES[dtype]
    return f"rtol {relative:g}, atol {absolute:g}"


def _forms(proof: Proof) -> str:
    """The forms and the lookalikes as code, folded."""
    parts = ['??? note "The forms as models write them, and the lookalikes that must not match"', ""]
    for title, forms in (("Proven equal:", proof.forms), ("Refused:", proof.refused)):
        if forms:
            code = (f"    {line}" for line in listing(forms))
            parts += [f"    {title}", "", "    ```py", *code, "    ```", ""]
    return "\n".join(parts)


def _thresholds() -> str:
    rows = [["construct", "elements, CPU", "elements, other devices"]]
    rows += [[kind, f"{limit.cpu:,}", f"{limit.other:,}"] for kind, limit in thresholds.THRESHOLDS.items()]
    table = "\n".join(as_table(rows))
    return (
        "From how many elements on a rewrite is made; below, it is left alone as not paying, and the report says so. "
        f"`cost_guard=False` rewrites all the same.\n\n{table}\n"
    )
