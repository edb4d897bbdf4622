"""The reference of the command line, from its own help."""

from __future__ import annotations

from typing import Any

import typer

import fxschedule.cli
from docs.generate.docstrings import as_table, inline, markdown


def command_reference() -> str:
    """Exit codes, then each command: what it is for, its arguments and options."""
    group: Any = typer.main.get_command(fxschedule.cli.app)
    parts = [markdown(fxschedule.cli.__doc__ or "").partition("\n\n")[2]]
    context = group.make_context("fxschedule", [], resilient_parsing=True)
    for name in group.list_commands(context):
        parts += _about(name, group.commands[name], context)
    return "\n".join(parts)


def _about(name: str, command: Any, context: Any) -> list[str]:
    rows = [["argument or option", "meaning", "default"]]
    own = command.make_context(name, [], parent=context, resilient_parsing=True)
    usage = " ".join([own.command_path, *(each.strip("{}") for each in command.collect_usage_pieces(own))])
    for parameter in command.get_params(own):
        record = parameter.get_help_record(own)
        names = record[0] if record else str(parameter.human_readable_name)
        rows.append([f"`{names}`", inline(getattr(parameter, "help", "") or ""), _default(parameter)])
    about, _, examples = inline(command.help or "").partition("Example")
    calls = [call.strip() for call in examples.partition(":")[2].split(";") if call.strip()]
    shown = ["```text", *calls, "```"] if calls else []
    return [f"## {name}\n", f"`{usage}`\n", about, *shown, "", "\n".join(as_table(rows)) + "\n"]


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if value in (None, "", False) or parameter.required else f"`{value}`"
