"""What the read-only commands do: show, explain, rules, primitives, doctor."""

from __future__ import annotations

import platform
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

import fused
from fused.assumptions import TABLE, failing
from fused.backends.availability import why_unavailable
from fused.versions import untested_releases
from fxschedule.cli.batches import load
from fxschedule.cli.explaining import Verdict, verdict
from fxschedule.cli.options import Asked
from fxschedule.cli.output import Code, emit, stage, stdout
from schedule.capture import original_class
from schedule.primitives import list_primitives
from schedule.report.tree_text import rendered_tree
from schedule.rules import list_rules, select_rules
from schedule.util.graph_text import graph_lines

WIDE = 110
"""Columns from which the rules are a table."""


def show(asked: Asked, path: str, depth: int | None, html: Path | None, as_json: bool) -> Code:
    """Print the modules as a tree, or a graph, or write a page."""
    loaded, sch = load(asked)
    node = sch if path in ("", ".") else sch.select(path)[0]
    if html is not None:
        with stage("tracing and drawing"):
            node.show_graph(html)
        if as_json:
            emit({"model": asked.name, "origin": loaded.origin, "path": node.path, "html": html})
        else:
            stdout().print(f"page: {html}", soft_wrap=True)
    elif path:
        with stage(f"tracing {node.label}"):
            lines = graph_lines(list(node.graph.nodes))
        if as_json:
            emit({"model": asked.name, "origin": loaded.origin, "path": node.path, "graph": lines})
        else:
            stdout().print(f"{node.label}: {original_class(node.module).__name__}", style="bold")
            stdout().print("\n".join(f"    {line}" for line in lines), markup=False, soft_wrap=True)
    elif as_json:
        every = [name for name, _ in sch.named_schedules() if depth is None or name.count(".") < depth]
        modules = {name: original_class(sch.module.get_submodule(name)).__name__ for name in every}
        emit({"model": asked.name, "origin": loaded.origin, "modules": modules})
    else:
        stdout().print(rendered_tree(sch, depth))
    return Code.DONE


def explain(asked: Asked, path: str, rules: list[str], cost_guard: bool, as_json: bool) -> Code:
    """Explain why rules do or do not apply in a module."""
    _, sch = load(asked)
    node = sch if path == "." else sch.select(path)[0]
    with stage(f"searching {node.label}"):
        found: list[Verdict] = [verdict(node, each, cost_guard) for each in select_rules(rules)]
    if as_json:
        emit({"model": asked.name, "path": node.path, "rules": [each.to_dict() for each in found]})
    else:
        for each in found:
            stdout().print(each, soft_wrap=True)
    return Code.DONE if any(each.applies for each in found) else Code.NO


def rules(names: list[str], as_json: bool) -> Code:
    """List the rules of these sets and families, or all; names are never cut."""
    selected = {rule.name for rule in select_rules(names)} if names else None
    listed = [rule for rule in list_rules() if selected is None or rule.name in selected]
    if as_json:
        emit([{"name": r.name, "family": r.family, "sets": r.sets, "summary": r.summary} for r in listed])
        return Code.DONE
    if stdout().width < WIDE:
        for rule in listed:
            stdout().print(f"{rule.name} ({', '.join([rule.family, *rule.sets])})", soft_wrap=True)
            stdout().print(Text(f"    {rule.summary}"))
        return Code.DONE
    table = Table()
    for name in ("family", "rule", "sets"):
        table.add_column(name, no_wrap=True)
    table.add_column("becomes", overflow="fold")
    shown = ""
    for rule in listed:
        table.add_row("" if rule.family == shown else rule.family, rule.name, ", ".join(rule.sets), Text(rule.summary))
        shown = rule.family
    stdout().print(table)
    return Code.DONE


def primitives(as_json: bool) -> Code:
    """List the primitives."""
    found = list_primitives()
    if as_json:
        emit(found)
    else:
        table = Table("primitive", "what it does")
        for name, what in found.items():
            table.add_row(name, Text(what))
        stdout().print(table)
    return Code.DONE


def doctor(features: bool, as_json: bool) -> Code:
    """Print what is installed, and what runs here."""
    _import_if_installed("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: _version(name) for name in ("fxschedule", "transformers", "triton", "networkx", "peft")}
    ways = {name: why_unavailable(name, device) or "" for name in ("reference", "inductor", "triton")}
    ops = {name: {"backend": choice.backend, "reason": choice.reason} for name, choice in fused.backends().items()}
    off = {each.name: each.otherwise for each in failing()}
    if as_json:
        kinds = {"untested": untested_releases(), "off": off}
        emit({"versions": versions, **kinds, "devices": _devices(), "unavailable": ways, "ops": ops})
    else:
        _print_doctor(versions, ways, ops)
        stdout().print(_features_table(off, features))
    return Code.NO if ways["inductor"] and ways["triton"] else Code.DONE


def _print_doctor(versions: dict[str, str], ways: dict[str, str], ops: dict[str, dict[str, str]]) -> None:
    about = Table("what", "here", title="this machine", title_justify="left")
    for name, version in versions.items():
        about.add_row(name, version)
    for text in untested_releases():
        about.add_row("untested", Text(text, style="yellow"))
    about.add_row("devices", ", ".join(_devices()))
    for name, why_not in ways.items():
        about.add_row(f"backend {name}", Text("runs" if not why_not else f"does not run: {why_not}"))
    backends = Table("op", "backend", "because", title="fused ops on large tensors", title_justify="left")
    for name, choice in ops.items():
        backends.add_row(name, choice["backend"], Text(choice["reason"]))
    stdout().print(about, backends, sep="\n")


def _features_table(off: dict[str, str], every: bool) -> Table | Text:
    """Return a table of the features that are off, and why; of all if ``every``."""
    shown = [each for each in TABLE if every or each.name in off]
    if not shown:
        return Text("All features that depend on private names of torch, CPython or transformers work here.")
    table = Table("feature", "here", "seen on", title="features", title_justify="left")
    for each in shown:
        here = Text(f"off: {each.otherwise}", style="yellow") if each.name in off else Text("works")
        table.add_row(each.name, here, each.seen)
    return table


def _import_if_installed(name: str) -> None:
    if find_spec(name) is not None:
        import_module(name)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    count: Any = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cpu ({torch.get_num_threads()} threads)", *(torch.cuda.get_device_name(i) for i in range(count))]
