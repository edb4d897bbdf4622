"""Guards on the Python state read by a forward, all required for its graph to be valid.

A set compiles to one function. It is called to dispatch a graph, and to decide whether a similar module
may share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any

from torch import nn

from schedule.capture.guards.compiler_sources import asks_compiler
from schedule.capture.guards.guard import Guard, is_on_generated_code, is_portable
from schedule.capture.guards.guard_code import compiled, follows, kind_of
from schedule.capture.guards.own_forward import CALL_NAMES, functions_called, methods_called
from schedule.capture.guards.plain_values import is_plain_content, snapshot
from schedule.capture.guards.resolution import Resolved, found_in
from schedule.capture.guards.sources import SELF, Attr, Const, DictOf, Item, Self, root
from schedule.capture.recording.structure import original_class


class GuardSet:
    """Immutable collection of the guards of one trace."""

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        self.guards: tuple[Guard, ...] = tuple(guards)
        self._holds: Callable[[Any], bool] | None = None
        self._traced: Callable[[Any], bool] | None = None

    def __bool__(self) -> bool:
        return bool(self.guards)

    def __iter__(self) -> Iterator[Guard]:
        return iter(self.guards)

    def holds(self, module: nn.Module) -> bool:
        """Check whether all guards hold for ``module``."""
        return self.function(module)

    @property
    def function(self) -> Callable[[Any], bool]:
        """The guards, compiled to a function of the module."""
        if self._holds is None:
            self._holds = compiled(self.guards)
        return self._holds

    @property
    def under_compiler(self) -> Callable[[Any], bool]:
        """The guards ``torch.compile`` can follow, on plain state of modules and configs, as a compiled function."""
        if self._traced is None:
            self._traced = compiled((guard for guard in self.guards if follows(guard)), followed=True)
        return self._traced

    @cached_property
    def without_compilers(self) -> GuardSet:
        """The guards without those on whether a compiler is active, which ``torch.compile`` itself evaluates."""
        return GuardSet(each for each in self.guards if not asks_compiler(each.source))

    @cached_property
    def outside(self) -> GuardSet:
        """Those of :attr:`without_compilers` that are not on state of the module."""
        return GuardSet(each for each in self.without_compilers if not isinstance(root(each.source), Self))

    def places_outside(self) -> Iterator[tuple[Any, Any]]:
        """Yield the places of the guards in :attr:`outside` that ``torch.compile`` cannot follow."""
        for guard in self.outside:
            if not follows(guard):
                try:
                    yield from guard.places
                except (LookupError, AttributeError, TypeError):  # it is gone: the guard fails
                    continue

    @property
    def is_followed(self) -> bool:
        """Whether ``torch.compile`` can follow all guards on state of the module."""
        return all(follows(each) for each in self.guards if isinstance(root(each.source), Self))

    @cached_property
    def own(self) -> GuardSet:
        """The guards without those in :attr:`shared`."""
        return GuardSet(guard for guard in self.guards if not guard.is_shared) if self.shared else self

    @cached_property
    def shared(self) -> tuple[Guard, ...]:
        """The guards on functions and classes outside any module."""
        return tuple(guard for guard in self.guards if guard.is_shared)

    def missed(self, module: nn.Module) -> Guard | None:
        """Return the first guard to fail for ``module``, or None."""
        return next((guard for guard in self.guards if not compiled((guard,))(module)), None)

    def __deepcopy__(self, memo: Any) -> GuardSet:
        return self

    @cached_property
    def is_portable(self) -> bool:
        """Whether all guards can be checked in another process."""
        return all(is_portable(guard) for guard in self.guards if not is_on_generated_code(guard))

    def __reduce__(self) -> Any:
        return GuardSet, (tuple(guard for guard in self.guards if not is_on_generated_code(guard)),)


_OF_MODULES = {*vars(nn.Module()), "call_super_init", "dump_patches", "_schedule_state"}


def module_state_guards(module: nn.Module) -> GuardSet:
    """Return guards on the whole state of a module, for a known forward traced without following its code."""
    cls = original_class(module)
    guards = [
        Guard("resolves", Const(cls), Resolved(name, None, found_in(cls, name)))
        for name in (*methods_called(cls), *CALL_NAMES)
    ]
    guards += [Guard("is", Attr(Const(where), name), value) for where, name, value in functions_called(cls)]
    guards += [
        Guard("tensor", Item(Item(DictOf(SELF), table), name), kind_of(tensor))
        if tensor is not None
        else Guard("none", Item(Item(DictOf(SELF), table), name))
        for table in ("_parameters", "_buffers")
        for name, tensor in vars(module)[table].items()
    ]
    for name, value in vars(module).items():
        if name not in _OF_MODULES and is_plain_content(value):
            guards.append(Guard("content", Item(DictOf(SELF), name), snapshot(value)))
    return GuardSet(guards)


@lru_cache(maxsize=1024)
def shared_guard_set(guards: tuple[Guard, ...]) -> GuardSet:
    """Return the cached guard_set of guards common to many modules."""
    return GuardSet(guards)
