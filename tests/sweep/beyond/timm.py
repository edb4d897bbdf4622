"""A small model of each family of timm, on the smallest images that one takes.

timm imports torchvision for its data sets alone, and torchvision's wheels load beside its own build of torch only: a
package that gives anything it is asked for stands in for it.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import itertools
import json
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from schedule.capture.recording.recording import undisturbed
from schedule.util.files import write
from tests.sweep import REFUSALS
from tests.sweep.beyond.case import Case, Unavailable, given, is_large, parameters, refuse_large

IMAGES = (64, 96, 128, 160, 192, 224, 256)
CLASSES = 7
CANDIDATES = 5  # the smallest ones of a family
COUNTS = Path(__file__).resolve().parents[3] / "build" / "timm"
"""Where the parameters of a family's models are written down: counting them takes up to a minute."""


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


@contextmanager
def _torchvision() -> Iterator[None]:
    """Stand in for torchvision while timm is imported; transformers would take the package for the real one."""
    parts = ("transforms", "transforms.functional", "datasets", "datasets.folder", "ops", "ops.misc", "models")
    names = ("torchvision", *(f"torchvision.{part}" for part in (*parts, "models.feature_extraction")))
    added = {name: _StandIn(name) for name in names if name not in sys.modules}
    for name, module in added.items():
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        parent, _, child = name.rpartition(".")
        if parent in added:
            setattr(added[parent], child, module)
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


@cache
def library() -> Any:
    """The library."""
    with _torchvision():
        return importlib.import_module("timm")


def of_timm(family: str) -> Case:
    """A small model of a family, with 7 classes and without stochastic depth.

    Raises:
        Unavailable: the family registers no model, its smallest one is too large, or none of its small ones trains.
    """
    counts = _counts(family)
    if not counts:
        raise Unavailable("no model", "the file registers none")
    refuse_large(min(counts.values()))
    small = sorted((name for name in counts if not is_large(counts[name])), key=lambda name: (counts[name], name))
    model, argument, shape = _running(small[:CANDIDATES])
    return Case(lambda: model, given(**{argument: lambda rows, length: torch.randn(rows + 2, *shape)}))


def _counts(family: str) -> dict[str, int]:
    """The numbers of parameters of a family's models that can be made on the meta device, by name."""
    path = COUNTS / library().__version__ / f"{family}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    found = {}
    with torch.random.fork_rng(devices=[]):
        for name in library().list_models(module=family):
            with suppress(*REFUSALS), torch.device("meta"):
                found[name] = parameters(library().create_model(name, num_classes=CLASSES))
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(found))
    return found


def _running(names: Sequence[str]) -> tuple[nn.Module, str, tuple[int, ...]]:
    """The first model that trains on the smallest images, its argument, and the shape of an image.

    Raises:
        Unavailable: none trains.
    """
    refused: Exception | None = None
    for size, name in itertools.product((*IMAGES, None), names):
        channels, *own = library().get_pretrained_cfg(name).input_size
        height, width = (size, size) if size else own
        try:
            model = _made(name, height)
            argument = next(iter(inspect.signature(model.forward).parameters))
            with undisturbed(model), torch.no_grad():
                model.train()(**{argument: torch.randn(4, channels, height, width)})  # batch norms need several
            return model, argument, (channels, height, width)
        except REFUSALS as error:
            refused = refused or error
    raise Unavailable("original refuses training", f"{type(refused).__name__}: {refused}")


def _made(name: str, size: int) -> nn.Module:
    try:
        model: nn.Module = library().create_model(name, num_classes=CLASSES, img_size=size)
    except TypeError:
        model = library().create_model(name, num_classes=CLASSES)
    for module in model.modules():
        if isinstance(getattr(module, "drop_prob", None), float):
            module.drop_prob = 0.0  # what is drawn for whole samples is compared elsewhere
    return model
