"""Graphs for calls unlike the recorded ones, made when such a call comes.

Autocast turned on, another dtype, a mask or a cache where there was none: the live call is described as the recorded
ones are, by metadata only, the module is traced for it, and the rewrites that its other graphs had are made again.
All of that happens on a shadow of the module, which shares its parameters, and the result is compared with the
original forward before it is used. Whatever goes wrong, the original forward runs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fused
from schedule.capture.examples.shapes import other_shapes
from schedule.capture.recording.calls import interceptable
from schedule.capture.recording.recording import Call, Recording
from schedule.capture.recording.structure import map_structure
from schedule.capture.snapshots import restored
from schedule.capture.tracing.environment import (
    FAST_PATH,
    Environment,
    autocast_dtype,
    on_fast_path,
    parameter_conditions,
    quiet_autocast,
)
from schedule.capture.tracing.opaque import Constant
from schedule.capture.tracing.sharing import has_constants, structural_key
from schedule.capture.tracing.signature import Parameters, Signature, SignatureBuilder
from schedule.capture.tracing.specialization import Specialization, original_class, specialize
from schedule.capture.tracing.unchanged import state_unchanged
from schedule.core.graphs import difference
from schedule.runtime.dispatch import Declined
from schedule.runtime.scheduled import Adaptation, ScheduledState, state_of
from schedule.util.copying import copied
from schedule.util.errors import NotApplicable, ScheduleError, TraceError
from schedule.util.generators import generator_states, restore_generators
from schedule.util.user_code import UserCodeError, user_code

if TYPE_CHECKING:
    from schedule.core.node import Node

Rewritten = tuple[Specialization, dict[str, int]]
"""A graph, and what was rewritten in it, in how many places."""

_CHECKED_SHAPES = 2
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_known: weakref.WeakValueDictionary[Hashable, Adaptation] = weakref.WeakValueDictionary()
"""What like modules got: the layers of a model are adapted once."""


class _NothingToRewrite(NotApplicable):
    """A call in which nothing occurs that could be rewritten."""


class Rewrite(Protocol):
    """What was done to the graphs of a module, in a form that holds for further graphs of it."""

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """``made`` rewritten.

        Raises:
            ScheduleError: it cannot be done again.
        """


_EXAMPLES = "schedule with example inputs of the kind that is called"


@dataclass(frozen=True)
class Unrepeatable:
    """A rewrite that is known for the recorded calls only."""

    why: str

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Always refuses."""
        raise NotApplicable(self.why, fix=_EXAMPLES)


@dataclass(frozen=True)
class Adapter:
    """How a module gets a graph for a further kind of call.

    Attributes:
        entered: submodules whose inside its graphs held before anything was rewritten.
        rewrites: what was done to its graphs, in order.
    """

    inlined: frozenset[str] = frozenset()
    rewrites: tuple[Rewrite, ...] = ()

    def adapt(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Adaptation | None:
        """Graphs for calls like this one, in training and in evaluation, or why there are none.

        Args:
            module: the live module; neither it nor the random state changes.
            forward: its original forward.
            args: of the call, as ``kwargs``.

        Returns:
            None where the arguments do not fit the forward, or cannot be described.
        """
        recording = Recording(grad_enabled=torch.is_grad_enabled())
        try:
            with torch.inference_mode(False), torch.no_grad():
                call = Call(recording.describe(args), recording.describe(kwargs), None)
            autocast = autocast_dtype(call)
            signature = _signature(module, forward, call, autocast)
        except (TypeError, NotApplicable):
            return None
        if on_fast_path(module, forward):
            signature.conditions.append(FAST_PATH)
            return Adaptation((), Declined(signature, "torch has a kernel of its own for it without gradients"))
        try:
            _refuse(module)
            key = (structural_key(module, call, forward, autocast), self)
            known = _known.get(key)
            if known is not None and all(_holds_for(module, made) for made in known.specializations):
                return known
            with user_code(), _undisturbed(module):
                made, summary = self._made(module, forward, call, recording, autocast, (args, kwargs))
        except _NothingToRewrite as error:
            why = error.why if _altered(module) else ""  # else the original forward misses nothing: no fallback
        except ScheduleError as error:
            why = error.why
        except UserCodeError as failed:  # on tensors without data, or of other sizes
            why = str(failed)
        else:
            adaptation = Adaptation(made, Declined(signature, "the graph made for it does not take it"), summary)
            if not any(map(has_constants, made)):
                _known[key] = adaptation
            return adaptation
        return Adaptation((), Declined(signature, why.partition("\n")[0]))

    def _made(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        recording: Recording,
        autocast: torch.dtype | None,
        live: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> tuple[tuple[Specialization, ...], str]:
        shadow = Shadow(module)
        enter = (lambda child, path: path in self.inlined) if self.inlined else None
        made = []
        places: dict[str, int] = {}
        with interceptable(shadow.module):
            for training in (True, False):
                with state_unchanged(shadow.module):
                    graph = specialize(shadow.module, forward, call, recording, training, enter, autocast)
                for rewrite in self.rewrites:
                    graph, counts = rewrite.on(graph, shadow.module, recording)
                    places |= counts
                made.append(shadow.remapped(graph))
        if not places:
            raise _NothingToRewrite("nothing of what was rewritten occurs in it")
        with restored({"self": shadow.module}):  # its functions and globals are those of the live module
            _check(shadow.module, forward, made[1], live)
        done = ", ".join(f"{name} × {count}" for name, count in places.items())
        return tuple(made), f"{_kind(call, autocast)}: {done}"


def adapter_for(node: Node, rewrites: Sequence[Rewrite]) -> Adapter | None:
    """The adapter of a module once ``rewrites`` are made in its graphs."""
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
    """How the call looked, in a few words."""
    texts = [*map(_short, call.args), *(f"{key}={_short(value)}" for key, value in call.kwargs.items())]
    texts += [f"autocast {autocast}"] if autocast is not None else []
    return ", ".join(texts).replace("torch.", "")


def _short(value: Any) -> str:
    if hasattr(value, "snapshot"):
        return type(value.snapshot).__name__
    if hasattr(value, "dtype"):
        return str(value.dtype)
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Within, nothing that surrounds the live call takes notice: generators, saved tensors' hooks, autograd."""
    states = generator_states(module)
    unpacked = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with torch.inference_mode(False), unpacked:  # checkpointing counts the tensors that are saved
            yield
    finally:
        restore_generators(states)


def _refuse(module: nn.Module) -> None:
    """Raise where more than the module's own code decides what it computes."""
    for path, child in module.named_modules():
        state = state_of(child)
        if state is not None and state.forward is not None:
            raise NotApplicable(f"a primitive wraps the forward of {path or 'the module'}", fix=_EXAMPLES)
        if any(isinstance(tensor, DTensor) for tensor in child._parameters.values()):
            raise NotApplicable(f"{path or 'the module'} is sharded", fix=_EXAMPLES)
        if path and any(getattr(child, hooks) for hooks in _HOOKS):
            raise NotApplicable(f"{path} has a hook", fix="remove the hook")
        if "forward" in vars(child):
            raise NotApplicable(f"{path or 'the module'} has a forward of its own, set on the object", fix="remove it")


def _altered(module: nn.Module) -> bool:
    """Whether other submodules stand where those did whose inside the graphs hold."""
    state = state_of(module)
    made = () if state is None else state.specializations
    return any(
        original_class(module.get_submodule(path)) is not inlined.cls
        for each in made
        for path, inlined in each.inlined.items()
    )


def _holds_for(module: nn.Module, made: Specialization) -> bool:
    """Whether a graph made for a like module holds for this one: what its forward read agrees."""
    inside = all(e.ledger.holds(module.get_submodule(path)) for path, e in made.inlined.items())
    return inside and made.ledger.holds(module)


# -- a shadow ------------------------------------------------------------------------------------------------


def _own(leaf: Any) -> Any:
    """A copy of an argument that a forward may change: a tensor, a cache."""
    if leaf is None or callable(leaf) or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
        return leaf
    return copied(leaf, lambda tensor: tensor.detach().clone())


class Shadow:
    """A copy of a module on the same parameters, with buffers of its own: other threads never see it being traced."""

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
        memo |= {id(buffer): buffer.clone() for buffer in module.buffers()}
        for child in module.modules():
            memo |= {id(getattr(child, hooks)): type(getattr(child, hooks))() for hooks in _HOOKS}
            if (state := state_of(child)) is not None:
                memo[id(state)] = state
        self.module = copied(module, lambda tensor: tensor, memo)
        self._originals = {id(memo[id(one)]): one for one in memo.get(id(memo), ()) if id(one) in memo}

    def remapped(self, made: Specialization) -> Specialization:
        """``made`` with the objects that its graph holds in place of their copies."""
        for node in made.graph.nodes:
            if isinstance(node.target, Constant):
                node.target = Constant(self._original(node.target.value))
        return made

    def _original(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._original(value.__self__))
        return self._originals.get(id(value), value)


# -- checking ------------------------------------------------------------------------------------------------


def _check(shadow: nn.Module, forward: Callable[..., Any], made: Specialization, live: Any) -> None:
    """Compare a graph for evaluation with the forward, on the live arguments and at other sizes of them."""
    select = ScheduledState(original_class(shadow), [made], "").select
    kind = Environment.of(made.call, None).device_type
    quiet = nullcontext() if made.autocast is None else quiet_autocast(str(kind), made.autocast)
    shadow.eval()
    with ExitStack() as stack:
        for block in (torch.no_grad(), quiet, fused.backend("reference")):
            stack.enter_context(block)
        for batch in [live, *other_shapes(live)[:_CHECKED_SHAPES]]:
            (args, kwargs), (own_args, own_kwargs) = map_structure(batch, _own), map_structure(batch, _own)
            try:
                with user_code(), restored({"self": shadow}):
                    expected = forward(shadow, *args, **kwargs)
            except UserCodeError as failed:  # it does not take this shape
                if batch is live:
                    raise failed.error from None
                continue
            selected = select(shadow, *own_args, **own_kwargs)
            if selected is not None:
                run, inputs = selected
                why = difference(run(shadow, *inputs), expected, made.autocast)
                if why:
                    raise TraceError(f"its graph differs from the original forward: {why}", fix=_EXAMPLES)
