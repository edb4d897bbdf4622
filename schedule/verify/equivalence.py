"""Check of the equivalence of two models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

from torch import nn

from schedule.batches import other_shapes
from schedule.util.arguments import keywords_checked, refuse_no_count
from schedule.util.errors import NotApplicable, ScheduleError, VerificationError
from schedule.util.indices import indices_checked
from schedule.util.internal_errors import InternalError, contained
from schedule.util.named_values import named_tensors, shapes_of
from schedule.util.user_code import UserCodeError, raised_by, refused_batch, user_code
from schedule.util.wording import counted
from schedule.verify.compare import SECOND, TRAINED, compare
from schedule.verify.equivalence_report import CaseResult, Deviation, EquivalenceReport, missing
from schedule.verify.observe import Case, Mode, Observation, OptimizerFactory, Weights, observe
from schedule.verify.tolerances import Tolerance, tolerance_for


@keywords_checked()
def equivalent(
    a: nn.Module,
    b: nn.Module,
    batch: Any,
    steps: int = 5,
    *,
    tolerance: Tolerance | float | None = None,
    optimizer: OptimizerFactory | None = None,
    training: bool = True,
    create_graph: bool | None = None,
) -> EquivalenceReport:
    """Compare ``b`` with ``a``, the reference, in training and in inference.

    Runs in eval and train mode (dropout on, same seed), with the weights as they are and with perturbed ones, on
    ``batch`` and on batches of other sizes made from it. Compares outputs, gradients of every parameter and every
    floating input, buffers, random state, and the parameter updates of ``steps`` AdamW steps relative to their
    size. Both models are left unchanged. The loss is ``output.loss``, else the outputs weighted by fixed random
    numbers.

    Args:
        a: the reference.
        b: a twin with the same parameter names and values, or with a ``state_dict`` of those names.
        batch: mapping (called by keyword), tuple or list (by position), or a single tensor.
        steps: optimizer steps; 0 leaves updates out.
        tolerance: of outputs, as a number, in place of the row for the model's dtype in :data:`TOLERANCES`; or a
            :class:`Tolerance`.
        optimizer: makes an optimizer from a list of parameters; AdamW by default.
        training: whether the models are trained. If False, both run in eval mode and without gradients only, for
            models that cannot be trained; the report lists what is left out.
        create_graph: whether to differentiate the norm of the gradient too, in train mode on ``batch``, as with
            ``create_graph=True``; by default with ``steps=1``.

    Returns:
        a report, true exactly if everything was within tolerance. It stops at the first failing case.

    Raises:
        VerificationError: a model has parameters on the meta device, or the reference is not finite on
            ``batch``.
        Exception: whatever ``a`` itself raises on ``batch``.
    """
    refuse_meta(batch, a, b)
    refuse_settings(steps, training)
    tolerance = tolerance_for(a, tolerance)
    report = empty_report(training)
    for index, case in enumerate(cases(batch, steps, optimizer, training, create_graph)):
        result, _ = check_case(case, a, b, tolerance, report, required=index == 0)
        if result is not None and not result.equal:
            break
    return report


def refuse_settings(steps: Any, training: Any) -> None:
    """Raise unless ``steps`` is a number from 0 and ``training`` is True or False."""
    refuse_no_count("steps is a number", steps, 0, asked="verify", fix="steps=5, say")
    if not isinstance(training, bool):
        raise NotApplicable(f"training is True or False, not {training!r}", asked="verify", fix="training=False")


def empty_report(training: bool) -> EquivalenceReport:
    """Return a report without cases, with the parts left out without training."""
    return EquivalenceReport(skipped=[] if training else [UNTRAINED])


def cases(
    batch: Any,
    steps: int,
    optimizer: OptimizerFactory | None,
    training: bool,
    create_graph: bool | None,
    multiple: int = 1,
) -> Iterator[Case]:
    """Yield the given batch with own and perturbed weights, then other shapes with own ones.

    Each comes in both modes, or in eval mode if the models are not trained.
    """
    weights: tuple[Weights, ...] = get_args(Weights)
    modes: tuple[Mode, ...] = ("eval", "train") if training else ("eval",)
    plans = [(batch, each) for each in weights] + [(other, weights[0]) for other in other_shapes(batch, multiple)]
    twice = training and (steps == 1 if create_graph is None else create_graph)
    for chosen, weight in plans:
        for mode in modes:
            again = twice and mode == "train" and chosen is batch
            yield Case(mode, weight, chosen, shapes_of(chosen), steps, optimizer, training=training, create_graph=again)


def check_case(
    case: Case,
    a: nn.Module,
    b: nn.Module,
    tolerance: Tolerance,
    report: EquivalenceReport,
    *,
    required: bool,
    original: Callable[[], AbstractContextManager[None]] = nullcontext,
    alone: bool = True,
) -> tuple[CaseResult | None, Observation | None]:
    """Run one case on both models and add the result to ``report``.

    Args:
        required: raise if the reference fails in this case; otherwise it is skipped and the report says so.
        original: makes a context manager for runs of ``a``. With it ``a`` and ``b`` may be one model, undone inside.
        alone: no other rank waits, so deviations may be compared with the effect of rounding on ``a``, in more runs.

    Returns:
        the result and the observation of the reference; None for both if the case was skipped.
    """
    described = f"{case.mode} mode, {case.weights} weights, {case.shapes}"
    reference, why = _reference(case, a, tolerance, described, required, original)
    if reference is None:
        report.skipped.append(f"{described}: {why}")
        return None, None
    if reference.once_differentiable:
        report.skipped.append(f"{described}, {SECOND}: the original raises {reference.once_differentiable}")
    undefined = [
        name for name, each in reference.second_gradients.items() if not (each is None or each.isfinite().all())
    ]
    if undefined:
        where = f"{counted(len(undefined), 'tensor')}, such as {undefined[0]}"
        report.skipped.append(f"{described}, {SECOND}: elements that are not finite in the original, of {where}")
    other, deviations = _observed(reference, case, b, tolerance)
    if alone and any(_may_be_rounding(deviation) for deviation in deviations):
        with original():
            deviations = _at_its_own_weights(deviations, a, case, tolerance, reference, other)
            told = _told(deviations, a, case, tolerance, reference)
        if len(told) < len(deviations):
            report.skipped.append(f"{described}: {counted(len(deviations) - len(told), 'tensor')} {TELL_NOTHING}")
        deviations = told
    worst = _worst_of_each_kind(deviations)
    result = CaseResult(case.mode, case.weights, case.shapes, worst, len(deviations))
    report.cases.append(result)
    return result, reference


def _reference(
    case: Case,
    a: nn.Module,
    tolerance: Tolerance,
    described: str,
    required: bool,
    original: Callable[[], AbstractContextManager[None]],
) -> tuple[Observation | None, str]:
    """Return the observation of the reference, or None and why the case is skipped; raise if it is required."""
    try:
        with user_code(), original(), indices_checked((case.batch, tuple(a.parameters()))):
            reference = observe(a, case, tolerance)
    except InternalError as internal:
        if required:
            raise
        return None, f"left out after an {contained(internal).why}"
    except (ScheduleError, UserCodeError) as failed:
        if required and isinstance(failed, UserCodeError):
            further = "; with `training=False` it need not train"
            raise refused_batch(a, "the original model fails on this batch", failed, further) from failed.error
        if required:
            raise
        error = raised_by(failed)
        return None, f"the original raises {type(error).__name__}: {_short(error)}"
    if reference.unusable and required:
        raise VerificationError(
            f"the original model is not finite on this batch, so nothing can be told: {reference.unusable}",
            where=described,
            fix="pass a batch that the model can be trained on",
        )
    return (None, reference.unusable) if reference.unusable else (reference, "")


def deviations_from(reference: Observation, case: Case, model: nn.Module, tolerance: Tolerance) -> list[Deviation]:
    """Return the deviations of ``model`` from an observation, an exception raised by it included."""
    return _observed(reference, case, model, tolerance)[1]


def _observed(
    reference: Observation, case: Case, model: nn.Module, tolerance: Tolerance
) -> tuple[Observation, list[Deviation]]:
    try:
        with user_code():
            other = observe(model, case, tolerance, reference)
    except InternalError:
        raise
    except (ScheduleError, UserCodeError) as failed:
        error = raised_by(failed)
        why = f"raises {type(error).__name__}, the original does not: {_short(error)}"
        return Observation(), [missing("call", "", why)]
    return other, compare(reference, other, tolerance)


UNTRAINED = "train mode, gradients and updates: left out by training=False"
TELL_NOTHING = "left out: the original changes such a tensor by as much when its weights are off by a few roundings"
# If a ReLU is at zero, about one direction in three makes it jump.
_ATTEMPTS = 8
# Two samples of the same noise may differ by this factor; in a well-conditioned model rounding is a tenth of the
# tolerance.
_ALIKE = 4.0


def _may_be_rounding(deviation: Deviation) -> bool:
    return 1.0 < deviation.excess < math.inf


def _at_its_own_weights(
    deviations: list[Deviation],
    a: nn.Module,
    case: Case,
    tolerance: Tolerance,
    reference: Observation,
    other: Observation,
) -> list[Deviation]:
    """Compare outputs after training again, with the original now at the trained weights of ``other``.

    Updates are compared separately. If they differ within the tolerance, a choice among the best few (top-k) may
    change, and with it everything after it.
    """
    if not any(d.kind == TRAINED and _may_be_rounding(d) for d in deviations):
        return deviations
    there = observe(a, case, tolerance, reference, updates=other.updates)
    again = {d.name: d for d in compare(there, other, tolerance) if d.kind == TRAINED}
    return [again.get(d.name, d) if d.kind == TRAINED else d for d in deviations]


def _told(
    deviations: list[Deviation], a: nn.Module, case: Case, tolerance: Tolerance, reference: Observation
) -> list[Deviation]:
    """Drop deviations above the tolerance if they are no larger than the effect of rounding on the original."""
    noise: defaultdict[tuple[str, str], float] = defaultdict(float)
    told = deviations
    if any(own.excess > 1.0 for own in compare(reference, observe(a, case, tolerance, reference), tolerance)):
        return deviations  # not reproducible: this is not rounding
    for attempt in range(1, _ATTEMPTS + 1):
        for own in compare(reference, observe(a, case, tolerance, reference, perturbed_slightly=attempt), tolerance):
            value = own.kind, own.name
            noise[value] = max(noise[value], own.excess)
        told = [d for d in deviations if not (_may_be_rounding(d) and d.excess <= _ALIKE * noise[d.kind, d.name])]
        if not any(map(_may_be_rounding, told)):
            break
    return told


def refuse_meta(batch: Any, *models: nn.Module) -> None:
    """Raise if the batch, a parameter or a buffer has no values to compute with."""
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise VerificationError(
                    f"{name} is on the meta device: it has a shape but no values, so nothing can be compared",
                    fix="give the model values first, with schedule.build(sch) or model.to_empty(device=...)",
                )
    for tensor in named_tensors(batch).values():
        if tensor.is_meta:
            raise VerificationError(
                f"the batch has a tensor {list(tensor.shape)} on the meta device: it has no values to compute with",
                fix="verify with a batch of values",
            )


def _worst_of_each_kind(deviations: list[Deviation]) -> tuple[Deviation, ...]:
    """Return the deviation of largest excess of each kind, the worst kind first."""
    first: dict[str, Deviation] = {}
    for deviation in sorted(deviations, key=lambda each: each.excess, reverse=True):
        first.setdefault(deviation.kind, deviation)
    return tuple(first.values())


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else "no message"
