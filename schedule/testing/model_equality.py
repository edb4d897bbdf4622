"""Equivalence of two models."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedule.verify import Tolerance, equivalent


def assert_equivalent(
    model: nn.Module,
    twin: nn.Module,
    batch: Any,
    steps: int = 5,
    *,
    tolerance: Tolerance | None = None,
    training: bool = True,
) -> None:
    """Assert that ``twin`` computes and trains like ``model``.

    Compared are outputs, gradients of parameters and floating inputs, buffers, random state, and the parameter updates
    of ``steps`` steps of AdamW, in training and eval mode, on ``batch`` and on batches of other sizes made from it.
    Both models are left unchanged. See :func:`schedule.equivalent`.

    Args:
        model: the reference.
        twin: a model with the same parameter names and values.
        batch: mapping (called by keyword), tuple or list (by position), or a single tensor.
        steps: optimizer steps; 0 leaves updates out.
        tolerance: in place of the one for the model's dtype.
        training: False to compare in eval mode and without gradients only.

    Raises:
        AssertionError: they differ; the message names the case, the worst tensor and its deviation.
    """
    __tracebackhide__ = True
    report = equivalent(model, twin, batch, steps, tolerance=tolerance, training=training)
    if not report:
        raise AssertionError(f"the models differ:\n{report}")
