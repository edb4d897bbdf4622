"""Reference formulas of the divergences of a student's distribution q from a teacher's p, of one row each.

With m = β·p + (1 − β)·q, the loss of "jsd" is β·KL(p‖m) + (1 − β)·KL(q‖m), of β = 0 the forward KL(p‖q), of β = 1 the
reverse KL(q‖p); that of "tvd" is ½·Σ|p − q|. A loss L(q) with derivative s of q has the gradient q·(s − Σ q·s) of the
logits: s = (1 − β)·log(q / m) for "jsd", log(q / p) for the reverse KL, ½·sign(q − p) for "tvd"; that of the forward KL
is q − p. What a probability of 0 is multiplied with counts as 0.
"""

from __future__ import annotations

import math

import torch

from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import computed_first, is_compiled, row_by_row

Tensor = torch.Tensor


def divergence(student: Tensor, teacher: Tensor, *, kind: str, beta: float, temperature: float) -> Tensor:
    """Return the loss of each row, ``[...]``, in the compute dtype, from logits ``[..., vocab]``."""
    log_q, log_p = _logs(student, teacher, temperature)
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if beta == 0.0:
        return _kl(log_p, log_q)
    if beta == 1.0:
        return _kl(log_q, log_p)
    log_m = _mixture(log_q, log_p, beta)
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def divergence_backward(
    student: Tensor, teacher: Tensor, g: Tensor, *, kind: str, beta: float, temperature: float
) -> Tensor:
    """Return the gradient of the student's logits for the gradient g of the losses, ``[...]``."""
    log_q, log_p = _logs(student, teacher, temperature)
    q = log_q.exp()
    if kind == "jsd" and beta == 0.0:
        slope = q - log_p.exp()
    else:
        if kind == "tvd":
            of_q = torch.sign(q - log_p.exp()) / 2
        else:
            log_m = log_p if beta == 1.0 else _mixture(log_q, log_p, beta)
            of_q = (log_q - log_m) * (1.0 if beta == 1.0 else 1 - beta)
        weighted = torch.where(q == 0, 0.0, q * of_q)
        slope = weighted - q * weighted.sum(-1, keepdim=True)
    return (slope * (g.to(q.dtype) / temperature).unsqueeze(-1)).to(student.dtype)


def _logs(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(compute_dtype(student.dtype), compute_dtype(teacher.dtype))
    scaled = (logits.to(compute) / temperature for logits in (student, teacher))
    log_q, log_p = (_log_softmax(logits) for logits in scaled)
    return log_q, log_p


def _log_softmax(logits: Tensor) -> Tensor:
    if not is_compiled() or not logits.is_cpu or logits.requires_grad:
        return torch.log_softmax(logits, -1)
    below = logits - logits.amax(-1, keepdim=True)
    total = below.exp().sum(-1, keepdim=True)
    # Once for each row, in one loop with its sums; else the compiler computes the logarithm at every column.
    total = torch.where(row_by_row(total > 0), total.log(), total)
    return below - computed_first(total)


def _mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Compute Σ a·log(a / b)."""
    a = log_a.exp()
    return torch.where(a == 0, 0.0, a * (log_a - log_b)).sum(-1)
