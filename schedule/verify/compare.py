"""Comparison of two observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from schedule.util.named_values import Plain, limit_of
from schedule.verify.equivalence_report import Deviation, missing
from schedule.verify.observe import Named, Observation, as_real, largest_rms, rms
from schedule.verify.tolerances import Tolerance

_SPREAD = 0.25
"""Allowed RMS of a difference, relative to its allowed maximum. Over many elements the RMS of rounding is at most a
fourth of its maximum. A small error everywhere, such as the other GELU, exceeds this first."""
_MANY = 256

TRAINED = "output after training"
SECOND = "gradient of the gradient norm"


def compare(reference: Observation, other: Observation, tolerance: Tolerance) -> list[Deviation]:
    """Return all deviations of ``other`` from ``reference``, worst first."""
    found = [*_structure(reference, other)]
    for kind, ours, theirs in (
        ("output", reference.outputs, other.outputs),
        ("output without grad", reference.outputs_without_grad, other.outputs_without_grad),
        ("input after the call", reference.inputs_after, other.inputs_after),
        ("buffer", reference.buffers, other.buffers),
    ):
        found += _values(kind, ours, theirs, tolerance.forward)
    floor = tolerance.floor * largest_rms(reference.gradients)
    found += _values("gradient", reference.gradients, other.gradients, tolerance.gradient, floor)
    found += _input_gradients(reference, other, tolerance)
    found += _second_gradients(reference, other, tolerance)
    found += _updates(reference, other, tolerance)
    found += _trained(reference, other, tolerance)
    return sorted(found, key=lambda deviation: -deviation.excess)


def _structure(reference: Observation, other: Observation) -> Iterator[Deviation]:
    if reference.structure != other.structure:
        note = f"returns {other.structure} where the original returns {reference.structure}"
        yield missing("output", "", note)
    for name in sorted(reference.differentiable - other.differentiable):
        if name in other.outputs:
            yield missing("output", name, "is detached: no gradient flows through it, but one did in the original")
    for name in sorted(reference.trainable ^ other.trainable):
        side = "only in the original" if name in reference.trainable else "only after scheduling"
        yield missing("parameter", name, f"is trainable {side}")
    for name, state in reference.generators.items():
        if name in other.generators and not torch.equal(state, other.generators[name]):
            yield missing("random state", name, "differs after the call: other random numbers were drawn")


def _values(
    kind: str,
    ours: Mapping[str, torch.Tensor | Plain],
    theirs: Mapping[str, torch.Tensor | Plain],
    allowed: float,
    floor: float = 0.0,
) -> Iterator[Deviation]:
    for name, value in ours.items():
        if name not in theirs:
            yield missing(kind, name, "is missing")
            continue
        other = theirs[name]
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            yield _tensor(kind, name, value, other, allowed, floor)
        elif isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
            yield missing(kind, name, f"is {_described(other)}, in the original {_described(value)}")
        elif isinstance(value, float) and isinstance(other, float):
            yield _tensor(kind, name, torch.tensor(value), torch.tensor(other), allowed, floor)
        elif value != other:
            yield missing(kind, name, f"is {other!r}, in the original {value!r}")


def _described(value: torch.Tensor | Plain) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _input_gradients(reference: Observation, other: Observation, tolerance: Tolerance) -> Iterator[Deviation]:
    for name, ours, theirs in _none_as_zeros(reference.input_gradients, other.input_gradients):
        floor = tolerance.floor * 1e-3 * rms(ours)
        yield _tensor("input gradient", name, ours, theirs, tolerance.gradient, floor)


def _second_gradients(reference: Observation, other: Observation, tolerance: Tolerance) -> Iterator[Deviation]:
    if other.once_differentiable and not reference.once_differentiable:
        yield missing(SECOND, "", f"raises, the original's does not: {other.once_differentiable}")
    pairs = {
        name: (_where_finite(ours, ours), _where_finite(ours, theirs))
        for name, ours, theirs in _none_as_zeros(reference.second_gradients, other.second_gradients)
    }
    floor = tolerance.floor * largest_rms({name: ours for name, (ours, _) in pairs.items()})
    for name, (ours, theirs) in pairs.items():
        yield _tensor(SECOND, name, ours, theirs, tolerance.gradient, floor)


def _where_finite(original: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Set elements to zero that the ``original`` does not have: where its first gradient has no derivative.

    Whether they spread as NaN to other elements depends on which zeros a backward multiplies them with.
    """
    return torch.where(original.isfinite(), gradient, 0) if original.shape == gradient.shape else gradient


def _none_as_zeros(ours: Named, theirs: Named) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Pair gradients that no optimizer reads: none and zeros are equivalent there."""
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a is not None:
            yield name, a, torch.zeros_like(a) if b is None else b
        elif b is not None:
            yield name, torch.zeros_like(b), b


def _tensor(kind: str, name: str, ours: torch.Tensor, theirs: torch.Tensor, allowed: float, floor: float) -> Deviation:
    """Compare per element, relative to its size plus the RMS of its tensor, and by RMS over all elements."""
    if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
        before = f"{list(ours.shape)} {ours.dtype} {ours.device}"
        return missing(kind, name, f"is {list(theirs.shape)} {theirs.dtype} {theirs.device}, was {before}")
    if torch.equal(ours, theirs):
        return Deviation(kind, name, tolerance=allowed)
    if not ours.is_floating_point() and not ours.is_complex():
        count = int((ours != theirs).sum())
        return missing(kind, name, f"differs in {count} of {ours.numel()} entries of {ours.dtype}")
    ours, theirs = as_real(ours), as_real(theirs)
    limit = limit_of(ours.dtype)
    if not (_is_ordinary(ours, limit) and _is_ordinary(theirs, limit)):
        if not torch.equal(_class(ours, limit), _class(theirs, limit)):
            return missing(kind, name, "is NaN, infinite or masked in other elements")
        normal = ours.abs() < limit
        ours, theirs = ours[normal], theirs[normal]
    ours, theirs = ours.double(), theirs.double()
    difference = (ours - theirs).abs()
    if not bool((difference > 0).any()):
        return Deviation(kind, name, tolerance=allowed)
    size = ours.pow(2).mean().sqrt()
    scale = (ours.abs() + size).clamp_min(1e-300)
    excess = float((difference / (allowed * scale + floor)).max())
    if ours.numel() >= _MANY:
        spread = difference.pow(2).mean().sqrt() / (allowed * size + floor).clamp_min(1e-300)
        excess = max(excess, float(spread) / _SPREAD)
    return Deviation(kind, name, float(difference.max()), float((difference / scale).max()), allowed, excess)


def _is_ordinary(tensor: torch.Tensor, limit: float) -> bool:
    return bool(tensor.abs().max() < limit)  # False if one is NaN


def _class(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """Return 0 for ordinary values, ±1 for masked or infinite ones, 2 for NaN."""
    kinds = (tensor >= limit).int() - (tensor <= -limit).int()
    return torch.where(torch.isnan(tensor), 2, kinds)


def _updates(reference: Observation, other: Observation, tolerance: Tolerance) -> Iterator[Deviation]:
    """Compare updates by RMS: a weight frozen by mistake has a relative deviation of one."""
    floor = tolerance.floor_update * largest_rms(reference.updates)
    for name, ours in reference.updates.items():
        theirs = other.updates.get(name)
        if ours is None or theirs is None:
            if ours is not None:
                yield missing("update", name, "is missing")
            continue
        if ours.shape != theirs.shape:
            yield missing("update", name, f"is {list(theirs.shape)}, was {list(ours.shape)}")
            continue
        if torch.equal(ours, theirs):
            yield Deviation("update", name, tolerance=tolerance.update)
            continue
        difference, size = as_real(ours).double() - as_real(theirs).double(), rms(ours)
        deviation, largest = rms(difference), float(difference.abs().max()) if difference.numel() else 0.0
        relative = deviation / max(size, 1e-300) if deviation else 0.0
        excess = deviation / max(tolerance.update * size + floor, 1e-300)
        yield Deviation("update", name, largest, relative, tolerance.update, excess)


def _trained(reference: Observation, other: Observation, tolerance: Tolerance) -> Iterator[Deviation]:
    """Compare outputs after training, relative to their change by training, to find weights cached before it."""
    for name, ours in reference.outputs_trained.items():
        theirs, before = other.outputs_trained.get(name), reference.outputs.get(name)
        tensors = [value for value in (ours, theirs, before) if isinstance(value, torch.Tensor)]
        if len(tensors) < 3 or not tensors[0].is_floating_point() or len({t.shape for t in tensors}) > 1:
            continue
        limit = limit_of(tensors[0].dtype)
        normal = torch.stack([t.abs() < limit for t in tensors]).all(0)
        after, theirs_after, first = (t[normal].double() for t in tensors)
        if not after.numel():
            continue
        moved, apart = rms(after - first), rms(theirs_after - after)
        excess = apart / max(tolerance.update * moved + 10 * tolerance.forward * rms(after), 1e-300)
        largest = float((theirs_after - after).abs().max())
        relative = apart / max(moved, 1e-300) if apart else 0.0
        yield Deviation(TRAINED, name, largest, relative, tolerance.update, excess)
