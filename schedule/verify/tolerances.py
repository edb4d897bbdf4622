"""Allowed deviations between two equivalent computations, per dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from schedule.util.errors import NotApplicable


@dataclass(frozen=True)
class Tolerance:
    """Allowed relative deviations, each many times the measured rounding of a reordered sum.

    Attributes:
        forward: outputs and buffers, per element, relative to that element's size plus its tensor's RMS.
        gradient: the same for gradients, which sum over batch and sequence and so round more.
        update: parameter updates, by RMS over a parameter, relative to the update's own RMS.
        floor: gradients below this fraction of the model's largest (by RMS) count as rounding. The key bias
            of an attention has a mathematically zero gradient; two correct programs agree on none of its
            digits.
        floor_update: the same for updates: ``floor / adam_eps`` is the part rounding can move.
        learning_rate: large enough that a step is not lost when a weight of size one is rounded.
        adam_eps: AdamW's ``eps`` as a fraction of the model's largest gradient RMS; see ``observe._train``.
    """

    forward: float
    gradient: float
    update: float
    floor: float
    floor_update: float
    learning_rate: float
    adam_eps: float


# Measured: eager against SDPA attention on GPT-2, BERT and Llama of 2 to 12 layers, as they are and perturbed.
# Each row leaves a factor of ten (16 bits: two to three) over the largest deviation: 3.5e-6 and 2.2e-5 in
# float32, 5e-2 and 2e-1 in bfloat16. The wrong GELU in one layer shows at 4e-4 and 2e-3.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-9, 1e-5, 1e-13, 1e-6, 1e-3, 1e-6),
    # Unit roundoff 6e-8; a few hundred of them for outputs, more where gradients cancel.
    torch.float32: Tolerance(5e-5, 2.5e-4, 1e-2, 2e-6, 5e-3, 1e-3, 1e-3),
    # 10 bits of mantissa: unit roundoff 5e-4.
    torch.float16: Tolerance(2e-2, 6e-2, 1e-1, 2e-3, 5e-2, 1e-2, 3e-2),
    # 7 bits: unit roundoff 4e-3, and a fused op that keeps fp32 inside is *better* than what it replaces.
    torch.bfloat16: Tolerance(1.5e-1, 5e-1, 3e-1, 1e-2, 5e-2, 1e-2, 3e-1),
}

_COARSENESS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def coarsest_dtype(model: nn.Module) -> torch.dtype:
    """Return the least precise floating dtype in use by ``model``: parameters, buffers, autocast and TF32.

    One coarse layer rounds everything after it, so bfloat16's row also applies to a float32 output of a bfloat16
    model.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    dtypes = {t.dtype for t in tensors}
    devices = {t.device.type for t in tensors} or {"cpu"}
    dtypes |= {torch.get_autocast_dtype(kind) for kind in devices if torch.is_autocast_enabled(kind)}
    if "cuda" in devices and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtypes.add(torch.float16)  # TF32 keeps float16's mantissa
    return next((dtype for dtype in _COARSENESS if dtype in dtypes), torch.float32)


def tolerance_for(model: nn.Module, given: Tolerance | float | None = None) -> Tolerance:
    """Return the row of :data:`TOLERANCES` for ``model``, or what is given in its place.

    Args:
        model: the reference.
        given: a number is the tolerance of outputs; those of gradients and updates change by the same factor.

    Raises:
        NotApplicable: it is neither a Tolerance nor a number above 0.
    """
    row = TOLERANCES[coarsest_dtype(model)]
    if given is None or isinstance(given, Tolerance):
        return given or row
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise NotApplicable(
            f"a tolerance is a number above 0, not {given!r}", asked="verify", fix="tolerance=1e-3, say"
        )
    factor = given / row.forward
    return replace(row, forward=given, gradient=row.gradient * factor, update=row.update * factor)
