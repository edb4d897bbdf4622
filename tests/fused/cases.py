"""The table of fused ops for `test_quality.py`: one :class:`Case` for each way an op is called.

A family adds `tests/fused/cases_<family>.py` with a list ``CASES``; every quality line is then tested for it, on every
backend. Example::

    CASES = [
        Case(
            "bias_gelu",
            op=fused.bias_gelu,
            eager=lambda x, bias: F.gelu(x + bias, approximate="tanh"),
            inputs=lambda rows, columns: (normal(2, rows, columns), normal(columns)),
            saved=lambda x, bias: nbytes(x, bias),
            sums=(1,),
        )
    ]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Tensor = torch.Tensor
Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One op with its other arguments chosen, beside the expression in plain torch that it stands for.

    Attributes:
        name: unique, as the tests print it.
        op: a function of tensors alone; returns a tensor or a tuple of them.
        eager: the same as modeling code writes it, with its casts; in float64 it is the exact result.
        inputs: ``inputs(rows, columns)`` gives the tensors, floating-point ones in float64; called after seeding.
            It must work for any rows from 0 and any columns from 1 (an op that needs an even size doubles them).
        saved: ``saved(*inputs)``, the least bytes that a backward pass needs of these inputs.
        frozen: positions of floating-point inputs that get no gradient (cos and sin, say).
        sums: positions of inputs whose gradient is a sum over rows: in float32 it may be as far off as eager's.
        random: draws random numbers; both sides are then called under one seed.
        special: whether NaN and infinities in the first input come out as in eager.
        triton: whether there are Triton kernels.
        long: the compiler takes long over it, and another case is much like it: compiled, it is for the long tests.
    """

    name: str
    op: Function
    eager: Function
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    saved: Callable[..., int]
    frozen: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    random: bool = False
    special: bool = True
    triton: bool = True
    long: bool = False

    def __str__(self) -> str:
        return self.name

    def differentiable(self, inputs: tuple[Tensor, ...]) -> list[int]:
        """Positions of the inputs that get a gradient."""
        return [n for n, tensor in enumerate(inputs) if tensor.is_floating_point() and n not in self.frozen]


def normal(*shape: int, spread: float = 2.0) -> Tensor:
    """Normally distributed float64 numbers."""
    return spread * torch.randn(shape, dtype=torch.float64)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def all_cases() -> list[Case]:
    """The cases of every family."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))
    return [case for module in modules for case in importlib.import_module(f"tests.fused.{module}").CASES]
