"""The softmax of attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, Tensor, normal

SCALE = 1 / math.sqrt(80)


def _weights(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """As HuggingFace's eager attention: float32 softmax, cast back."""
    return F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def _eager(x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = x * SCALE
    return _weights(scores if mask is None else scores + mask, x.dtype)


def _hidden(x: Tensor) -> Tensor:
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)


def _eager_causal(x: Tensor) -> Tensor:
    return _weights((x * SCALE).masked_fill(_hidden(x), -torch.inf), x.dtype)


def _eager_boolean(x: Tensor, mask: Tensor) -> Tensor:
    return _weights((x * SCALE).masked_fill(mask, -torch.inf), x.dtype)


def _eager_sink(x: Tensor, sink: Tensor) -> Tensor:
    column = sink.reshape(-1, 1, 1).expand(*x.shape[:-1], 1)
    return _weights(torch.cat([x * SCALE, column], -1), x.dtype)[..., :-1]


def _kept(x: Tensor) -> int:
    """The probabilities; 16-bit ones with the byte that brings their gradient within 1.1 × eager's error."""
    return x.numel() * (x.element_size() + (x.element_size() == 2))


def _scores(rows: int, columns: int) -> Tensor:
    return normal(2, 3, rows, columns, spread=3)


def _some(rows: int, columns: int) -> Tensor:
    """A random mask [2, 1, rows, columns] that leaves every row a key."""
    mask = torch.rand(2, 1, rows, columns) < 0.4
    mask[..., 0] = False
    return mask


CASES = [
    Case(
        "scaled_masked_softmax",
        op=lambda x: fused.scaled_masked_softmax(x, None, SCALE),
        eager=_eager,
        inputs=lambda rows, columns: (_scores(rows, columns),),
        saved=_kept,
    ),
    Case(
        "scaled_masked_softmax additive",
        op=lambda x, mask: fused.scaled_masked_softmax(x, mask, SCALE),
        eager=_eager,
        inputs=lambda rows, columns: (_scores(rows, columns), normal(1, 3, rows, columns)),
        saved=lambda x, mask: _kept(x),
        sums=(1,),
    ),
    Case(
        "scaled_masked_softmax boolean",
        op=lambda x, mask: fused.scaled_masked_softmax(x, mask, SCALE),
        eager=_eager_boolean,
        inputs=lambda rows, columns: (_scores(rows, columns), _some(rows, columns)),
        saved=lambda x, mask: _kept(x),
        special=False,  # what is hidden is 0 whatever else the row holds
    ),
    Case(
        "scaled_masked_softmax filled",
        op=lambda x, mask: fused.scaled_masked_softmax(x, mask, SCALE, fill=-torch.inf),
        eager=_eager_boolean,
        inputs=lambda rows, columns: (_scores(rows, columns), _some(rows, columns)),
        saved=lambda x, mask: _kept(x) + mask.numel(),
    ),
    Case(
        "scaled_masked_softmax causal",
        op=lambda x: fused.scaled_masked_softmax(x, None, SCALE, causal=True),
        eager=_eager_causal,
        # As many keys as queries or more: every query sees one.
        inputs=lambda rows, columns: (_scores(min(rows, columns), columns),),
        saved=_kept,
        special=False,  # what is hidden is 0 whatever else the row holds
    ),
    Case(
        "scaled_masked_softmax sink",
        op=lambda x, sink: fused.scaled_masked_softmax(x, None, SCALE, sink=sink),
        eager=_eager_sink,
        inputs=lambda rows, columns: (_scores(rows, columns), normal(3)),
        saved=lambda x, sink: _kept(x) + 4 * x[..., :1].numel(),
        sums=(1,),
    ),
    Case(
        "scaled_masked_softmax dropout",
        op=lambda x: fused.scaled_masked_softmax(x, None, SCALE, dropout_p=0.5),
        eager=lambda x: F.dropout(_eager(x), 0.5),
        inputs=lambda rows, columns: (_scores(rows, columns),),
        saved=_kept,
        random=True,
    ),
    Case(
        "ScaledSoftmax",
        op=lambda x: fused.ScaledSoftmax.apply(x, SCALE),
        eager=_eager,
        inputs=lambda rows, columns: (_scores(rows, columns),),
        saved=_kept,
    ),
    Case(
        "ScaledMaskedSoftmax",
        op=lambda x, mask: fused.ScaledMaskedSoftmax.apply(x, mask, SCALE),
        eager=_eager_boolean,
        inputs=lambda rows, columns: (_scores(rows, columns), _some(rows, columns)),
        saved=lambda x, mask: _kept(x),
        special=False,  # what is hidden is 0 whatever else the row holds
    ),
    Case(
        "ScaledUpperTriangMaskedSoftmax",
        op=lambda x: fused.ScaledUpperTriangMaskedSoftmax.apply(x, SCALE),
        eager=_eager_causal,
        inputs=lambda rows, columns: (_scores(columns, columns),),
        saved=_kept,
    ),
]
