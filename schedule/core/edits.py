"""Edits made by primitives, each revertible bit-exactly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from schedule.capture import Specialization, original_class
from schedule.core.node import Tree
from schedule.core.wrapping import WrappedForward, Wrapper, wrapped
from schedule.runtime.scheduled import Adapter, ScheduledState, forward_of, install, put, state_of
from schedule.util.errors import NotApplicable

_ABSENT = object()
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_BACKWARD, _FULL = "_backward_hooks", "_is_full_backward_hook"  # torch runs the former only if it knows the latter


_applied: weakref.WeakSet[SetState] = weakref.WeakSet()


class SetState:
    """Base of the edits of a module's scheduled state, with the state before and after.

    Several schedules of one model may be undone in any order. If another schedule changed the module later, its
    change stays, and reverting that change restores the state from before this edit.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before = state_of(module)
        self._after: ScheduledState | None = None

    def install(self) -> None:
        """Make the change for the first time."""
        raise NotImplementedError

    def apply(self) -> None:
        """Make the change, or make it again.

        Raises:
            NotApplicable: another schedule changed the module since the edit was reverted.
        """
        now = state_of(self.module)
        if self._after is None:
            self._before = now
            self.install()
            self._after = state_of(self.module)
        elif now is not self._after:
            if now is not self._before:
                raise NotApplicable(
                    f"another schedule changed what the {original_class(self.module).__name__} runs since",
                    fix="undo the steps of that schedule first",
                )
            put(self.module, self._after)
        _applied.add(self)

    def revert(self) -> None:
        """Restore the previous state, with its counts."""
        _applied.discard(self)
        if self._after is None or state_of(self.module) is self._after:
            put(self.module, self._before)
            return
        for edit in _applied:
            if edit.module is self.module and edit._before is self._after:
                edit._before = self._before


class SetSpecializations(SetState):
    """Edit of the graphs a module runs and of its adapter (no graphs: its original forward)."""

    def __init__(
        self, module: nn.Module, specializations: Sequence[Specialization], name: str, adapter: Adapter | None = None
    ) -> None:
        super().__init__(module)
        self.specializations, self.name, self.adapter = tuple(specializations), name, adapter

    def install(self) -> None:
        """Install the new graphs."""
        install(self.module, self.specializations, self.name, adapter=self.adapter)


class WrapCalls(SetState):
    """Edit to wrap the graphs and the forward of a module."""

    def __init__(self, tree: Tree, module: nn.Module, wrapper: Wrapper, name: str) -> None:
        super().__init__(module)
        self.wrapper, self.name = wrapper, name
        self.graphs = tree.graphs.current(module) or ()

    def install(self) -> None:
        """Install the wrapper."""
        made = [wrapped(each, [self.wrapper]) for each in self.graphs]
        adapter = None if self._before is None else self._before.adapter
        install(self.module, made, self.name, WrappedForward(forward_of(self.module), self.wrapper), adapter)


class SetTrace:
    """Edit of the explicitly traced graphs of a module, not run yet."""

    def __init__(self, tree: Tree, module: nn.Module, specializations: tuple[Specialization, ...]) -> None:
        self._explicit, self.module, self.specializations = tree.graphs.explicit, module, specializations
        self._before = self._explicit.get(module)

    def apply(self) -> None:
        """Store the new graphs."""
        self._explicit[self.module] = self.specializations

    def revert(self) -> None:
        """Restore the previous graphs."""
        if self._before is None:
            self._explicit.pop(self.module, None)
        else:
            self._explicit[self.module] = self._before


class SwapModule:
    """Edit to replace a module in all its parents and move its hooks and its node of the tree to the new one.

    Raises:
        NotApplicable: both have backward hooks, and of torch's two kinds.
    """

    def __init__(self, tree: Tree, old: nn.Module, new: nn.Module) -> None:
        self.tree, self.old, self.new = tree, old, new
        self.holders = [
            (parent, name) for parent in tree.root.modules() for name, child in parent._modules.items() if child is old
        ]
        self._hooks: Mapping[str, tuple[Any, Any]] = {}
        self._training: list[tuple[nn.Module, bool]] = []
        if old._backward_hooks and new._backward_hooks and getattr(old, _FULL) != getattr(new, _FULL):
            raise NotApplicable(
                "one of the two modules has full backward hooks, and the other those of register_backward_hook",
                fix="register_full_backward_hook on both",
            )

    def apply(self) -> None:
        """Swap the modules."""
        self._training = [(module, module.training) for module in self.new.modules()]
        self._hooks = {
            table: (vars(self.old)[table], vars(self.new)[table]) for table in _HOOK_TABLES if table in vars(self.new)
        }
        for module, _ in self._training:
            module.training = self.old.training
        for table, (of_old, of_new) in self._hooks.items():
            self._move_hooks(table, of_old, of_new)
        if any(self._hooks.get(_BACKWARD, ())[:1]):
            self._hooks = {**self._hooks, _FULL: (vars(self.old)[_FULL], vars(self.new)[_FULL])}
            vars(self.new)[_FULL] = vars(self.old)[_FULL]
        self._hold(self.new)
        self.tree.moved(self.old, self.new, [parent for parent, _ in self.holders])

    def _move_hooks(self, table: str, of_old: Any, of_new: Any) -> None:
        """Move a hook table to the new module, never sharing one table between both.

        The same table object moves if the new module has no hooks, since handles refer to it.
        """
        empty = type(of_old)()
        if of_new:
            merged = type(of_old)({**of_old, **of_new})
            vars(self.new)[table] = merged
        else:
            vars(self.new)[table] = of_old
        vars(self.old)[table] = empty

    def revert(self) -> None:
        """Swap the modules back.

        Raises:
            NotApplicable: another schedule replaced the module since.
        """
        for parent, name in self.holders:
            current = parent._modules.get(name)
            if current is not self.new and current is not self.old:
                raise NotApplicable(
                    f"another schedule replaced the {type(self.new).__name__} {name!r} by a {type(current).__name__}",
                    fix="undo the step of that schedule first",
                )
        for table, (of_old, of_new) in self._hooks.items():
            vars(self.old)[table], vars(self.new)[table] = of_old, of_new
        for module, training in self._training:
            module.training = training
        self._hold(self.old)
        self.tree.moved(self.new, self.old, [parent for parent, _ in self.holders])

    def _hold(self, module: nn.Module) -> None:
        for parent, name in self.holders:
            parent._modules[name] = module


class AddModule:
    """Edit to add a child module, for a replacement with its own state."""

    def __init__(self, tree: Tree, parent: nn.Module, name: str, child: nn.Module) -> None:
        self.tree, self.parent, self.name, self.child = tree, parent, name, child

    def apply(self) -> None:
        """Add the child."""
        self.parent._modules[self.name] = self.child
        self.tree.forget_paths()

    def revert(self) -> None:
        """Remove the child."""
        self.parent._modules.pop(self.name, None)
        self.tree.forget_paths()


class ShareHooks:
    """Edit to let ``new`` run hooks of ``old``, from the same tables: a handle removes a hook from both.

    Args:
        old: a module.
        new: a module that has none of these hooks.
        tables: names of the tables.
    """

    def __init__(self, old: nn.Module, new: nn.Module, tables: Sequence[str]) -> None:
        self.old, self.new = old, new
        self._before = {name: vars(new)[name] for name in tables}

    def apply(self) -> None:
        """Share the tables."""
        vars(self.new).update({name: vars(self.old)[name] for name in self._before})

    def revert(self) -> None:
        """Give the new module its own tables back."""
        vars(self.new).update(self._before)


class SetItem:
    """Edit of one entry of a mapping, such as a parameter in a module's table or a tag of a parameter."""

    def __init__(self, mapping: Callable[[], dict[Any, Any]], key: Any, value: Any) -> None:
        self.mapping, self.key, self.value = mapping, key, value
        self._before = mapping().get(key, _ABSENT)

    def apply(self) -> None:
        """Set the entry."""
        self.mapping()[self.key] = self.value

    def revert(self) -> None:
        """Restore the previous entry."""
        if self._before is _ABSENT:
            self.mapping().pop(self.key, None)
        else:
            self.mapping()[self.key] = self._before
