"""Typer application with all commands. Torch, which takes seconds to import, is imported when a command runs."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer

from fxschedule.cli import commands

_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "markdown",
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


app = typer.Typer(
    name="fxschedule",
    no_args_is_help=True,
    epilog="Exit codes: 0 done; 1 done, with a negative result; 2 wrong command line; 3 no such model here; "
    "4 the model is refused; 130 interrupted (files are written whole or not at all).",
    **_SETTINGS,
)


def _version(asked: bool) -> None:
    if asked:
        print(metadata.version("fxschedule"))
        raise typer.Exit


@app.callback()
def fxschedule(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Rewrite PyTorch models with fused ops, explain every decision, and verify the results.

    Nothing is downloaded, and no remote code is run without permission. Every command takes --json.
    """


for _command in (
    commands.optimize,
    commands.verify,
    commands.bench,
    commands.profile,
    commands.show,
    commands.explain,
    commands.rules,
    commands.primitives,
    commands.doctor,
):
    app.command()(_command)


def main() -> None:
    """Run the command line interface."""
    app(prog_name="fxschedule")
