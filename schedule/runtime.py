"""How a scheduled module runs: its class becomes a subclass that picks a graph, or the original forward.

The module object stays: same parameters, same hooks, same ``isinstance``. Its class is replaced by a generated
subclass of the same name, as ``torch.distributed.fsdp.fully_shard`` does it. The subclass's forward is generated
for the specialisations at hand: conditions on the arguments, then the graph. A call that meets none of them runs
the original forward, is counted, and warns once.
"""

from __future__ import annotations

import itertools
import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from schedule.tracing.guards import GuardMiss
from schedule.tracing.regions import closing_regions
from schedule.tracing.signature import Parameters
from schedule.tracing.specialisation import Specialisation, original_class
from schedule.tracing.structure import literal

STATE = "_schedule_state"
_MISSING = object()
_numbers = itertools.count()


class FallbackWarning(UserWarning):
    """A scheduled module ran its original forward because a call did not look like the recorded ones."""


class ScheduledState:
    """What a scheduled module carries: its specialisations and how often they did not apply.

    Attributes:
        specialisations: graphs that may run in place of the forward, first match wins.
        fallbacks: how many calls ran the original forward.
        last_miss: arguments' description of the last such call.
        forward: what runs when none does: the class's own forward, unless a primitive wraps it.
    """

    def __init__(
        self,
        module_class: type[nn.Module],
        specialisations: Sequence[Specialisation],
        name: str,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.module_class = module_class
        self.forward = forward
        self.specialisations = tuple(specialisations)
        self.name = name
        self.fallbacks = 0
        self.last_miss = ""
        self.select = _generated_select(module_class.forward, self.specialisations)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "select"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.select = _generated_select(self.module_class.forward, self.specialisations)

    def fall_back(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original forward; count it and warn the first time, unless there is nothing else to run."""
        self.fallbacks += bool(self.specialisations)
        if self.fallbacks == 1 and not torch.compiler.is_compiling():
            self.last_miss = _summary(args, kwargs)
            warnings.warn(
                f"{self.name or 'the root module'} ({self.module_class.__name__}): a call differs from the recorded "
                f"ones and runs the original forward; correct, not optimised. It received {self.last_miss}",
                FallbackWarning,
                stacklevel=4,
            )
        forward = self.module_class.forward if self.forward is None else self.forward
        return forward(module, *args, **kwargs)


def _summary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

    return ", ".join([*map(short, args), *(f"{key}={short(value)}" for key, value in kwargs.items())])


class ScheduledModule:
    """Mixin of every generated class; never instantiated by users."""

    _schedule_original: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph made for calls like this one, else the original forward."""
        state: ScheduledState = self.__dict__[STATE]
        try:
            selected = state.select(self, *args, **kwargs)
        except (TypeError, LookupError, AttributeError):  # the arguments do not bind, or lack what a guard asks for
            selected = None
        if selected is None:
            return state.fall_back(self, args, kwargs)  # type: ignore[arg-type]
        try:
            return selected[0](self, *selected[1])
        except GuardMiss:  # raised before anything was changed that is seen outside
            return state.fall_back(self, args, kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        state = reduced[2] if len(reduced) > 2 else None
        return (_rebuild, (self._schedule_original,), state)


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    scheduled = scheduled_class(cls)
    return scheduled.__new__(scheduled)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def scheduled_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The generated subclass of ``cls``; one per class, of the same name."""
    if cls not in _classes:
        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_schedule_original": cls}
        members["__doc__"] = cls.__doc__
        _classes[cls] = type(cls.__name__, (ScheduledModule, cls), members)
    return _classes[cls]


def state_of(module: nn.Module) -> ScheduledState | None:
    """What ``module`` carries if it is scheduled, else None."""
    return vars(module).get(STATE)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """What ``module`` computes where no graph applies, and what its graphs are traced from."""
    state = state_of(module)
    own = None if state is None else state.forward
    return original_class(module).forward if own is None else own


def install(
    module: nn.Module,
    specialisations: Sequence[Specialisation],
    name: str = "",
    forward: Callable[..., Any] | None = None,
) -> None:
    """Make ``module`` run ``specialisations``; an empty sequence gives it its original forward back.

    Args:
        module: the module.
        specialisations: graphs, first match wins.
        name: its path, for messages.
        forward: what to run where none of them applies, given the module and the arguments; what was so before
            if None.
    """
    cls, state = original_class(module), state_of(module)
    if forward is None and state is not None:
        forward = state.forward
    if not specialisations and forward is None:
        vars(module).pop(STATE, None)
        module.__class__ = cls
        return
    vars(module)[STATE] = ScheduledState(cls, specialisations, name, forward)
    module.__class__ = scheduled_class(cls)


# -- generated dispatch -------------------------------------------------------------------------------------


def intact(module: nn.Module, cls: type, training: bool) -> bool:
    """Whether a submodule, whose inside is part of a graph, is still what it was: same class, no hooks."""
    return (
        type(module) is cls
        and module.training is training
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
    )


def _guarded(specialisation: Specialisation) -> Callable[..., Any]:
    """The graph's function, prepared for what may go wrong inside it."""
    run = specialisation.function
    if not (specialisation.has_regions or specialisation.has_checks):
        return run

    def guarded(module: nn.Module, *inputs: Any) -> Any:
        with closing_regions():
            return run(module, *inputs)

    return guarded


def _generated_select(
    forward: Callable[..., Any], specialisations: Sequence[Specialisation]
) -> Callable[..., tuple[Callable[..., Any], tuple[Any, ...]] | None]:
    """A function with the forward's parameters: ``(graph function, inputs)`` for a call, or None."""
    namespace: dict[str, Any] = {"torch": torch, "_intact": intact, "_missing": _MISSING}
    parameters = Parameters(forward)
    lines = [f"def select({parameters.declaration(namespace)}):", "    _own = self.__dict__"]
    for index, specialisation in enumerate(specialisations):
        conditions = _conditions(specialisation, index, namespace)
        namespace[f"_run_{index}"] = _guarded(specialisation)
        inputs = "".join(f"{text}, " for text in _renamed(specialisation, index, namespace).values())
        lines.append("    if (" + "\n        and ".join(conditions) + "):")
        lines.append(f"        return _run_{index}, ({inputs})")
    lines.append("    return None")
    source = "\n".join(lines)
    filename = f"<schedule dispatch {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), namespace)
    select: Callable[..., Any] = namespace["select"]
    return select


def _renamed(specialisation: Specialisation, index: int, namespace: dict[str, Any]) -> dict[str, str]:
    for name, value in specialisation.signature.globals.items():
        namespace[name] = value
    return specialisation.signature.inputs


def _conditions(specialisation: Specialisation, index: int, namespace: dict[str, Any]) -> list[str]:
    found = [f"_own['training'] is {specialisation.training}", *specialisation.signature.conditions]
    for number, (path, entered) in enumerate(specialisation.entered.items()):
        namespace[f"_class_{index}_{number}"] = scheduled_class(entered.cls) if entered.scheduled else entered.cls
        found.append(f"_intact({_submodule(path)}, _class_{index}_{number}, {specialisation.training})")
        found += _setting_conditions(path, entered.settings)
    found += _setting_conditions("", specialisation.settings)
    return found + list(specialisation.guards)


def _submodule(path: str) -> str:
    return "self" + "".join(f"._modules[{part!r}]" for part in path.split(".") if part)


def _setting_conditions(prefix: str, settings: Mapping[Any, Any]) -> list[str]:
    """Conditions that plain attributes still have the values they had; ``prefix`` is where their paths start."""
    found = []
    for (path, holder, name), value in settings.items():
        owner = _submodule(f"{prefix}.{path}")
        owner = f"{owner}.__dict__" if holder is None else f"{owner}.__dict__[{holder!r}].__dict__"
        owner = "_own" if owner == "self.__dict__" else owner
        comparison = "is" if value is None or isinstance(value, (bool, torch.dtype)) else "=="
        found.append(f"{owner}.get({name!r}, _missing) {comparison} {literal(value)}")
    return found


__all__ = [
    "FallbackWarning",
    "GuardMiss",
    "ScheduledModule",
    "ScheduledState",
    "install",
    "scheduled_class",
    "state_of",
]
