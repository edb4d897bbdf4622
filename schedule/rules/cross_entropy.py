"""Cross entropy of logits, without a float32 copy of them.

::

    before:  logits = self.lm_head(hidden)
             loss = F.cross_entropy(logits.float().view(-1, vocab), labels.view(-1))
    after:   logits = self.lm_head(hidden)
             loss = fused.cross_entropy(logits.flatten(0, -2), labels.view(-1))

Operations on the labels before the loss (padding, shifting) stay as they are, and so do operations on the loss
(transformers divides a sum by ``num_items_in_batch``). The logits may be used elsewhere too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
from schedule.patterns import GraphMatch
from schedule.rules.casts import Value
from schedule.rules.loss_patterns import (
    class_weights,
    logits_input,
    loss_check,
    loss_options,
    row_losses,
    rows_of,
)
from schedule.rules.rule import DEFAULT, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "loss"


def cross_entropy(logits: Value, targets: Value) -> Value:
    return row_losses(logits_input())


def weighted_cross_entropy(logits: Value, targets: Value, class_weight: Value) -> Value:
    return row_losses(logits_input(), class_weights())


def _extra_check(graph_match: GraphMatch) -> str:
    return loss_check(graph_match, spec_of(graph_match.inputs["logits"]))


def _profitability(graph_match: GraphMatch) -> str:
    return small("cross_entropy", spec_of(graph_match.inputs["logits"]))


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    args = (rows_of(graph, inputs["logits"], inputs, scalars), inputs["targets"])
    return graph.call_function(fused.cross_entropy, args, loss_options(inputs, scalars))


# -- the rule -----------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """Widen to float32 as models do for a loss, but keep float64.

    Rules leave float64 logits alone if a model casts them to float32.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a causal language model as in transformers."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(wide(logits).view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a causal language model as in older code, with shifted logits."""
    logits = wide(logits)[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.shape[-1]), labels[..., 1:].contiguous().view(-1))


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a masked language model, as a sum over a given number of tokens."""
    rows = wide(logits.reshape(-1, logits.shape[-1]))
    return F.cross_entropy(rows, labels.flatten(), reduction="sum") / 7


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten().clamp(0), ignore_index=2, label_smoothing=0.1)


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).transpose(1, 2), labels, reduction="none")


def logits_and_labels(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return logits, and labels with the first one ignored."""
    labels = torch.randint(3, shape[-1], shape[:-1])
    labels.view(-1)[0] = -100
    return torch.randn(shape, dtype=dtype) * 3, labels


def soft(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(labels.clamp(0), logits.shape[-1]).flatten(0, 1).float())


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute a loss with a weight for each class."""
    rows = wide(logits).flatten(0, 1)
    weight = torch.arange(1, CLASSES + 1, dtype=rows.dtype) / 4
    return F.cross_entropy(rows, labels.flatten(), weight=weight, label_smoothing=0.1)


def narrowed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.bfloat16().flatten(0, 1), labels.flatten())


def classes_in_the_middle(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.clamp(0, logits.shape[1] - 1)[:, :1].expand(-1, logits.shape[-1]))


CLASSES = 9
FORMS = (causal, shifted, masked, smoothed, classes_second, weighted)
REFUSED = (soft, narrowed, classes_in_the_middle)

CROSS_ENTROPY = register_rule(
    Rule(
        name="cross_entropy",
        family=FAMILY,
        patterns=(cross_entropy, weighted_cross_entropy),
        build=_build,
        proof=Proof(FORMS, logits_and_labels, ((2, 6, CLASSES), (3, 4, CLASSES), (1, 2, CLASSES)), refused=REFUSED),
        summary="fused.cross_entropy(logits, targets)",
        extra_check=_extra_check,
        profitability=_profitability,
        sets=DEFAULT,
    )
)
