"""Example inputs by the docstring of a forward, for arguments that are not known by name.

transformers writes ``num_options (`torch.LongTensor` of shape `(batch_size, num_questions)`)``: the dtype, and a name
for each dimension, which is looked up in the config.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from schedule.batches.config_values import TEXT, Configs
from schedule.batches.images import channels, image_size
from schedule.batches.inputs import Inputs, Repair, example_inputs
from schedule.batches.requested_sizes import Layouts, Makers, Sizes

_ARGUMENT = re.compile(r"^\s*(\w+) \(`?([^`\n]*?)`? of shape `?\(((?:[^()\n]|\([^()\n]*\))*)\)", re.MULTILINE)
_ASIDE = re.compile(r"\([^()]*\)")


@dataclass(frozen=True)
class Documented:
    """Documentation of one argument.

    Attributes:
        kind: the type, such as ``torch.LongTensor``.
        dimensions: their names, in order, such as ``("batch_size", "num_queries")``.
    """

    kind: str
    dimensions: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether its numbers are integers."""
        return re.search(r"Long|Int", self.kind) is not None

    def shape(self, configs: Configs, known: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes: from ``known`` by a word in the dimension's name, else from the config, else 2."""
        return tuple(math.prod(_size(part, configs, known) for part in name.split("*")) for name in self.dimensions)


def documented(forward: Callable[..., Any]) -> dict[str, Documented]:
    """Return the arguments of ``forward`` with shapes in its docstring."""
    found: dict[str, Documented] = {}
    for name, kind, shape in _ARGUMENT.findall(inspect.getdoc(forward) or ""):
        dimensions = tuple(part.strip() for part in _ASIDE.sub("", shape).split(",") if part.strip())
        found.setdefault(name, Documented(kind, dimensions))
    return found


def documented_inputs(model: nn.Module, rows: int = 2, length: int = 12, repair: Repair | None = None) -> Inputs:
    """Return a batch made from the config of ``model``, and the docstring of its forward.

    Args and errors are those of :func:`schedule.batches.example_inputs`.
    """
    return example_inputs(model, rows, length, repair, documented_makers(model.forward))


def documented_makers(forward: Callable[..., Any]) -> Makers:
    """Return makers of the arguments of ``forward`` with shapes in its docstring."""
    return {name: partial(_made, name, said) for name, said in documented(forward).items()}


def _made(name: str, said: Documented, sizes: Sizes) -> Layouts:
    """Return an argument as documented. Ids other than those of tokens are 0 or 1."""
    height, width = image_size(sizes.configs)
    known = {"batch": sizes.rows, "total": sizes.rows, "len": sizes.length, "sequence": sizes.length}
    known |= {"height": height, "width": width, "image_size": height, "num_channels": channels(sizes.configs)}
    shape = said.shape(sizes.configs, known)
    if "mask" in name and len(shape) < 4:  # those are images
        return [sizes.ones(*shape).bool(), sizes.ones(*shape)] if "Bool" in said.kind else [sizes.ones(*shape)]
    if name.endswith("input_ids"):
        return [sizes.tokens(sizes.configs.number("vocab_size", near=TEXT, default=2), shape[-1])]
    if said.whole or name.endswith("_ids"):
        return [sizes.whole(2, *shape), sizes.ones(*shape)]
    return [sizes.normal(*shape)]


def _size(name: str, configs: Configs, known: Mapping[str, int]) -> int:
    name = name.strip()
    if name.isdigit():
        return int(name)
    for word, size in known.items():
        if word in name:
            return size
    for candidate in dict.fromkeys((name, name.removeprefix("max_"), f"num_{name}", f"{name}_dim")):
        size = configs.number(candidate)
        if size > 0:
            return size
    if re.search(r"hidden|embed|dim$", name):
        return configs.number("hidden_size", "d_model", "embed_dim", default=2)
    return 2
