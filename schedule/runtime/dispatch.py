"""Generated code to select the graph for a call, from the conditions of each graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from schedule.capture.recording.structure import module_source
from schedule.capture.tracing.generated_code import generated
from schedule.capture.tracing.hooks import acts_now, acts_on_all
from schedule.capture.tracing.reading.ledger import Ledger, shared_ledger
from schedule.capture.tracing.signature import Parameters, Signature
from schedule.capture.tracing.specialization import Specialization

Selected = tuple[Any, tuple[Any, ...]]
"""A graph's function and its inputs; None and the reason for calls that run the original forward."""
Select = Callable[..., Selected | None]


@dataclass(frozen=True)
class Declined:
    """Calls to run with the original forward, and the reason ("" if no rewrite applies to them)."""

    signature: Signature
    why: str


def intact(module: nn.Module, cls: type, training: bool) -> bool:
    """Check whether an inlined submodule is unchanged: same class and mode, no active hook."""
    own = module.__dict__
    if type(module) is not cls or own["training"] is not training or "forward" in own:
        return False
    before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
    hooked = before or after or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not (hooked and acts_now(module))


def generated_select(
    forward: Callable[..., Any],
    specializations: Sequence[Specialization],
    declined: Sequence[Declined],
    scheduled_class: Callable[[type[nn.Module]], type[nn.Module]],
) -> Select:
    """Generate a function with the forward's parameters, returning ``(graph function, inputs)``, or None.

    For calls of a declined kind it returns ``(None, (why,))``.
    """
    namespace: dict[str, Any] = {"torch": torch, "_intact": intact, "_acts_on_all": acts_on_all}
    namespace["_compiling"] = torch.compiler.is_dynamo_compiling
    parameters = Parameters(forward)
    lines = [f"def select({parameters.declaration(namespace)}):"]
    lines += ["    _own = self.__dict__", "    _followed = _compiling()"]
    for index, specialization in enumerate(specializations):
        conditions = _conditions(specialization, index, namespace, scheduled_class)
        namespace[f"_run_{index}"] = specialization.function
        inputs = "".join(f"{text}, " for text in specialization.signature.inputs.values())
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return _run_{index}, ({inputs})")
    for index, each in enumerate(declined, len(specializations)):
        conditions = _signature_conditions(each.signature, index, namespace) or ["True"]
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return None, ({each.why!r},)")
    lines.append("    return None")
    return generated("\n".join(lines), "select", namespace, "schedule dispatch")


def _signature_conditions(signature: Signature, index: int, namespace: dict[str, Any]) -> list[str]:
    """Return the signature's conditions, with their globals added to ``namespace`` under unique names."""
    names = {name: f"{name}_of_{index}" for name in signature.globals}
    namespace |= {names[name]: value for name, value in signature.globals.items()}
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    return [named.sub(lambda found: names[found[0]], condition) for condition in signature.conditions]


def _conditions(
    specialization: Specialization,
    index: int,
    namespace: dict[str, Any],
    scheduled_class: Callable[[type[nn.Module]], type[nn.Module]],
) -> list[str]:
    found = [f"_own['training'] is {specialization.training}"]
    found += _signature_conditions(specialization.signature, index, namespace)
    for number, (path, inlined) in enumerate(specialization.inlined.items()):
        namespace[f"_class_{index}_{number}"] = scheduled_class(inlined.cls) if inlined.scheduled else inlined.cls
        found.append(f"_intact({module_source(path)}, _class_{index}_{number}, {specialization.training})")
        found += _ledger_condition(inlined.ledger.own, path, f"_holds_{index}_{number}", namespace)
    found += ["not _acts_on_all()"] if specialization.inlined else []
    known = set(specialization.ledger.shared)
    shared = dict.fromkeys(g for each in specialization.inlined.values() for g in each.ledger.shared if g not in known)
    found += _ledger_condition(shared_ledger(tuple(shared)), "", f"_shared_{index}", namespace)
    found += _ledger_condition(specialization.ledger, "", f"_holds_{index}", namespace)
    return found + list(specialization.guards)


def _ledger_condition(ledger: Ledger, path: str, name: str, namespace: dict[str, Any]) -> list[str]:
    """Return the condition on the Python state read by a forward from the module at ``path`` (unchanged)."""
    if not ledger:
        return []
    namespace |= {name: ledger.function, f"{name}_compiled": ledger.under_compiler}
    # Compiled when a compiler asks, which few processes do.
    namespace[f"{name}_outside"] = torch.compiler.assume_constant_result(lambda _: ledger.outside.function(None))
    module = module_source(path)
    return [f"({name}_compiled({module}) and {name}_outside(None) if _followed else {name}({module}))"]
