"""Graphs for calls that differ from the recorded ones, made at the first such call.

Examples are autocast turned on, another dtype, or a mask or cache that was absent before. The live call is described
by metadata only, like the recorded ones; the module is traced for it; and the rewrites of its other graphs are
repeated. If the forward needs data to go on, such as the number of pieces that it splits a tensor into, the call is
recorded with its data. All of this happens on a shadow copy of the module with shared parameters, and the result is
compared with the original forward before it is used. If anything fails, the original forward runs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fused
from schedule.batches import other_shapes
from schedule.capture import (
    FAST_PATH,
    MESSAGES,
    Call,
    Constant,
    Environment,
    GuardMiss,
    NeedsData,
    Parameters,
    Recording,
    Signature,
    SignatureBuilder,
    Specialization,
    acts_now,
    autocast_dtype,
    first_hook,
    has_constants,
    interceptable,
    intercepted_calls,
    is_fully_sharded,
    map_structure,
    on_fast_path,
    original_class,
    own_forward,
    parameter_conditions,
    quiet_autocast,
    recorded,
    restored,
    specialize,
    state_unchanged,
    structural_key,
)
from schedule.core.graphs import difference
from schedule.runtime.dispatch import Declined
from schedule.runtime.scheduled import Adaptation, Returned, ScheduledState, state_of
from schedule.util.copying import copied
from schedule.util.errors import NotApplicable, ScheduleError, TraceError
from schedule.util.generators import generator_states, generators_restored, restore_generators
from schedule.util.indices import indices_checked
from schedule.util.internal_errors import InternalError, contained, own_errors, perform, raise_if_own
from schedule.util.user_code import UserCodeError, user_code

if TYPE_CHECKING:
    from schedule.core.node import Node

Live = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of the call at hand."""

Rewritten = tuple[Specialization, dict[str, int]]
"""A graph, with the number of matches rewritten in it by rule."""

_CHECKED_SHAPES = 2
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_known: weakref.WeakValueDictionary[Hashable, Adaptation] = weakref.WeakValueDictionary()
"""What like modules got: the layers of a model are adapted once."""


class _NothingToRewrite(NotApplicable):
    """Error for a call with no match of any rewrite."""


class Rewrite(Protocol):
    """Rewrite of a module's graphs, repeatable on further graphs of it."""

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Rewrite ``made`` and return it with the counts.

        Raises:
            ScheduleError: the rewrite cannot be repeated.
        """


_EXAMPLES = "schedule with example inputs of the kind that is called"


@dataclass(frozen=True)
class Unrepeatable:
    """Rewrite valid for the recorded calls only."""

    why: str

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Raise :class:`NotApplicable`."""
        raise NotApplicable(self.why, fix=_EXAMPLES)


@dataclass(frozen=True)
class Adapter:
    """Maker of graphs for further kinds of calls of a module.

    Attributes:
        inlined: paths of the submodules inlined in its graphs before any rewrite.
        rewrites: the rewrites of its graphs, in order.
    """

    inlined: frozenset[str] = frozenset()
    rewrites: tuple[Rewrite, ...] = ()

    def adapt(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        missed: tuple[str, ...] = (),
        returned: Returned | None = None,
    ) -> Adaptation | None:
        """Make graphs for calls like this one, in training and eval mode, or give the reason against it.

        Args:
            module: the live module; neither it nor the random state changes.
            forward: its original forward.
            args: the arguments of the call, with ``kwargs``.
            missed: the checks inside graphs that the call failed; none if no graph took it.
            returned: what submodules with hooks returned in this call.

        Returns:
            None if the arguments do not fit the forward, or cannot be described.
        """
        recording = Recording(grad_enabled=torch.is_grad_enabled())
        try:
            with torch.inference_mode(False), torch.no_grad():
                call = Call(recording.describe(args), recording.describe(kwargs), None)
            autocast = autocast_dtype(call)
            signature = _signature(module, forward, call, autocast)
        except (TypeError, NotApplicable) as error:
            raise_if_own(error)
            return None
        if on_fast_path(module, forward):
            signature.conditions.append(FAST_PATH)
            return Adaptation(
                (), Declined(signature, "torch has a kernel of its own for it without gradients"), missed=missed
            )
        try:
            _refuse(module, returned or {})
            key = (structural_key(module, call, forward, autocast), self, missed)
            known = _known.get(key) if returned is None else None
            if known is not None and all(_holds_for(module, made) for made in known.specializations):
                return known
            with own_errors("adapting"), user_code(), _undisturbed(module):
                made, summary = self._made(
                    module, forward, call, recording, autocast, (args, kwargs), bool(missed), returned or {}
                )
        except InternalError as error:
            why = contained(error).why
        except _NothingToRewrite as error:
            why = error.why if _altered(module) else ""  # else the original forward misses nothing: no fallback
        except ScheduleError as error:
            why = error.why
        except UserCodeError as failed:  # on tensors without data, or of other sizes
            why = str(failed)
        else:
            adaptation = Adaptation(
                made, Declined(signature, "the graph made for it does not take it"), summary, missed
            )
            if returned is None and not any(map(has_constants, made)):
                _known[key] = adaptation
            return adaptation
        return Adaptation((), Declined(signature, why.partition("\n")[0]), missed=missed)

    def hooked(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules that stay calls of the graphs and run hooks, or have others in them that do."""
        found: list[nn.Module] = []

        def visit(parent: nn.Module, path: str) -> None:
            for name, child in parent.named_children():
                own = f"{path}.{name}" if path else name
                if own in self.inlined or type(child).forward is nn.Module.forward:  # a list of modules
                    visit(child, own)
                elif any(map(acts_now, child.modules())):
                    found.append(child)

        visit(module, "")
        return found

    def _made(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        recording: Recording,
        autocast: torch.dtype | None,
        live: Live,
        by_data: bool,
        returned: Returned,
    ) -> tuple[tuple[Specialization, ...], str]:
        shadow = Shadow(module, returned)
        replayed = {shadow.stand_ins[child]: outputs for child, outputs in returned.items()}
        recording.assumed |= {child: _one_kind(child, outputs, recording) for child, outputs in replayed.items()}
        made: list[Specialization] = []
        # The parameters, with what is set on them, are those of the live module, as are functions and globals.
        with restored({"self": shadow.module}):
            with interceptable(shadow.module):
                if not by_data:
                    with suppress(NeedsData):
                        made, rewritten = self._traced(shadow, forward, call, recording, autocast)
                if not made and returned:
                    raise NotApplicable("a branch depends on data, and a submodule has a hook", fix="remove the hook")
                if not made:
                    recording = _with_data(shadow.module, forward, live, recording.grad_enabled)
                    made, rewritten = self._traced(
                        shadow, forward, recording.calls[shadow.module][0], recording, autocast
                    )
            if self.rewrites and not rewritten:
                raise _NothingToRewrite("nothing of what was rewritten occurs in it")
            _check(shadow.module, forward, made[1], live, replayed)
        done = ", ".join(f"{name} × {count}" for name, count in rewritten.items())
        return tuple(made), f"{_kind(call, autocast)}: {done or 'traced'}"

    def _traced(
        self,
        shadow: Shadow,
        forward: Callable[..., Any],
        call: Call,
        recording: Recording,
        autocast: torch.dtype | None,
    ) -> tuple[list[Specialization], dict[str, int]]:
        enter = (lambda child, path: path in self.inlined) if self.inlined else None
        made = []
        rewritten: dict[str, int] = {}
        for training in (True, False):
            with state_unchanged(shadow.module):
                graph = specialize(shadow.module, forward, call, recording, training, enter, autocast)
            for rewrite in self.rewrites:
                graph, counts = rewrite.on(graph, shadow.module, recording)
                rewritten |= counts
            made.append(shadow.remapped(graph))
        return made, rewritten


def adapter_for(node: Node, rewrites: Sequence[Rewrite]) -> Adapter | None:
    """Return the adapter of a module after ``rewrites`` of its graphs, or None if it has none."""
    state = state_of(node.module)
    if state is None:
        inlined = frozenset(path for made in node.specializations for path in made.inlined)
        return Adapter(inlined, tuple(rewrites))
    adapter = state.adapter
    return replace(adapter, rewrites=(*adapter.rewrites, *rewrites)) if isinstance(adapter, Adapter) else None


def _signature(module: nn.Module, forward: Callable[..., Any], call: Call, autocast: torch.dtype | None) -> Signature:
    builder = SignatureBuilder(lambda name, described: None)
    builder.build(Parameters(forward), call)
    builder.signature.conditions += Environment.of(call, autocast).conditions(builder.signature)
    builder.signature.conditions += parameter_conditions(module, builder.signature)
    return builder.signature


def _kind(call: Call, autocast: torch.dtype | None) -> str:
    """Describe the call in a few words."""
    parts = [*map(_short, call.args), *(f"{key}={_short(value)}" for key, value in call.kwargs.items())]
    parts += [f"autocast {autocast}"] if autocast is not None else []
    return ", ".join(parts).replace("torch.", "")


def _short(value: Any) -> str:
    if hasattr(value, "snapshot"):
        return type(value.snapshot).__name__
    if hasattr(value, "dtype"):
        return str(value.dtype)
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Hide the work inside from the live call: random generators, saved-tensor hooks and autograd."""
    states = generator_states(module)
    unpacked = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with torch.inference_mode(False), unpacked:  # checkpointing counts the tensors that are saved
            yield
    finally:
        restore_generators(states)


def _refuse(module: nn.Module, returned: Returned) -> None:
    """Raise if the result depends on more than the module's code: a wrapper, sharding, a hook, a patched forward.

    Submodules that are known by what they returned are left out.
    """
    for path, child in module.named_modules(memo={inner for known in returned for inner in known.modules()}):
        state = state_of(child)
        if state is not None and state.forward is not None:
            raise NotApplicable(f"a primitive wraps the forward of {path or 'the module'}", fix=_EXAMPLES)
        if any(isinstance(tensor, DTensor) for tensor in child._parameters.values()):
            raise NotApplicable(f"{path or 'the module'} is sharded", fix=_EXAMPLES)
        if path and acts_now(child):
            raise NotApplicable(f"{path} has a hook ({first_hook(child)})", fix="remove the hook")
        if "forward" in vars(child):
            why = f"{path or 'the module'} has a forward of its own, set on the object: {own_forward(child)}"
            raise NotApplicable(why, fix="remove it")


def _altered(module: nn.Module) -> bool:
    """Check whether a submodule inlined in the graphs was replaced by one of another class."""
    state = state_of(module)
    made = () if state is None else state.specializations
    return any(
        original_class(module.get_submodule(path)) is not inlined.cls
        for each in made
        for path, inlined in each.inlined.items()
    )


def _holds_for(module: nn.Module, made: Specialization) -> bool:
    """Check whether a graph made for a similar module holds for this one, by the state its forward read."""
    inside = all(e.guard_set.holds(module.get_submodule(path)) for path, e in made.inlined.items())
    return inside and made.guard_set.holds(module)


# -- a shadow ------------------------------------------------------------------------------------------------


def _own(leaf: Any) -> Any:
    """Copy an argument if a forward may change it, such as a tensor or a cache."""
    if leaf is None or callable(leaf) or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
        return leaf
    return copied(leaf, lambda tensor: tensor.detach().clone())


class Shadow:
    """Copy of a module with shared parameters and copied buffers: other threads never see it being traced.

    Attributes:
        module: the copy.
        stand_ins: submodule → the object in its place, for those of which only results are known.
    """

    def __init__(self, module: nn.Module, known: Iterable[nn.Module] = ()) -> None:
        self.stand_ins = {child: _stand_in(child) for child in known}
        memo: dict[int, Any] = {id(child): stand_in for child, stand_in in self.stand_ins.items()}
        memo |= {id(parameter): parameter for parameter in module.parameters()}
        memo |= {id(buffer): buffer.clone() for buffer in module.buffers()}
        memo |= {id(getattr(module, hooks)): type(getattr(module, hooks))() for hooks in _HOOKS}
        for child in module.modules():
            if (state := state_of(child)) is not None:
                memo[id(state)] = state
        if is_fully_sharded(module):
            memo |= {id(value): value for value in vars(module).values() if _is_of_distributed(value)}
            twin = memo[id(module)] = object.__new__(type(module))  # the class of FSDP2 refuses to be copied
            vars(twin).update(copied(vars(module), lambda tensor: tensor, memo))
        self.module = copied(module, lambda tensor: tensor, memo)
        self._originals = {id(memo[id(one)]): one for one in memo.get(id(memo), ()) if id(one) in memo}

    def remapped(self, made: Specialization) -> Specialization:
        """Replace copies by the original objects in the graph's constants, in place."""
        for node in made.graph.nodes:
            if isinstance(node.target, Constant):
                node.target = Constant(self._original(node.target.value))
        return made

    def _original(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._original(value.__self__))
        return self._originals.get(id(value), value)


def _stand_in(module: nn.Module) -> nn.Module:
    """Return another object with the same state: hooks, which no rewrite may swallow, and submodules included."""
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update(vars(module))
    return twin


def _is_of_distributed(value: Any) -> bool:
    """Check whether an attribute is state of torch's wrappers, by module or in a dict of them."""
    inner = [*value, *value.values()] if isinstance(value, dict) else [value]
    return any(getattr(type(each), "__module__", "").startswith("torch.distributed") for each in inner)


# -- checking ------------------------------------------------------------------------------------------------


def _with_data(shadow: nn.Module, forward: Callable[..., Any], live: Live, grad_enabled: bool) -> Recording:
    """Record the live call with its data-dependent results.

    Raises:
        TraceError: the forward writes messages, which the recorded run would write again.
    """
    state = state_of(shadow)
    for made in () if state is None else state.specializations:
        _refuse_messages(made)
    args, kwargs = map_structure(live, _own)
    recording = recorded(shadow, forward, args, kwargs)
    recording.grad_enabled = grad_enabled
    return recording


def _one_kind(module: nn.Module, outputs: list[Any], recording: Recording) -> Any:
    """Return the metadata of all results of a submodule.

    Raises:
        NotApplicable: they differ, or there are none.
    """
    described = [recording.describe(output) for output in outputs]
    if not described or any(each != described[0] for each in described):
        kinds = "results of several kinds" if described else "no result"
        raise NotApplicable(f"{type(module).__name__} has a hook and returned {kinds}", fix="remove the hook")
    return described[0]


@contextmanager
def _replaying(root: nn.Module, returned: Returned) -> Iterator[None]:
    """Let calls of submodules return copies of these results, one after the other, in place of running."""
    left = {child: iter(outputs) for child, outputs in returned.items()}

    def replay(child: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if child in left:
            return map_structure(next(left[child]), _own)
        return perform(call, *args, **kwargs)

    with intercepted_calls(root, replay) if returned else nullcontext():
        yield


def _refuse_messages(made: Specialization) -> None:
    if any(node.target in MESSAGES for node in made.graph.nodes):
        raise TraceError("the forward prints, warns or logs, and checking a new graph would do so again", fix=_EXAMPLES)


def _check(
    shadow: nn.Module, forward: Callable[..., Any], made: Specialization, live: Live, returned: Returned
) -> None:
    """Compare an eval-mode graph with the forward, on the live arguments and on other sizes of them.

    Submodules known by what they returned return that again, for the live arguments alone.

    Raises:
        TraceError: they differ, or the comparison would write messages of the forward.
    """
    _refuse_messages(made)
    select = ScheduledState(original_class(shadow), [made], "").select
    kind = Environment.of(made.call, None).device_type
    quiet = nullcontext() if made.autocast is None else quiet_autocast(str(kind), made.autocast)
    shadow.eval()
    with ExitStack() as stack:
        for block in (torch.no_grad(), quiet, fused.backend("reference")):
            stack.enter_context(block)
        for batch in [live] if returned else [live, *other_shapes(live)[:_CHECKED_SHAPES]]:
            (args, kwargs), (own_args, own_kwargs) = map_structure(batch, _own), map_structure(batch, _own)
            try:
                with (
                    user_code(),
                    indices_checked(batch),
                    generators_restored(shadow),
                    restored({"self": shadow}),
                    _replaying(shadow, returned),
                ):
                    expected = perform(forward, shadow, *args, **kwargs)
            except UserCodeError as failed:  # it does not take this shape
                if batch is live:
                    raise failed.error from None
                continue
            selected = select(shadow, own_args, own_kwargs)
            if selected is not None:
                run, given = selected
                try:
                    with _replaying(shadow, returned):
                        why = difference(run(*given), expected, made.autocast)
                except GuardMiss as miss:
                    why = str(miss) if batch is live else ""
                if why:
                    raise TraceError(f"its graph differs from the original forward: {why}", fix=_EXAMPLES)
