"""The code that picks the graph for a call: generated from the conditions under which each graph holds."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from schedule.tracing.attributes import FUNCTIONS, PLAIN, Unset
from schedule.tracing.hooks import acts_now, acts_on_all
from schedule.tracing.signature import Parameters, Signature
from schedule.tracing.sources import generated
from schedule.tracing.specialisation import Specialisation
from schedule.tracing.structure import literal, module_source

Selected = tuple[Any, tuple[Any, ...]]
"""A graph's function and its inputs; None and the reason for calls that run the original forward."""
Select = Callable[..., Selected | None]

_MISSING = object()


@dataclass(frozen=True)
class Declined:
    """Calls that run the original forward, and why; "" if nothing that was rewritten is in them."""

    signature: Signature
    why: str


def intact(module: nn.Module, cls: type, training: bool) -> bool:
    """Whether a submodule, whose inside is part of a graph, is still what it was: same class, no hook that acts."""
    return (
        type(module) is cls
        and module.training is training
        and not acts_now(module)
        and "forward" not in module.__dict__
    )


def generated_select(
    forward: Callable[..., Any],
    specialisations: Sequence[Specialisation],
    declined: Sequence[Declined],
    scheduled_class: Callable[[type[nn.Module]], type[nn.Module]],
) -> Select:
    """A function with the forward's parameters: ``(graph function, inputs)`` for a call, or None.

    For calls of a kind that was declined it gives ``(None, (why,))``.
    """
    namespace: dict[str, Any] = {"torch": torch, "_intact": intact, "_acts_on_all": acts_on_all, "_missing": _MISSING}
    parameters = Parameters(forward)
    lines = [f"def select({parameters.declaration(namespace)}):", "    _own = self.__dict__"]
    for index, specialisation in enumerate(specialisations):
        conditions = _conditions(specialisation, index, namespace, scheduled_class)
        namespace[f"_run_{index}"] = specialisation.function
        inputs = "".join(f"{text}, " for text in specialisation.signature.inputs.values())
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return _run_{index}, ({inputs})")
    for index, each in enumerate(declined, len(specialisations)):
        conditions = _signature_conditions(each.signature, index, namespace) or ["True"]
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return None, ({each.why!r},)")
    lines.append("    return None")
    return generated("\n".join(lines), "select", namespace, "schedule dispatch")


def _signature_conditions(signature: Signature, index: int, namespace: dict[str, Any]) -> list[str]:
    """The signature's conditions; what they name goes into ``namespace`` under names of its own."""
    names = {name: f"{name}_of_{index}" for name in signature.globals}
    namespace |= {names[name]: value for name, value in signature.globals.items()}
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    return [named.sub(lambda found: names[found[0]], condition) for condition in signature.conditions]


def _conditions(
    specialisation: Specialisation,
    index: int,
    namespace: dict[str, Any],
    scheduled_class: Callable[[type[nn.Module]], type[nn.Module]],
) -> list[str]:
    found = [f"_own['training'] is {specialisation.training}"]
    found += _signature_conditions(specialisation.signature, index, namespace)
    for number, (path, entered) in enumerate(specialisation.entered.items()):
        namespace[f"_class_{index}_{number}"] = scheduled_class(entered.cls) if entered.scheduled else entered.cls
        found.append(f"_intact({module_source(path)}, _class_{index}_{number}, {specialisation.training})")
        found += _setting_conditions(path, entered.settings, namespace)
    found += ["not _acts_on_all()"] if specialisation.entered else []
    found += _setting_conditions("", specialisation.settings, namespace)
    return found + list(specialisation.guards)


def _is_still(text: str, value: Any, namespace: dict[str, Any]) -> str:
    if value is Unset.UNSET:
        return f"{text} is _missing"
    if isinstance(value, enum.Enum):
        return f"repr({text}) == {repr(value)!r}"
    comparison = "is" if value is None or isinstance(value, (bool, torch.dtype, *FUNCTIONS)) else "=="
    if isinstance(value, PLAIN):
        return f"{text} {comparison} {literal(value)}"
    name = f"_setting_{len(namespace)}"
    namespace[name] = value
    return f"{text} {comparison} {name}"


def _setting_conditions(prefix: str, settings: Mapping[Any, Any], namespace: dict[str, Any]) -> list[str]:
    """Conditions that plain attributes still have the values they had; ``prefix`` is where their paths start."""
    found = []
    for (path, holder, name), value in settings.items():
        owner = module_source(f"{prefix}.{path}")
        holders = "" if holder is None else "".join(f"[{each!r}].__dict__" for each in holder.split("."))
        owner = f"{owner}.__dict__{holders}"
        owner = "_own" if owner == "self.__dict__" else owner
        found.append(_is_still(f"{owner}.get({name!r}, _missing)", value, namespace))
    return found
