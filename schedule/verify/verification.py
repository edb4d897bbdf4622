"""Verification of a scheduled model against itself with all steps undone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.core.node import Node, scheduled_root
from schedule.distributed.communication.verdicts import limited, verdicts_of
from schedule.distributed.tensor_parallel.sharded_modules import is_sharded, ranks_sharing_evenly
from schedule.primitives.fork_rng import draws_apart
from schedule.runtime.scheduled import without_new_graphs
from schedule.util.arguments import keywords_checked
from schedule.util.errors import ScheduleError, VerificationError
from schedule.util.printing import in_progress
from schedule.util.user_code import UserCodeError, raised_by, user_code
from schedule.verify.bisection import first_failing_step, undone
from schedule.verify.compare import SECOND
from schedule.verify.equivalence import cases, check_case, empty_report, refuse_meta, refuse_settings
from schedule.verify.equivalence_report import CaseResult, EquivalenceReport
from schedule.verify.observe import Case, Observation, OptimizerFactory
from schedule.verify.tolerances import Tolerance, tolerance_for

if TYPE_CHECKING:
    from schedule.distributed.communication.verdicts import Verdicts


DROPOUT_OFF = "compared without dropout, because each rank draws the random numbers of its own shards"


class Verification:
    """Verification of a schedule, repeated on exit if used as a context manager.

    Attributes:
        report: the result of the latest check.
    """

    def __init__(
        self,
        sch: Node,
        batch: Any,
        steps: int = 5,
        tolerance: Tolerance | float | None = None,
        optimizer: OptimizerFactory | None = None,
        limit: float = 300.0,
        training: bool = True,
        create_graph: bool | None = None,
        progress: bool = True,
    ) -> None:
        refuse_settings(steps, training)
        self._limit, self._training, self._create_graph, self._progress = limit, training, create_graph, progress
        self._sch, self._batch, self._steps = sch, batch, steps
        self._tolerance, self._optimizer = tolerance, optimizer
        self.report = empty_report(training)

    def check(self) -> EquivalenceReport:
        """Compare now, and raise :class:`VerificationError` at the first difference."""
        sch = self._sch
        self.report = empty_report(self._training)
        if not len(sch.history):
            return self.report
        refuse_meta(self._batch, sch.module)
        try:
            with without_new_graphs(sch.module):
                return self._check()
        finally:
            sch.tree.verified = (sch.history, self.report)

    def _check(self) -> EquivalenceReport:
        sch = self._sch
        if sch.mesh is not None:
            return self._check_ranks(sch.mesh)
        tolerance = tolerance_for(sch.module, self._tolerance)
        with closing(self._cases()) as each:
            for index, case in enumerate(each):
                result, reference = self._case(case, tolerance, required=index == 0, alone=True)
                if result is not None and reference is not None and not result.equal:
                    raise _error(sch, case, result, reference, tolerance)
        return self.report

    def _cases(self) -> Generator[Case, None, None]:
        """Yield the cases under a progress bar, which closing ends."""
        multiple = ranks_sharing_evenly(self._sch.module)
        twice = self._create_graph if self._sch.mesh is None else False
        chosen = list(cases(self._batch, self._steps, self._optimizer, self._training, twice, multiple))
        with in_progress(len(chosen), "verifying", self._progress) as advance:
            for case in chosen:
                yield case
                advance()

    def _case(
        self, case: Case, tolerance: Tolerance, *, required: bool, alone: bool
    ) -> tuple[CaseResult | None, Observation | None]:
        """Run one case on the model with all steps undone and on the model as it is."""
        module, original = self._sch.module, partial(undone, self._sch)
        return check_case(
            case, module, module, tolerance, self.report, required=required, original=original, alone=alone
        )

    def _check_ranks(self, mesh: Any) -> EquivalenceReport:
        """Compare on every rank of a mesh: all of them pass or fail together, case by case."""
        sch, verdicts = self._sch, verdicts_of(mesh, self._limit)
        tolerance = tolerance_for(sch.module, self._tolerance)
        if self._create_graph:
            self.report.skipped.append(f"{SECOND}: left out, because gradients are sharded on a mesh")
        forked = draws_apart(sch.module)
        apart = forked or is_sharded(sch.module)
        with limited(mesh, self._limit), closing(self._cases()) as every:
            for index, each in enumerate(every):
                case = replace(each, forked=forked)
                wrong, reference = self._on_ranks(case, tolerance, index == 0, verdicts)
                drew = apart and case.mode == "train" and reference is not None and reference.drew
                if wrong and (drew if verdicts is None else verdicts.agreed(drew)):
                    case = replace(case, dropout=False)
                    self.report.cases.pop()
                    self.report.skipped.append(
                        f"{case.mode} mode, {case.weights} weights, {case.shapes}: {DROPOUT_OFF}"
                    )
                    wrong, reference = self._on_ranks(case, tolerance, index == 0, verdicts)
                if wrong and verdicts is not None:
                    raise verdicts.error(wrong, _bisected(sch, case, reference, tolerance, verdicts))
                if wrong:
                    raise VerificationError(wrong[0])
        return self.report

    def _on_ranks(
        self, case: Case, tolerance: Tolerance, required: bool, verdicts: Verdicts | None
    ) -> tuple[dict[int, str], Observation | None]:
        """Run one case on every rank, and return what is wrong by rank (0 if there is one) and the reference."""
        own, reference = "", None
        try:
            with user_code():
                result, reference = self._case(case, tolerance, required=required, alone=False)
            if result is not None and not result.equal:
                mode = f"{case.mode} mode" if case.dropout else f"{case.mode} mode without dropout"
                own = f"{result.worst} in {mode}, {case.weights} weights, {case.shapes}"
        except (ScheduleError, UserCodeError) as failed:
            error = raised_by(failed)
            if verdicts is None:
                raise error from error.__cause__
            own = f"raises {type(error).__name__}: {error}"
        if verdicts is None:
            return {0: own} if own else {}, reference
        return verdicts.wrong(own), reference

    def __bool__(self) -> bool:
        return self.report.equal

    def __str__(self) -> str:
        return str(self.report)

    __repr__ = __str__

    def __enter__(self) -> Verification:
        refuse_meta(self._batch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # the user's own exception is the news; a half-made schedule is not worth a check
            self.check()


@keywords_checked()
def verify(
    sch: Node | nn.Module,
    batch: Any,
    steps: int = 5,
    *,
    tolerance: Tolerance | float | None = None,
    optimizer: OptimizerFactory | None = None,
    limit: float = 300.0,
    training: bool = True,
    create_graph: bool | None = None,
    progress: bool = True,
) -> Verification:
    """Check the scheduled model against the original, in the sense of :func:`equivalent`.

    The model is compared with itself, with all primitives undone and then reapplied: the same parameters, no
    second copy of the model. Parameters, buffers, gradients, random state, flags and hooks are restored
    afterwards.

    As a call it checks at once. As a context manager it checks again on exit, unless the body raised::

        with schedule.verify(sch, batch):
            sch["transformer.h.*.mlp"].fuse(matches)

    A schedule without primitives is the original; there is nothing to check then, and the report says so. If ranks draw
    random numbers for their shards (dropout, ``fork_rng``) and therefore differ in train mode, that case is compared
    without dropout, all modules but those with running statistics in eval mode, and the report says so.

    Args:
        sch: the schedule, or the model that one schedule has changed.
        batch: what the model is called with.
        steps: optimizer steps for the comparison of updates.
        tolerance: of outputs, as a number, in place of the row for the model's dtype in :data:`TOLERANCES`; or a
            :class:`Tolerance`.
        optimizer: makes an optimizer from a list of parameters; AdamW by default.
        limit: on a mesh of several ranks, which must all call this: seconds one rank waits for another.
        training: whether the model is trained. If False, it runs in eval mode and without gradients only, for a model
            that cannot be trained; the report lists what is left out.
        create_graph: whether to differentiate the norm of the gradient too, in train mode on ``batch``, as with
            ``create_graph=True``; by default with ``steps=1``, and never on a mesh, where gradients are sharded.
        progress: show a progress bar in a terminal.

    Raises:
        VerificationError: they differ. Names the primitive that broke the model, the worst tensor, mode and shapes;
            on a mesh also the ranks that differ, on every rank.
        NotApplicable: a model was given of which no schedule with steps is at hand, or more than one.
    """
    if not isinstance(sch, (Node, nn.Module)):
        fix = "verify(sch, batch), or verify(model, batch)"
        raise ScheduleError(f"a schedule or a model is verified, not a {type(sch).__name__}", fix=fix)
    sch = scheduled_root(sch) if isinstance(sch, nn.Module) else sch
    verification = Verification(sch, batch, steps, tolerance, optimizer, limit, training, create_graph, progress)
    verification.check()
    return verification


def _bisected(sch: Node, case: Case, reference: Observation | None, tolerance: Tolerance, verdicts: Verdicts) -> str:
    """Describe the first failing step on the ranks, or return "" if one raised and cannot continue."""
    steps = [step.description for step in sch.history]
    different = verdicts.differing(steps if reference is not None else ())
    if different is None or reference is None:
        return ""
    if different:
        return different
    found = first_failing_step(sch, case, reference, tolerance, verdicts.agreed)
    return "" if found is None else f"{found[1]}, step {found[0] + 1} of {len(steps)}, changed what the model computes"


def _error(
    sch: Node, case: Case, result: CaseResult, reference: Observation, tolerance: Tolerance
) -> VerificationError:
    where = f"{case.mode} mode, {case.weights} weights, {case.shapes}"
    others = "".join(f"\nalso {d}" for d in result.deviations[1:4] if not d.acceptable)
    found = first_failing_step(sch, case, reference, tolerance)
    if found is None:
        return VerificationError(
            f"the original model does not repeat itself under one seed, so nothing is told: {result.worst}",
            where=where + others,
            fix="make its random numbers come from torch's, numpy's or Python's global generator",
        )
    index, description = found
    unneeded = ", if none is needed create_graph=False" if result.worst and result.worst.kind == SECOND else ""
    return VerificationError(
        f"{description} changed what the model computes: {result.worst}",
        where=f"{where}; step {index + 1} of {len(sch.history)}{others}",
        fix="undo that primitive, or correct its replacement; if only rounding differs, pass a larger tolerance, "
        f"such as tolerance={10 * tolerance.forward:.0e}{unneeded}",
    )
