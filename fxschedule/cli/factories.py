"""Models made by code of the user: ``module:factory`` or ``path/to/file.py:factory``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxschedule.cli.loaded import Loaded, missing, raised
from schedule.util.errors import did_you_mean
from schedule.util.user_code import UserCodeError, user_code

RETURNS = "return an nn.Module, or (nn.Module, batch) with a tensor, tuple or dict as the batch"


def from_factory(name: str) -> Loaded:
    """Return the model of ``module:factory``, and its batch if the factory returns one.

    The factory is called without arguments. A model in its place is taken as it is.

    Raises:
        CommandError: the module cannot be imported, there is no such factory, or it returns no model.
    """
    where, _, path = name.rpartition(":")
    found = _imported(where)
    for part in path.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, vars(found))
            raise missing(
                f"{where} has no {path!r}", fix=f"{near}{near and ' '}module:factory, such as my_models:make_gpt"
            )
        found = getattr(found, part)
    made = _called(name, found)
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise missing(f"{name} gave {type(made).__name__}, not a model", fix=RETURNS)
    if batch is not None and not isinstance(batch, (torch.Tensor, tuple, list, Mapping)):
        raise missing(f"{name} gave a model with {type(batch).__name__} as its batch", fix=RETURNS)
    return Loaded(model, batch, f"made by {name}")


def _called(name: str, found: Any) -> Any:
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise missing(
            f"{name} is {type(found).__name__}, not a function", fix="name a function without arguments that makes it"
        )
    try:
        with user_code(passing=UserCodeError):
            return found()
    except UserCodeError as error:
        raise raised(name, error.error, "a factory is called without arguments; correct it") from error.error


def _imported(where: str) -> ModuleType:
    """Import a module by name, or a file with its folder on the path of imports as ``python FILE`` does."""
    file = Path(where).absolute() if where.endswith(".py") else None
    folder, name = (str(file.parent), file.stem) if file else ("", where)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with user_code(passing=ModuleNotFoundError):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise missing(f"{where} needs a package: {error}", fix=f"install {error.name}") from error
        fix = "run this where it can be imported, or name its file: path/to/file.py:factory"
        raise missing(f"there is no module {where!r} to import", fix) from error
    except UserCodeError as error:
        raise raised(f"importing {where}", error.error, fix="correct it, so that Python can import it") from error.error
    if file is not None and Path(module.__file__ or "").absolute() != file:
        raise missing(f"{where} is hidden by another module {name!r}: {module.__file__}", fix="rename the file")
    return module
