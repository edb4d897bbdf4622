"""Bias + dropout + residual."""

from __future__ import annotations

import torch.nn.functional as F

import fused
from tests.fused.cases import Case, Tensor, normal

P = 0.25


def _operands(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, rows, columns), normal(columns), normal(2, rows, columns)


def _mask(x: Tensor, *others: Tensor) -> int:
    return x.numel()


CASES = [
    Case(
        "bias_dropout",
        op=lambda x, bias: fused.bias_dropout(x, bias, P),
        eager=lambda x, bias: F.dropout(x + bias, P),
        inputs=lambda rows, columns: _operands(rows, columns)[:2],
        saved=_mask,
        sums=(1,),
        random=True,
    ),
    Case(
        "bias_dropout_add",
        op=lambda x, bias, residual: fused.bias_dropout_add(x, bias, residual, P),
        eager=lambda x, bias, residual: residual + F.dropout(x + bias, P),
        inputs=_operands,
        saved=_mask,
        sums=(1,),
        random=True,
    ),
    Case(
        "bias_dropout_add no bias",
        op=lambda x, residual: fused.bias_dropout_add(x, None, residual, P),
        eager=lambda x, residual: residual + F.dropout(x, P),
        inputs=lambda rows, columns: _operands(rows, columns)[::2],
        saved=_mask,
        random=True,
    ),
    Case(
        "bias_dropout_add evaluation",
        op=lambda x, bias, residual: fused.bias_dropout_add(x, bias, residual, P, training=False),
        eager=lambda x, bias, residual: residual + (x + bias),
        inputs=_operands,
        saved=lambda *inputs: 0,
        sums=(1,),
    ),
    Case(
        "bias_dropout_add all dropped",
        op=lambda x, bias, residual: fused.bias_dropout_add(x, bias, residual, 1.0),
        eager=lambda x, bias, residual: residual + F.dropout(x + bias, 1.0),
        inputs=_operands,
        saved=_mask,
        sums=(1,),
    ),
]
