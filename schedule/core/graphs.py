"""Graphs of a model's modules: traced on demand, checked at once, cached until something invalidates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from schedule.batches import example_inputs, has_values, other_shapes, placed, small_shapes
from schedule.capture import (
    Call,
    GuardMiss,
    Recording,
    Snapshot,
    Specialization,
    as_call,
    interceptable,
    intercepted_calls,
    is_hooked,
    map_structure,
    modes_restored,
    nothing_collected,
    original_class,
    own_forward,
    record,
    specialize,
    tensors,
    undisturbed,
    written,
)
from schedule.core.wrapping import unwrapped, wrapped
from schedule.runtime.call_logs import log_trace
from schedule.runtime.scheduled import ScheduledState, as_scheduled, forward_of, state_of, uncounted
from schedule.util.copying import copied_where_possible
from schedule.util.errors import NotApplicable, ShardError, TraceError
from schedule.util.generators import State, all_states, set_states
from schedule.util.indices import indices_checked
from schedule.util.internal_errors import InternalError, contained, own_errors
from schedule.util.user_code import UserCodeError, user_code

Specializations = tuple[Specialization, ...]
Enter = Callable[[nn.Module, str], bool]

_CHECKED_SHAPES = 2
_TOLERANCE: dict[torch.dtype | None, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


class Graphs:
    """Traced forwards of the modules of one root.

    Attributes:
        explicit: graphs made by ``trace`` and ``trace_until``; part of the schedule, unlike those traced on demand.
        in_one_mode: modules with graphs for only one of training and eval mode, and the error of the other.
        batch: example inputs of the root, or None until something is traced.
        guessed: whether the batch was made from the model.
    """

    def __init__(self, root: nn.Module, batch: Any, path_of: Callable[[nn.Module], str]) -> None:
        self.root, self._path_of = root, path_of
        self.restart(batch)

    def restart(self, batch: Any) -> None:
        """Forget all graphs, and record with ``batch`` from now on."""
        self.batch, self.guessed = batch, False
        self.explicit: dict[nn.Module, Specializations] = {}
        self.in_one_mode: dict[nn.Module, TraceError] = {}
        self._by_need: dict[nn.Module, Specializations] = {}
        self._failed: dict[nn.Module, TraceError | InternalError] = {}
        self._recording: Recording | None = None
        self._outdated = False
        self._batches: list[Any] | None = None
        self._state: Snapshot | None = None
        self._together = False  # whether what traces write to Python state is looked for after all of them

    def require_batch(self) -> None:
        """Make a batch from the model if none was given.

        Raises:
            NotApplicable: none can be made.
        """
        if self.batch is None:
            self.batch, self.guessed = example_inputs(self.root), True

    @property
    def recording(self) -> Recording:
        """The recorded run of the root, made on first access.

        Raises:
            NotApplicable: the model refuses the example inputs, or none were given and none can be generated; or its
            weights are elsewhere between calls.
        """
        if self._recording is None:
            self.require_batch()
            _refuse_moved_weights(self.root)
            with uncounted(self.root), own_errors("recording"):
                self._recording = record(self.root, placed(self.root, self.batch))
        return self._recording

    def current(self, module: nn.Module) -> Specializations | None:
        """Return the graphs ``module`` runs, else its explicitly traced ones, else None."""
        state = state_of(module)
        return state.specializations if state is not None else self.explicit.get(module)

    def original(self, module: nn.Module) -> Specializations | None:
        """Return the graphs of ``module`` from before any rewrite, or None if it was not traced."""
        return self.explicit.get(module) or self._by_need.get(module)

    @property
    def made_recording(self) -> Recording | None:
        """The recorded run if it was made, else None."""
        return self._recording

    def of(self, module: nn.Module) -> Specializations:
        """Return the graphs of ``module``, traced now if necessary.

        Raises:
            TraceError: it cannot be traced, or the graph is wrong at other shapes.
            InternalError: our own code failed.
        """
        failed = self.ensure([module])
        if module in failed:
            raise _again(failed[module])
        return self.current(module) or self._by_need[module]

    def ensure(self, modules: Iterable[nn.Module]) -> dict[nn.Module, TraceError | InternalError]:
        """Trace the modules without a graph, check them together, and return the errors by module."""
        fresh: dict[nn.Module, Specializations] = {}
        wanted = list(dict.fromkeys(modules))
        new = [m for m in wanted if not (self.current(m) or m in self._by_need or m in self._failed)]
        if new:
            self._trace_all(new, fresh)
        wrong = self.check(fresh)
        for module, error in wrong.items():
            log_trace(self._path_of(module), None, error)
        self._failed |= wrong
        self._by_need |= {module: made for module, made in fresh.items() if module not in wrong}
        return {
            module: self._failed[module] for module in wanted if module in self._failed and not self.current(module)
        }

    def _trace_all(self, modules: Sequence[nn.Module], fresh: dict[nn.Module, Specializations]) -> None:
        """Trace ``modules`` into ``fresh`` and store the errors of those not traceable."""
        for module in modules:
            self.calls(module)  # the root runs before its state is saved
        with interceptable(self.root), self.recording.as_after_run(), self._state_saved() as before:
            self._trace_each(modules, fresh, together=True)
            if before.difference() is None:
                return
            before.restore()
            for saved in (fresh, self.recording.traced, self.recording.returned):
                saved.clear()
            self._trace_each(modules, fresh, together=False)  # to find which of them writes to what

    def _trace_each(
        self, modules: Sequence[nn.Module], fresh: dict[nn.Module, Specializations], together: bool
    ) -> None:
        self._together = together
        try:
            for module in sorted(modules, key=self._depth, reverse=True):  # what a child returns is known by then
                self._failed.pop(module, None)
                try:
                    fresh[module] = self.trace(module)
                except TraceError as error:
                    self._failed[module] = error
                except InternalError as error:
                    self._failed[module] = contained(error)
        finally:
            self._together = False

    def _depth(self, module: nn.Module) -> int:
        path = self._path_of(module)
        return path.count(".") + bool(path)

    def structure_changed(self, holders: Iterable[nn.Module]) -> None:
        """Invalidate the graphs of ``holders`` after a swap of their children, and the recording for new modules."""
        for module in holders:
            self._by_need.pop(module, None)
            self._failed.pop(module, None)
        self._outdated = True

    def forget_run(self, modules: Iterable[nn.Module]) -> dict[str, Any]:
        """Discard the recorded run and the graphs of ``modules``, and return the previous state.

        The modules now receive or return other sizes; they are recorded and traced again on demand.
        """
        saved = {name: vars(self)[name] for name in ("_by_need", "_failed", "_recording", "_outdated")}
        gone = set(modules)
        self._by_need = {module: made for module, made in self._by_need.items() if module not in gone}
        self._failed = {module: error for module, error in self._failed.items() if module not in gone}
        self._recording, self._outdated = None, False
        return saved

    def remember_run(self, saved: dict[str, Any]) -> None:
        """Undo a :meth:`forget_run`."""
        vars(self).update(saved)

    def calls(self, module: nn.Module) -> Sequence[Call]:
        """Return the recorded calls of ``module``, one per signature, or none if the run did not reach it."""
        if self._outdated and module not in self.recording.calls:
            self._recording, self._outdated = None, False
        return self.recording.calls.get(module, ())

    def trace(self, module: nn.Module, enter: Enter | None = None) -> Specializations:
        """Trace the original forward of ``module`` for every recorded signature, in training and eval mode.

        Raises:
            TraceError: it cannot be traced in either mode (gives the error of training mode), was not called, or has
                a forward set on the object.
        """
        path = self._path_of(module)
        if "forward" in vars(module):
            raise TraceError(
                f"{path or 'the root'} has a forward of its own, set on the object: {own_forward(module)}",
                fix="schedule the model before forward is replaced, or remove the replacement",
            )
        calls = self.calls(module)
        if not calls:
            raise TraceError(
                f"{path or 'the root'} ({type(module).__name__}) was not called in the recorded run",
                fix="give example inputs that reach it, or schedule the module that uses it",
            )
        forward, wrappers = unwrapped(forward_of(module))
        made, errors = list[Specialization](), list[TraceError]()
        for call in calls:
            for training in (True, False):
                try:
                    with own_errors("tracing"):
                        made.append(self._specialized(module, forward, call, training, enter))
                    log_trace(path, training, made[-1])
                except TraceError as error:
                    errors.append(error)
                    log_trace(path, training, error)
            if call is calls[0] and not made:
                raise errors[0]
            if call is calls[0] and errors:  # other calls may run the original forward
                self.in_one_mode[module] = errors[0]
        return tuple(wrapped(each, wrappers) for each in made)

    def _specialized(
        self, module: nn.Module, forward: Callable[..., Any], call: Call, training: bool, enter: Enter | None
    ) -> Specialization:
        """Trace one graph, or restore the Python state and raise if tracing wrote to it."""
        recording = self.recording
        with recording.as_after_run(), self._state_saved() as before:
            known = {id(made) for each in recording.traced.values() for made in each}
            made = None
            try:
                with modes_restored(), as_scheduled(module):
                    made = specialize(module, forward, call, recording, training, enter)
            finally:
                looked_at = made is None or not (self._together or id(made) in known)
                changed = before.difference() if looked_at else None
                if changed is not None:
                    before.restore()
            if changed is not None:
                recording.traced.clear()  # this graph is among them
                raise written(changed)
        return made

    @contextmanager
    def _state_saved(self) -> Iterator[Snapshot]:
        """Save the Python state of the root once for all traces inside, after their recorded run."""
        if self._state is not None:
            yield self._state
            return
        self._state = Snapshot({"self": self.root}, data=False)
        try:
            yield self._state
        finally:
            self._state.clear_caches()
            self._state = None

    # -- checking ------------------------------------------------------------------------------------------

    def check(self, traced: dict[nn.Module, Specializations]) -> dict[nn.Module, TraceError | InternalError]:
        """Compare graphs with their modules on shapes other than the recorded ones, in eval mode.

        The root runs twice at small sizes, regardless of the number of modules, then at about the recorded sizes as
        long as some graph was not selected by any call. Of similar modules with shared graphs, one is compared per
        run. The model does not change.
        """
        wrong: dict[nn.Module, TraceError | InternalError] = {}
        if not traced or not has_values(self.root):
            return wrong
        comparison = _Comparison(traced, self._path_of, wrong)
        batches = self._other_batches()
        with (
            own_errors("checking graphs"),
            undisturbed(self.root, batches),
            uncounted(self.root),
            torch.no_grad(),
            self.recording.as_after_run(),
        ):
            self.root.eval()
            ran = 0
            for batch in batches:
                if ran >= _CHECKED_SHAPES and not comparison.waiting:
                    break
                args, kwargs = as_call(batch)
                comparison.compared.clear()
                try:
                    with user_code(), indices_checked(batch), intercepted_calls(self.root, comparison.on_call):
                        self.root(*args, **kwargs)
                    ran += 1
                except (UserCodeError, ShardError):  # it does not take this shape
                    continue
        return wrong

    def _other_batches(self) -> list[Any]:
        if self._batches is None:
            batch = placed(self.root, self.batch)
            self._batches = [*small_shapes(batch), *other_shapes(batch)[:_CHECKED_SHAPES]]
        return self._batches


def _refuse_moved_weights(root: nn.Module) -> None:
    """Raise if a forward that is set on a module brings its weights to their device, and takes them away again."""
    for path, module in root.named_modules():
        if (forward := own_forward(module)) and any(parameter.is_meta for parameter in module.parameters()):
            raise NotApplicable(
                f"{path or 'the root'} runs {forward}, set on the object, and its weights are on the meta device: they "
                "are brought for each call, which graphs do not do",
                fix="schedule a model whose weights stay in place",
            )


class _Comparison:
    """Comparison of graphs with their modules during runs of the root, each graph once per run.

    Attributes:
        waiting: graphs that no call has selected yet.
        compared: graphs that were compared in this run of the root.
        wrong: module → error, for modules with a wrong graph.
    """

    def __init__(
        self,
        traced: dict[nn.Module, Specializations],
        path_of: Callable[[nn.Module], str],
        wrong: dict[nn.Module, TraceError | InternalError],
    ) -> None:
        self.path_of, self.wrong = path_of, wrong
        self.states = {
            module: ScheduledState(original_class(module), made, path_of(module)) for module, made in traced.items()
        }
        self.shared = {module: tuple(map(id, made)) for module, made in traced.items()}
        self.waiting = set(self.shared.values())
        self.compared: set[tuple[int, ...]] = set()
        self.comparing = False

    def on_call(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = module not in self.states or module in self.wrong or self.shared[module] in self.compared
        # A hook may change the output: then the graph is not what the call returns.
        if self.comparing or known or is_hooked(module):
            return call(*args, **kwargs)
        twin_args, twin_kwargs = map_structure((args, kwargs), _own)
        before = Snapshot({"self": module})
        drawn = all_states()
        with before.copy_on_write():
            expected = call(*args, **kwargs)
        after = [buffer.clone() for buffer in module.buffers()], args, kwargs
        with before.put_back(), _drawing_again(drawn):
            self.compare(module, expected, after, twin_args, twin_kwargs)
        return expected

    def compare(self, module: nn.Module, expected: Any, after: Any, args: Any, kwargs: Any) -> None:
        selected = self.states[module].select(module, args, kwargs)
        if selected is None:
            return
        self.waiting.discard(self.shared[module])
        run, given = selected
        where = ", ".join(str(list(t.shape)) for t in tensors((args, kwargs)))
        self.comparing = True
        try:
            with user_code(GuardMiss), nothing_collected():
                got = run(*given)
            why = difference((got, list(module.buffers()), args, kwargs), (expected, *after))
        except GuardMiss:  # the original forward runs then
            return
        except InternalError as error:
            self.wrong |= dict.fromkeys(self._alike(module), contained(error))
            return
        except UserCodeError as failed:  # generated from the user's forward
            why = f"it raises {failed}"
        finally:
            self.comparing = False
        self.compared.add(self.shared[module])
        for like in self._alike(module) if why else ():
            self.wrong[like] = TraceError(
                f"the traced graph of {self.path_of(like) or 'the root'} is wrong at other shapes: {why}",
                where=f"inputs of shapes {where}",
                fix="keep the module that bakes a size in a leaf (`leaves=(…,)`), or schedule its submodules",
            )

    def _alike(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that share the graphs of ``module``."""
        return [like for like, shared in self.shared.items() if shared == self.shared[module]]


@contextmanager
def _drawing_again(states: list[State]) -> Iterator[None]:
    """Draw the same random numbers again from these states, since dropout may be on in eval mode too."""
    after = all_states()
    set_states(states)
    try:
        yield
    finally:
        set_states(after)


def _own(leaf: Any) -> Any:
    """Copy an argument if the module may change it in place."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if leaf is None or callable(leaf) or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
        return leaf
    return copied_where_possible(leaf)


def difference(got: Any, expected: Any, computed_in: torch.dtype | None = None) -> str:
    """Describe the difference of a graph's result from the expected one, or return "".

    Args:
        got: what the graph returned.
        expected: what the forward returned.
        computed_in: the narrowest dtype used in the computation, if narrower than the result's.
    """
    ours, theirs = list(tensors(got)), list(tensors(expected))
    if len(ours) != len(theirs):
        return f"it returns {len(ours)} tensors instead of {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"it returns {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        bound = _TOLERANCE.get(b.dtype, 0.0)
        if b.is_floating_point():
            bound = max(bound, _TOLERANCE.get(computed_in, 0.0))
        if not torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True):
            return f"it is off by {(a.double() - b.double()).abs().max().item():.3g}"
    return ""


def _again(error: TraceError | InternalError) -> TraceError | InternalError:
    """Copy a cached error to raise it again."""
    return type(error)(error.why, fix=error.fix, where=error.where)
