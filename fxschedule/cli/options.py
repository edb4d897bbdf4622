"""Arguments and options of the commands, and what can be said of them before torch is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fxschedule.cli.output import Code, CommandError
from fxschedule.cli.rule_names import FAMILIES, SETS
from schedule.util.errors import did_you_mean

VERIFIED = (2, 64)
"""Maximum numbers of rows and tokens in a verification, large enough at any model width for compiled ops to run."""
PROVE = f"Then compare it with the original, on up to {VERIFIED[0]} rows of {VERIFIED[1]} tokens."

Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A folder written by save_pretrained, the id of a model in the local Hugging Face cache, a model type of "
        "transformers such as gpt2 (random weights), timm:NAME, torchvision:NAME or diffusers:CLASS (random weights), "
        "or module:factory or file.py:factory of your own, which returns a model or (model, batch).",
    ),
]
ModulePath = Annotated[
    str, typer.Argument(metavar="PATH", help="A module, such as transformer.h.0.mlp; '.' is the whole model.")
]
Rules = Annotated[
    str,
    typer.Option(
        "--rules",
        help="Which rewrites: a set (default, memory, attention, inference, all), a family, a rule, or several by "
        "commas. `fxschedule rules` lists them.",
    ),
]
CostGuard = Annotated[
    bool | None,
    typer.Option(
        "--cost-guard/--no-cost-guard",
        help="Leave alone what would not pay at these sizes, or rewrite it all the same.",
        show_default="cost-guard; no-cost-guard with --tiny, where nothing pays",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Tiny = Annotated[
    bool, typer.Option("--tiny", help="Two small layers and small images, with random weights, to look at.")
]
Attention = Annotated[
    str, typer.Option("--attention", help="Attention of transformers: eager, sdpa, …; its own choice if not given.")
]
Remote = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model. Read it first.")
]
Device = Annotated[str, typer.Option("--device", help="Where it runs, such as cpu or cuda.")]
Rows = Annotated[int, typer.Option("--batch-size", min=1, help="Rows of the batch that is made for the model.")]
Length = Annotated[int, typer.Option("--length", min=1, help="Tokens of each row of it.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write the report there: out.html or out.json.")
]
RecipeIn = Annotated[
    Path | None,
    typer.Option(
        "--recipe", metavar="FILE", help="Do what this recipe says, in place of rules: a file of --recipe-out."
    ),
]
RecipeOut = Annotated[
    Path | None,
    typer.Option("--recipe-out", metavar="FILE", help="Write what was done as out.json, or as a script: out.py."),
]
Depth = Annotated[int | None, typer.Option("--depth", min=1, help="Levels of the tree; all if not given.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Draw the modules and their graphs: out.html.")
]


@dataclass(frozen=True)
class Asked:
    """What a command is asked about.

    Attributes:
        name: ``module:factory``, ``library:name``, a folder, the id of a cached model, or a model type of transformers.
        tiny: use a few small layers with random weights.
        attention: attention implementation in transformers; its default if "".
        trust_remote_code: run code included with the model.
        device: where it runs.
        rows: rows of the batch that is made for it.
        length: tokens of each row.
    """

    name: str
    tiny: bool = False
    attention: str = ""
    trust_remote_code: bool = False
    device: str = "cpu"
    rows: int = 2
    length: int = 12

    def __post_init__(self) -> None:
        """Refuse what can be told to be no model without torch."""
        refuse_no_model(self.name)


def named_rules(text: str) -> list[str]:
    """Return the names in ``--rules``.

    Raises:
        CommandError: one of them is no set, family or rule.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*SETS, *FAMILIES, *(rule for rules in FAMILIES.values() for rule in rules)]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            fix = f"{near}{near and ' '}`fxschedule rules` lists them"
            raise CommandError(f"there is no rule or family {name!r}", Code.USAGE, fix=fix)
    return names


def refuse_no_model(name: str) -> None:
    """Raise if ``name`` is a path where nothing is, or a file of Python that no function is named of.

    Raises:
        CommandError: says which functions the file has.
    """
    where, colon, _ = name.partition(":")
    if where.startswith(("/", ".", "~")) and not Path(where).exists():
        wanted = "a folder written by save_pretrained, or path/to/file.py:factory"
        raise CommandError(f"nothing is at {where}", Code.NO_MODEL, fix=wanted)
    if not where.endswith(".py"):
        return
    file = Path(where)
    if not file.is_file():
        raise CommandError(f"there is no file {where}", Code.NO_MODEL, fix="path/to/file.py:factory, or module:factory")
    if not colon:
        try:
            functions = [node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)]
        except SyntaxError as error:
            raise CommandError(f"{where} is not Python: {error}", Code.NO_MODEL, fix="correct it") from error
        named = " or ".join(f"{where}:{each}" for each in functions if not each.startswith("_"))
        raise CommandError(
            f"{where} is a file: which of its functions makes the model?",
            Code.NO_MODEL,
            fix=named or "write a function without arguments that returns the model, and name it: file.py:factory",
        )


def guarded(cost_guard: bool | None, tiny: bool) -> bool:
    """Return the ``--cost-guard`` option, or by default enable the guard except with ``--tiny``."""
    return not tiny if cost_guard is None else cost_guard
