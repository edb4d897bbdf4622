"""Generated code to select the graph for a call, from the conditions of each graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from fused.torch_internals.compiled_checks import CompiledCheck
from schedule.capture import (
    Call,
    GuardSet,
    Parameters,
    Signature,
    Specialization,
    acts_now,
    acts_on_all,
    can_follow,
    module_source,
    runs_hooks_of,
    shared_guard_set,
)
from schedule.runtime.classes import STATE, scheduled_class
from schedule.util.generated_code import generated

Selected = tuple[Any, tuple[Any, ...]]
"""A graph's function, with the module and its inputs; None and the reason for calls that run the original forward."""
Select = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Selected | None]


@dataclass(frozen=True)
class Declined:
    """Calls to run with the original forward, and the reason ("" if no rewrite applies to them)."""

    signature: Signature
    why: str


def intact(module: nn.Module, cls: type, training: bool, substitute: nn.Module | None = None) -> bool:
    """Check whether an inlined submodule is unchanged: same class and mode, no active hook that its graph would skip.

    Args:
        module: the submodule.
        cls: its class.
        training: its mode.
        substitute: the module that is called in its place, with its hooks, if any.
    """
    own = module.__dict__
    if type(module) is not cls or own["training"] is not training or "forward" in own:
        return False
    before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
    hooked = before or after or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if not hooked or (substitute is not None and runs_hooks_of(substitute, module)):
        return True
    return not acts_now(module)


def generated_select(
    forward: Callable[..., Any],
    specializations: Sequence[Specialization],
    declined: Sequence[Declined],
) -> Select:
    """Generate a function of a module and the arguments, returning ``(graph function, (module, *inputs))``, or None.

    For calls of a declined kind it returns ``(None, (why,))``. It raises TypeError if the arguments do not fit.
    """
    namespace: dict[str, Any] = {"torch": torch, "_intact": intact, "_acts_on_all": acts_on_all}
    namespace["_compiling"] = torch.compiler.is_dynamo_compiling
    parameters = Parameters(forward)
    lines = [f"def select(self, _args, _kwargs, _bound={parameters.binder(namespace)}):"]
    usual = specializations[0].call if specializations else None
    others = None if usual is None else parameters.others(usual.kwargs)
    lines += _binding(parameters, usual)
    lines += ["    _own = self.__dict__", "    _followed = _compiling()"]
    lines += [f"    _state = _own.get({STATE!r}) if _followed else None"]
    for index, specialization in enumerate(specializations):
        given = list(specialization.signature.inputs.values())
        conditions = _conditions_on_others(specialization.signature, parameters, others)
        conditions, given = _looked_up_once([*conditions, *_conditions(specialization, index, namespace)], given)
        namespace[f"_run_{index}"] = specialization.function
        inputs = "".join(f"{text}, " for text in given)
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return _run_{index}, (self, {inputs})")
    for index, each in enumerate(declined, len(specializations)):
        conditions = _conditions_on_others(each.signature, parameters, others) or ["True"]
        conditions += _signature_conditions(each.signature, index, namespace)
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return None, ({each.why!r},)")
    lines.append("    return None")
    return generated("\n".join(lines), "select", namespace, "schedule dispatch")


def _binding(parameters: Parameters, call: Call | None) -> list[str]:
    """Return lines to bind the parameters: fast if they are passed as in ``call``, else as Python does."""
    bound = f"{', '.join(parameters.names)}, = _bound(*_args, **_kwargs)"
    if call is None:
        return [f"    {bound}"]
    given = parameters.sources(len(call.args), tuple(call.kwargs))
    return [
        f"    _usual = len(_args) == {len(call.args)} and {_has_names('_kwargs', tuple(call.kwargs))}",
        "    if _usual:",
        *(f"        {name} = {source}" for name, source in given.items()),
        "    else:",
        f"        {bound}",
    ]


def _has_names(mapping: str, names: tuple[str, ...]) -> str:
    """Return the condition for a dict of arguments to have these names, in order."""
    return f"(*{mapping},) == {names}" if names else f"not {mapping}"


def _conditions_on_others(signature: Signature, parameters: Parameters, usual: tuple[str, ...] | None) -> list[str]:
    """Return the condition on the names of keyword arguments that are no parameters, known for usual calls."""
    if signature.others is None:
        return []
    wanted = _has_names(parameters.var_keyword, signature.others)
    return [f"(_usual or {wanted})" if signature.others == usual else wanted]


def _looked_up_once(conditions: list[str], inputs: list[str]) -> tuple[list[str], list[str]]:
    """Bind each input inside a container to a local in its first condition, and use it from there on."""
    for index, text in enumerate(inputs):
        named = re.compile(rf"(?<![\w.\])]){re.escape(text)}(?![\w\[])")
        first = next((at for at, each in enumerate(conditions) if named.search(each)), None)
        if text.isidentifier() or first is None:
            continue
        local = f"_input_{index}"
        conditions = [named.sub(local, each) for each in conditions]
        conditions[first] = conditions[first].replace(local, f"({local} := {text})", 1)
        inputs = [named.sub(local, each) for each in inputs]
    return conditions, inputs


def _signature_conditions(signature: Signature, index: int, namespace: dict[str, Any]) -> list[str]:
    """Return the signature's conditions, with their globals added to ``namespace`` under unique names."""
    names = {name: f"{name}_of_{index}" for name in signature.globals}
    namespace |= {names[name]: value for name, value in signature.globals.items()}
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    written = [*signature.conditions, *signature.kinds.values()]
    return [named.sub(lambda found: names[found[0]], condition) for condition in written]


def _conditions(specialization: Specialization, index: int, namespace: dict[str, Any]) -> list[str]:
    found = [f"_own['training'] is {specialization.training}"]
    found += _signature_conditions(specialization.signature, index, namespace)
    found += _conditions_on_inlined(specialization, index, namespace)
    for number, (path, guard_set) in enumerate(_guard_sets(specialization)):
        name, owner = f"_holds_{index}_{number}", module_source(path)
        namespace |= {name: guard_set.function, f"{name}_compiled": guard_set.under_compiler}
        found.append(f"({name}_compiled({owner}) if _followed else {name}({owner}))")
    found.append(f"(not _followed or _state is not None and _state.owner() is self and _state.checks[{index}].holds())")
    return found + list(specialization.guards)


def _conditions_on_inlined(specialization: Specialization, index: int, namespace: dict[str, Any]) -> list[str]:
    """Return the conditions on submodules in the graph: class, mode, hooks."""
    found = []
    for number, (path, inlined) in enumerate(specialization.inlined.items()):
        namespace[f"_class_{index}_{number}"] = scheduled_class(inlined.cls) if inlined.scheduled else inlined.cls
        given = [module_source(path), f"_class_{index}_{number}", str(specialization.training)]
        given += [module_source(inlined.hooks_in)] if inlined.hooks_in else []
        found.append(f"_intact({', '.join(given)})")
    return found + (["not _acts_on_all()"] if found else [])


def _guard_sets(specialization: Specialization) -> list[tuple[str, GuardSet]]:
    """Return the guards on Python state, with the paths of the modules they are for; each shared one once."""
    known, inlined = set(specialization.guard_set.shared), specialization.inlined
    shared = dict.fromkeys(guard for each in inlined.values() for guard in each.guard_set.shared if guard not in known)
    found = [(path, each.guard_set.own) for path, each in inlined.items()]
    found += [("", shared_guard_set(tuple(shared))), ("", specialization.guard_set)]
    return [(path, guard_set) for path, guard_set in found if guard_set]


def generated_check(specialization: Specialization, owner: Callable[[], nn.Module | None]) -> CompiledCheck:
    """Generate the check of all conditions on Python state, which ``torch.compile`` makes before each call.

    It does not see what the compiled code itself changes: ``torch.compile`` follows the conditions on that. It fails if
    the graph reads state of modules, after other code has run, in a way that cannot be followed.

    Args:
        specialization: it has the guards.
        owner: returns the module to check.
    """

    @cache
    def check() -> Callable[[nn.Module], bool]:  # compiled when a compiler asks, which few processes do
        if not can_follow(specialization.graph):
            return lambda module: False
        namespace: dict[str, Any] = {"_intact": intact, "_acts_on_all": acts_on_all}
        conditions = _conditions_on_inlined(specialization, 0, namespace)
        for number, (path, guard_set) in enumerate(_guard_sets(specialization)):
            namespace[f"_holds_{number}"] = guard_set.without_compilers.function
            conditions.append(f"_holds_{number}({module_source(path)})")
        text = "def check(self):\n    return " + "\\\n        and ".join(["True", *conditions])
        return generated(text, "check", namespace, "schedule check")

    def holds() -> bool:
        module = owner()
        try:
            return module is not None and check()(module)
        except (LookupError, AttributeError):  # a submodule is gone, or None
            return False

    def places() -> Iterator[tuple[Any, Any]]:
        for _, guard_set in _guard_sets(specialization):
            yield from guard_set.places_outside()

    return CompiledCheck(holds, places)
