"""Options shared by several commands, and loading of the requested schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fxschedule.cli.loaded import Loaded
from fxschedule.cli.models import Wanted
from fxschedule.cli.output import Code, CommandError, stage
from fxschedule.cli.tiny.batches import repaired
from schedule.api.schedule import Schedule, create_schedule
from schedule.capture.examples import found_inputs
from schedule.rules import Rule, select_rules
from schedule.util.errors import MatchError, NotApplicable

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
        help="Which rewrites: a set (default, memory, attention, all), a family, a rule, or several by commas. "
        "`fxschedule rules` lists them.",
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


@dataclass(frozen=True)
class Asked:
    """Options of a command for the model and its batch."""

    wanted: Wanted
    device: str
    rows: int
    length: int

    def load(self) -> tuple[Loaded, Schedule]:
        """Load the model, and create its schedule with a batch.

        Raises:
            CommandError: there is no such model or device here.
            NotApplicable: no batch can be made for it.
        """
        _refuse_device(self.device)
        with stage(f"loading {self.wanted.name}"):
            loaded = self.wanted.load()
            model = loaded.model.to(self.device)
        batch = loaded.batch
        if batch is None:
            with stage("making a batch for it"):
                batch = self._example(model, loaded.shapes)
        return loaded, create_schedule(model, _moved(batch, self.device))

    def _example(self, model: nn.Module, shapes: Sequence[Sequence[int]]) -> Any:
        try:
            return found_inputs(model, self.rows, self.length, repaired if self.wanted.tiny else None, shapes)
        except NotApplicable as error:
            error.fix += "; here, name a factory that returns (model, batch): module:factory or file.py:factory"
            raise


def guarded(cost_guard: bool | None, tiny: bool) -> bool:
    """Return the ``--cost-guard`` option, or by default enable the guard except with ``--tiny``."""
    return not tiny if cost_guard is None else cost_guard


def rules_of(names: str) -> list[Rule]:
    """Return the rules named in ``--rules``.

    Raises:
        CommandError: there is no such rule.
    """
    try:
        return select_rules([name.strip() for name in names.split(",") if name.strip()])
    except MatchError as error:
        raise CommandError(error.why, Code.USAGE, fix=error.fix) from error


def _refuse_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CommandError(
            f"nothing runs on {device!r} here: {reason}", Code.USAGE, fix="`fxschedule doctor`"
        ) from error


def _moved(batch: Any, device: str) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    return type(batch)(_moved(value, device) for value in batch) if type(batch) in (list, tuple) else batch
