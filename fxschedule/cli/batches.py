"""The model that a command is asked about, with a batch, as a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxschedule.cli.loaded import Loaded
from fxschedule.cli.models import load_model
from fxschedule.cli.options import Asked
from fxschedule.cli.output import Code, CommandError, stage
from fxschedule.cli.tiny.repairs import repaired
from fxschedule.cli.trials import found_inputs
from schedule.api.schedule import Schedule, create_schedule
from schedule.util.errors import NotApplicable


def load(asked: Asked) -> tuple[Loaded, Schedule]:
    """Load the model, and create its schedule with a batch.

    Raises:
        CommandError: there is no such model or device here.
        NotApplicable: no batch can be made for it.
    """
    _refuse_device(asked.device)
    with stage(f"loading {asked.name}"):
        loaded = load_model(asked)
        model = loaded.model.to(asked.device)
    batch = loaded.batch
    if batch is None:
        with stage("making a batch for it"):
            batch = _example(asked, model, loaded.shapes)
    return loaded, create_schedule(model, _moved(batch, asked.device))


def _example(asked: Asked, model: nn.Module, shapes: Sequence[Sequence[int]]) -> Any:
    try:
        return found_inputs(model, asked.rows, asked.length, repaired if asked.tiny else None, shapes)
    except NotApplicable as error:
        needed = error.fix.partition("batch=")[2]
        error.fix = "name a factory that returns (model, batch): module:factory or file.py:factory"
        error.fix += f", with the batch {needed}" if needed else ""
        raise


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
