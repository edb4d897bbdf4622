"""Typer application with all commands, each imported when it is called.

The modules of the commands import torch, which takes seconds. The list of commands needs only the first lines of their
docstrings, which are read from the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "markdown",
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_MODULES = {
    "working": ("optimize", "verify", "bench", "profile"),
    "looking": ("show", "explain", "rules", "primitives", "doctor"),
}


def _listed(module: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the commands of a module as the list of commands shows them, without importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    texts = {each.name: ast.get_docstring(each) for each in tree.body if isinstance(each, ast.FunctionDef)}
    return {name: TyperCommand(name, help=inspect.cleandoc(texts[name] or "").partition("\n\n")[0]) for name in names}


class Commands(TyperGroup):
    """Group of the commands, which imports the module of a command to run it or to show its options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for module, names in _MODULES.items():
            self.commands.update(_listed(module, names))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, those that change a model first."""
        return [name for names in _MODULES.values() for name in names]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments, as click does."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(command.name)), rest


def load(name: str) -> Any:
    """Import and return a command."""
    module = next(module for module, names in _MODULES.items() if name in names)
    single = typer.Typer(**_SETTINGS)
    single.command(name)(getattr(importlib.import_module(f"fxschedule.cli.{module}"), name))
    return typer.main.get_command(single)


app = typer.Typer(
    name="fxschedule",
    cls=Commands,
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


def main() -> None:
    """Run the command line interface."""
    app(prog_name="fxschedule")
