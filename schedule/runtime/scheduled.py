"""Execution of a scheduled module: a generated subclass selects a graph or the original forward for each call.

The module object stays: same parameters, same hooks, same ``isinstance``. Its class is replaced by a generated
subclass of the same name, as in ``torch.distributed.fsdp.fully_shard``. The subclass's forward is generated for the
present specializations: conditions on the arguments, then the graph. For a call that meets none of them the module
gets a further graph (:mod:`schedule.core.adapting`); if that is impossible, the call runs the original forward, is
counted, and warns once.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fused.torch_internals.modes import count_dispatch_modes, count_function_modes
from fused.torch_internals.torch_modules import are_parametrizations_cached
from schedule.capture import (
    TRACING,
    GuardMiss,
    OutputMiss,
    Specialization,
    acts_on_all,
    intercepted_calls,
    map_structure,
    original_class,
    replayed,
)
from schedule.runtime.call_kinds import adapting, are_functions_overridden, is_only_traced, overriding, summary
from schedule.runtime.call_logs import log_guards, log_missed
from schedule.runtime.classes import STATE, Owner, put_on, scheduled_class, take_off, wraps_forward
from schedule.runtime.dispatch import Declined, Select, Selected, generated_check, generated_select
from schedule.util.internal_errors import INTERNAL, InternalError, contained, is_generated, own_errors, perform
from schedule.util.logs import is_on, log

MAX_ADAPTATIONS = 8


_NOT_TAKEN = (TypeError, LookupError, AttributeError, fx.proxy.TraceError)
"""Errors of a selection: the arguments do not bind, lack what a guard reads, or are torch.fx proxies."""


class FallbackWarning(UserWarning):
    """A scheduled module ran its original forward because a call did not match the recorded ones."""


@dataclass(frozen=True, eq=False)
class Adaptation:
    """Graphs made for a further kind of calls, or the reason against them.

    Attributes:
        specializations: graphs for training and eval mode; none if they cannot be made.
        declined: the reason against them; used also if the graphs do not take the call after all.
        summary: description of the calls and of the rewrites in their graphs.
        missed: the failed checks of other graphs that they are tried after; none if they are tried at once.
    """

    specializations: tuple[Specialization, ...]
    declined: Declined
    summary: str = ""
    missed: tuple[str, ...] = ()


Returned = dict[nn.Module, list[Any]]
"""Submodules, and what each of their calls returned, hooks included."""


class Adapter(Protocol):
    """Maker of graphs for further calls of a module, copied and pickled with it."""

    def adapt(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        missed: tuple[str, ...] = (),
        returned: Returned | None = None,
    ) -> Adaptation | None:
        """Make graphs for calls like this one, or return None if the arguments do not fit the forward.

        Args:
            module: the live module.
            forward: its original forward.
            args: the arguments of the call, with ``kwargs``.
            missed: the checks inside other graphs that the call failed, none if no graph took it.
            returned: what submodules with hooks returned in this call, of those that :meth:`hooked` names.
        """

    def hooked(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules that stay calls of the graphs and run hooks, or have others in them that do."""


class ScheduledState:
    """State of a scheduled module: its specializations and its fallback count.

    Attributes:
        specializations: graphs that may run in place of the forward, first match wins.
        retired: specializations no longer run, since a submodule returned something other than they assume.
        adaptations: results for further kinds of calls, at most :data:`MAX_ADAPTATIONS`; not copied with the module.
        adapter: makes the adaptations, if given.
        fallbacks: how many calls ran the original forward.
        last_miss: description of the arguments of the first such call.
        internal_errors: errors of our own code while calls were dispatched; the calls ran the original forward.
        ran: what the last call ran, a ``"graph"`` or the original ``"forward"``; "" before the first.
        owner: the module.
        selects: failed checks → function that selects among the graphs made for calls that fail them.
        checks: for each graph in dispatch, the conditions that ``torch.compile`` checks before each call.
        forward: fallback forward set by a primitive; None for the class's own.
    """

    def __init__(
        self,
        module_class: type[nn.Module],
        specializations: Sequence[Specialization],
        name: str,
        forward: Callable[..., Any] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.module_class = module_class
        self.forward = forward
        self.specializations = tuple(specializations)
        self.retired: tuple[Specialization, ...] = ()
        self.adaptations: tuple[Adaptation, ...] = ()
        self.adapter = adapter
        self.name = name
        self.fallbacks = 0
        self.last_miss = ""
        self.internal_errors: tuple[str, ...] = ()
        self.ran: Literal["", "graph", "forward"] = ""
        self.owner = Owner()
        self.select = self._dispatch()

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph made for calls like this one, else the original forward."""
        if (
            not torch.compiler.is_compiling()
            and (count_function_modes() or count_dispatch_modes())
            and are_functions_overridden()
            and not _is_shared_out(module)
        ):
            return self.fall_back(module, args, kwargs, "a mode that may change torch's functions is active")
        try:  # as in `selected`, without another call on the path of every call
            selected = self.select(module, args, kwargs)
        except _NOT_TAKEN as error:
            selected = None if torch.compiler.is_compiling() else self.unselected(error)
        except Exception as error:
            selected = self.unselected(error)
        if selected is None:
            selected = self.adapt(module, args, kwargs)
        if selected is None:
            return self.first_run(module, args, kwargs)
        run, given = selected
        if run is None:
            (why,) = given
            if why.startswith(INTERNAL):
                return self.fall_back(module, args, kwargs, why)
            return self.first_run(module, args, kwargs, why) if why else self.original(module, *args, **kwargs)
        self.ran = "graph"
        try:
            return run(*given)
        except GuardMiss as miss:
            return self.after(miss, run, module, args, kwargs)

    def after(
        self,
        miss: GuardMiss,
        run: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        missed: tuple[str, ...] = (),
    ) -> Any:
        """Run the graph made for calls that fail this check of ``run``, else the original forward.

        ``missed`` are the failed checks of the graphs tried before.
        """
        why = ""
        if isinstance(miss, OutputMiss):
            why = str(miss)
            self.retire(run, why)
        elif not is_only_traced(args, kwargs) and str(miss) not in missed:
            missed = (*missed, str(miss))
            other, given = self.adapt(module, args, kwargs, missed) or (None, ("",))
            if other is not None:
                try:
                    with replayed(module, miss.made):
                        return other(*given)
                except GuardMiss as further:
                    further.made = max(miss.made, further.made, key=len)  # it repeats those that it reached
                    return self.after(further, other, module, args, kwargs, missed)
            (why,) = given
        with replayed(module, miss.made):
            return self.fall_back(module, args, kwargs, why)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out graphs that another process could not check; it adapts to such calls, or runs the original."""
        state = {name: value for name, value in vars(self).items() if name not in ("select", "selects", "checks")}
        portable = tuple(each for each in self.specializations if each.is_portable)
        return {**state, "specializations": portable, "adaptations": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.select = self._dispatch()

    def _dispatch(self) -> Select:
        missed = dict.fromkeys(each.missed for each in self.adaptations if each.missed)
        self.selects = {checks: self._select(self._adapted(checks), checks) for checks in missed}
        graphs = [each for each in self.specializations if not any(each is other for other in self.retired)]
        graphs += self._adapted(())
        self.checks = tuple(generated_check(each, self.owner) for each in graphs)
        return self._select(graphs, ())

    def _adapted(self, missed: tuple[str, ...]) -> list[Specialization]:
        return [made for each in self.adaptations if each.missed == missed for made in each.specializations]

    def _select(self, graphs: Sequence[Specialization], missed: tuple[str, ...]) -> Select:
        declined = [each.declined for each in self.adaptations if each.missed == missed and not each.specializations]
        return generated_select(self.module_class.forward, graphs, declined)

    def selected(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], missed: tuple[str, ...] = ()
    ) -> Selected | None:
        """Return the graph or the reason selected for this call, or None if there is neither.

        Args:
            module: the module.
            args: the arguments of the call, with ``kwargs``.
            missed: the failed checks that graphs are selected after; none for those tried at once.
        """
        select = self.selects.get(missed) if missed else self.select
        try:
            return None if select is None else select(module, args, kwargs)
        except _NOT_TAKEN as error:
            return self.unselected(error)

    def unselected(self, error: Exception) -> Selected | None:
        """Return None after a selection raised because a call does not fit, or the reason after an internal error.

        Any other exception is raised again.
        """
        internal = InternalError.of(error, "selecting a graph")
        if isinstance(error, _NOT_TAKEN) and (internal is None or is_generated(error)):
            return None
        if internal is None:
            raise error
        return None, (self.failed(internal),)

    def failed(self, error: InternalError) -> str:
        """Keep an internal error for the report, warn of it, and return why calls run the original forward."""
        if error.why not in self.internal_errors:
            self.internal_errors = (*self.internal_errors, error.why)
        return contained(error).why

    def adapt(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], missed: tuple[str, ...] = ()
    ) -> Selected | None:
        """Return a graph for a call that none tried before takes, made now if there is none, or None if impossible.

        If there are enough graphs it returns the reason; after an internal error too, and the module does not adapt any
        more.
        """
        if torch.compiler.is_compiling():
            return None
        return self._contained(lambda: self._adapt(module, args, kwargs, missed))

    def _contained(self, adapt: Callable[[], Selected | None]) -> Selected | None:
        """Return what ``adapt`` does, or the reason of an error of ours, after which the module adapts no more."""
        try:
            with own_errors("adapting"):
                return adapt()
        except InternalError as error:
            self.adapter = None  # it would fail at every call
            return None, (self.failed(error),)

    def _adapt(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], missed: tuple[str, ...]
    ) -> Selected | None:
        if acts_on_all():
            return None, ("a hook on all modules is registered, and runs",)
        if are_parametrizations_cached():
            return None, ("torch.nn.utils.parametrize.cached() is active, which keeps what is made while tracing",)
        if is_only_traced(args, kwargs) or self.adapter is None:
            return None
        if cls := overriding(args, kwargs):
            return None, (f"it was given a {cls}, a class that may change what torch's operations compute",)
        selected = self.selected(module, args, kwargs, missed) if missed else None
        if selected is not None or len(self.adaptations) >= MAX_ADAPTATIONS:
            return selected or _ENOUGH
        with TRACING:
            selected = self.selected(module, args, kwargs, missed)  # another thread may have made one
            if selected is not None or len(self.adaptations) >= MAX_ADAPTATIONS:
                return selected or _ENOUGH
            if not missed and (hooked := self.adapter.hooked(module)):
                return self._observed, (module, args, kwargs, hooked)
            return self._graph_for(module, args, kwargs, missed, None)

    def _graph_for(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        missed: tuple[str, ...],
        returned: Returned | None,
    ) -> Selected | None:
        """Return the graph made for a call, or the reason why there is none."""
        if self.adapter is None:
            return None
        with adapting():
            made = self.adapter.adapt(module, self.original, args, kwargs, missed, returned)
        if made is None:
            return None
        selected = self._with(made, module, args, kwargs)
        if selected is None:
            made = replace(made, specializations=(), summary="")
            selected = self._with(made, module, args, kwargs)
        found = f"new graphs for {made.summary}" if made.summary else f"no new graph: {made.declined.why}"
        facts = {"module": self.name, "summary": made.summary, "reason": made.declined.why}
        log("fallbacks", f"{self.label}: {found}", facts)
        return selected

    def _observed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hooked: Sequence[nn.Module]
    ) -> Any:
        """Run the original forward, and make a graph for such calls with what submodules with hooks returned.

        Hooks, such as those of FSDP2 that cast what a layer returns, cannot run without data.
        """
        returned: Returned = {child: [] for child in hooked}

        def keep(child: nn.Module, call: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            output = perform(call, *given, **named)
            if child in returned:
                returned[child].append(map_structure(output, _detached))
            return output

        with intercepted_calls(module, keep):
            result = perform(self.original, module, *args, **kwargs)
        with TRACING:
            selected = self._contained(lambda: self._graph_for(module, args, kwargs, (), returned))
        if selected is None or selected[0] is None:
            self.count_fallback(args, kwargs, selected[1][0] if selected else "")
        return result

    def _with(
        self, made: Adaptation, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Selected | None:
        before = self.adaptations
        self.adaptations = (*before, made)
        self.select = self._dispatch()
        selected = self.selected(module, args, kwargs, made.missed)
        if selected is None and made.specializations:
            self.adaptations = before
        return selected

    def retire(self, run: Callable[..., Any], why: str) -> None:
        """Stop using ``run``, since its next call would fail too.

        Such calls get one other graph, if possible.
        """
        self.retired = (*self.retired, *(each for each in self.specializations if each.function is run))
        self.adaptations = tuple(
            replace(each, specializations=(), declined=replace(each.declined, why=why))
            if any(made.function is run for made in each.specializations)
            else each
            for each in self.adaptations
        )
        self.select = self._dispatch()

    @property
    def label(self) -> str:
        """The path and class of the module, for messages."""
        return f"{self.name or 'the root module'} ({self.module_class.__name__})"

    @property
    def kind(self) -> str:
        """The label, with ``*`` for numbers in the path: the same for like layers, so that Python warns once."""
        return re.sub(r"(?<![^.])\d+(?![^. ])", "*", self.label)

    @property
    def original(self) -> Callable[..., Any]:
        """Fallback forward."""
        return self.module_class.forward if self.forward is None else self.forward

    def first_run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> Any:
        """Run the original forward for a call without a graph, before any graph has run.

        It is not counted as a fallback if graphs take such calls from now on: the forward has set state they read,
        such as a lazily made cache. The recorded run had set it too, but was undone.
        """
        if self.ran or not self.specializations or is_only_traced(args, kwargs):
            return self.fall_back(module, args, kwargs, why)
        takes, self.ran = False, "forward"
        log_missed(self.name, self.specializations, module)
        try:
            result = perform(self.original, module, *args, **kwargs)
            takes = self._takes(module, args, kwargs)
            if takes:
                self.ran = "graph"
            return result
        finally:
            if not takes:
                self.count_fallback(args, kwargs, why)

    def _takes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Check whether a graph takes a call by now."""
        try:
            with own_errors("selecting a graph"):
                selected = self.selected(module, args, kwargs)
        except InternalError as error:
            self.failed(error)
            return False
        return selected is not None and selected[0] is not None

    def fall_back(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> Any:
        """Run the original forward for a call, counted by :meth:`count_fallback`."""
        self.count_fallback(args, kwargs, why)
        log_missed(self.name, self.specializations, module)
        return perform(self.original, module, *args, **kwargs)

    def count_fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> None:
        """Count a call of the original forward and warn the first time, unless there are no graphs to run."""
        if torch.compiler.is_compiling():
            return
        try:
            with own_errors("counting a call"):
                self._count_fallback(args, kwargs, why)
        except InternalError as error:
            self.failed(error)

    def _count_fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> None:
        if self.specializations and not is_only_traced(args, kwargs):
            self.fallbacks += 1
            self.ran = "forward"
            if is_on("fallbacks"):
                received = summary(args, kwargs)
                facts = {"module": self.name, "count": self.fallbacks, "received": received, "reason": why}
                log("fallbacks", f"{self.label}: original forward, number {self.fallbacks}: {received}", facts)
            if self.fallbacks == 1:
                self.last_miss = summary(args, kwargs)
                because = f". No graph was made for it: {why}" if why else ""
                warnings.warn(
                    f"{self.kind}: a call differs from the recorded ones and runs the original forward; correct, not "
                    f"optimized. It received {self.last_miss}{because}",
                    FallbackWarning,
                    stacklevel=6,
                )


def _is_shared_out(module: nn.Module) -> bool:
    """Check whether primitives have shared the work of ``module`` among ranks: its original forward would not do."""
    wrapped = any(state.forward is not None for state in states_in(module))
    return wrapped or any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


_ENOUGH: Selected = (None, (f"{MAX_ADAPTATIONS} other kinds of calls have graphs, and no more are made",))


def state_of(module: nn.Module) -> ScheduledState | None:
    """Return the state of ``module`` if it is scheduled, else None."""
    return vars(module).get(STATE)


def states_in(root: nn.Module) -> list[ScheduledState]:
    """Return the states of the scheduled modules in ``root``, itself included."""
    return [state for module in root.modules() if (state := state_of(module)) is not None]


@contextmanager
def without_new_graphs(root: nn.Module) -> Iterator[None]:
    """Forget graphs made for calls in the block, which count toward :data:`MAX_ADAPTATIONS`; not why none was made."""
    states = states_in(root)
    before = [state.adaptations for state in states]
    try:
        yield
    finally:
        for state, adaptations in zip(states, before, strict=True):
            if state.adaptations is not adaptations:
                declined = [each for each in state.adaptations[len(adaptations) :] if not each.specializations]
                state.adaptations = (*adaptations, *declined)
                state.select = state._dispatch()


@contextmanager
def uncounted(root: nn.Module) -> Iterator[None]:
    """Keep our own calls of ``root`` from counting as fallbacks or warning."""
    states = states_in(root)
    before = [(state.fallbacks, state.ran) for state in states]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            yield
    finally:
        for state, (count, ran) in zip(states, before, strict=True):
            state.fallbacks, state.ran = count, ran


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the fallback forward of ``module``, also the one its graphs are traced from."""
    state = state_of(module)
    own = None if state is None else state.forward
    return original_class(module).forward if own is None else own


def install(
    module: nn.Module,
    specializations: Sequence[Specialization],
    name: str = "",
    forward: Callable[..., Any] | None = None,
    adapter: Adapter | None = None,
) -> None:
    """Make ``module`` run ``specializations``, or only its fallback forward if the sequence is empty.

    Args:
        module: the module.
        specializations: graphs, first match wins.
        name: its path, for messages.
        forward: fallback forward, called with the module and the arguments; None for the present one.
        adapter: makes graphs for further kinds of calls; without one they run ``forward``.
    """
    cls, state = original_class(module), state_of(module)
    log_guards(name, specializations)
    if forward is None and state is not None:
        forward = state.forward
    made = bool(specializations) or forward is not None
    put(module, ScheduledState(cls, specializations, name, forward, adapter) if made else None)


def put(module: nn.Module, state: ScheduledState | None) -> None:
    """Make ``module`` run ``state``, made for it before, or its original forward if None."""
    if state is None:
        take_off(module)
    else:
        put_on(module, state)


@contextmanager
def as_scheduled(module: nn.Module) -> Iterator[None]:
    """Give ``module`` its generated class temporarily, if a base of it wraps the forward of each subclass.

    The base of transformers' layers does: the outermost class checkpoints, and the graph runs inside the checkpoint.
    """
    cls = type(module)
    told = any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object)
    if state_of(module) is not None or not told or not wraps_forward(scheduled_class(cls)):
        yield
        return
    vars(module)[STATE] = ScheduledState(cls, (), "")
    module.__class__ = scheduled_class(cls)
    try:
        yield
    finally:
        module.__class__ = cls
        vars(module).pop(STATE)


__all__ = [
    "FallbackWarning",
    "GuardMiss",
    "ScheduledState",
    "install",
    "put",
    "state_of",
]
