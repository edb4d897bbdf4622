"""Parts of models: what a part is called with is what its whole gives it."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fxschedule.cli.documented import documented_inputs
from fxschedule.cli.tiny.repairs import repaired
from schedule.batches import Inputs
from schedule.capture.recording.recording import undisturbed
from schedule.capture.recording.structure import leaves
from schedule.util.errors import NotApplicable
from tests.sweep import REFUSALS, beyond

REFUSED: tuple[type[BaseException], ...] = (*REFUSALS, StrictDataclassError)
"""How a model or a config refuses its sizes."""

_WHOLES: WeakKeyDictionary[nn.Module, tuple[nn.Module, nn.Module]] = WeakKeyDictionary()  # copy → whole, part in it


def holders(config: type[PreTrainedConfig]) -> Iterator[tuple[str, str]]:
    """Architectures beside ``config`` whose configs hold one, and the name of the field."""
    beside = vars(importlib.import_module(config.__module__)).values()
    for holder in beside:
        if isinstance(holder, type) and issubclass(holder, PreTrainedConfig) and holder.model_type in CONFIG_MAPPING:
            for field, held in holder.sub_configs.items():
                if held is config or (held is AutoConfig and type(_default(holder, field)) is config):
                    yield holder.model_type, field


def _default(holder: type[PreTrainedConfig], field: str) -> Any:
    try:
        return getattr(holder(), field, None)
    except REFUSED:
        return None


def parts(whole: nn.Module, config: type[PreTrainedConfig]) -> list[nn.Module]:
    """The modules in ``whole`` that are made of ``config`` or named for it, outer ones first."""
    name = config.__name__.removesuffix("Config")
    return [
        module
        for path, module in whole.named_modules()
        if path and (type(getattr(module, "config", None)) is config or type(module).__name__.startswith(name))
    ]


def part_of(whole: nn.Module, config: type[PreTrainedConfig]) -> tuple[nn.Module, Inputs]:
    """A copy of the part of ``whole`` that is made of ``config``, and what an example gives it.

    Raises:
        NotApplicable: there is no such part that can be called by itself with what it receives.
    """
    for part in parts(whole, config):
        batch = received(whole, part, documented_inputs(whole, repair=repaired))
        if batch is None:
            continue
        mine = copy.deepcopy(part)
        try:
            with undisturbed(mine), torch.no_grad():
                mine.eval()(**batch)
        except REFUSED:  # it needs what is left out: a cache, an output
            continue
        _WHOLES[mine] = whole, part
        return mine, batch
    raise NotApplicable(f"an example of {type(whole).__name__} calls no part that is made of {config.__name__}")


def inputs_for(model: nn.Module, rows: int, length: int) -> Inputs:
    """An example for ``model``, through its whole if it is a part that :func:`part_of` made.

    Raises:
        NotApplicable: there is none.
    """
    of_library = beyond.inputs_of(model, rows, length)
    if of_library is not None:
        return of_library
    if model not in _WHOLES:
        return documented_inputs(model, rows, length, repaired)
    whole, part = _WHOLES[model]
    batch = received(whole, part, documented_inputs(whole, rows, length, repaired))
    if batch is None:
        raise NotApplicable(f"the example of {type(whole).__name__} does not reach its part {type(part).__name__}")
    return batch


def received(whole: nn.Module, part: nn.Module, batch: Inputs) -> Inputs | None:
    """The arguments of the first call of ``part`` as ``whole`` runs ``batch``; None if there is no such call."""
    calls: list[dict[str, Any]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        given = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        required = {p.name for p in bound.signature.parameters.values() if p.default is p.empty}
        calls.append({k: v for k, v in given.items() if _plain(v, k in required)})

    with undisturbed(whole), torch.no_grad():
        handle = part.register_forward_pre_hook(keep, with_kwargs=True)  # what it keeps is no state of the model's
        try:
            whole.eval()(**batch)
        finally:
            handle.remove()
    return calls[0] if calls else None


def _plain(value: Any, required: bool) -> bool:
    """Whether this is made of tensors, not caches or outputs; where it cannot be left out, constants will do."""
    kinds = (torch.Tensor, bool, int, float, str, *((type(None),) if required else ()))
    found = [leaf for _, leaf in leaves(value)]
    return all(isinstance(leaf, kinds) for leaf in found) and (
        required or any(isinstance(leaf, torch.Tensor) for leaf in found)
    )
