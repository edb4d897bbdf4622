"""Gated residual sums: a gate for each sample, of the features and of the channels."""

from __future__ import annotations

import fused
from tests.fused.cases import Case, Tensor, nbytes, normal


def eager_gated_residual(residual: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """As the blocks of a diffusion transformer write it."""
    return residual + gate * value


def _case(name: str, shape: tuple[int, ...], gate: tuple[int, ...], *, long: bool = False) -> Case:
    """A case with -1 for the rows and -2 for the columns."""

    def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
        sizes = {-1: rows, -2: columns}
        whole, part = ([sizes.get(size, size) for size in each] for each in (shape, gate))
        return normal(*whole), normal(*whole), normal(*part)

    return Case(
        f"gated_residual{name}",
        op=fused.gated_residual,
        eager=eager_gated_residual,
        inputs=inputs,
        saved=lambda residual, value, gate: nbytes(value, gate),
        sums=(2,),
        long=long,
    )


CASES = [
    _case("", (2, -1, -2), (2, 1, -2)),
    _case(" of features", (2, -1, -2), (-2,), long=True),
    _case(" of channels", (2, -1, 3, -2), (-1, 1, 1), long=True),
]
