"""Divergences of a student from a teacher, on logits and on hidden states."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, nbytes, normal

Tensor = torch.Tensor
TEMPERATURE, VOCAB = 1.5, 7


def written_out(student: Tensor, teacher: Tensor, kind: str, beta: float, temperature: float = 1.0) -> Tensor:
    """As trainers write it, one number a row."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q, log_p = (torch.log_softmax(each.to(wide) / temperature, -1) for each in (student, teacher))
    divergence = functools.partial(F.kl_div, log_target=True, reduction="none")
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if beta in (0.0, 1.0):
        return (divergence(log_q, log_p) if beta == 0.0 else divergence(log_p, log_q)).sum(-1)
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    return (beta * divergence(log_m, log_p) + (1 - beta) * divergence(log_m, log_q)).sum(-1)


def _of_logits(name: str, kind: str, beta: float, long: bool) -> Case:
    settings = {"kind": kind, "beta": beta, "temperature": TEMPERATURE}
    return Case(
        f"distillation {name}",
        op=lambda student, teacher: fused.distillation_loss(student, teacher, reduction="none", **settings),
        eager=lambda student, teacher: written_out(student, teacher, **settings),
        inputs=lambda rows, columns: (normal(rows, columns + 1), normal(rows, columns + 1)),
        saved=nbytes,
        frozen=(1,),
        sums=(0,),
        special=False,
        triton=False,
        long=long,
    )


CASES = [
    _of_logits("forward", "jsd", 0.0, True),
    _of_logits("reverse", "jsd", 1.0, True),
    _of_logits("jsd", "jsd", 0.3, False),
    _of_logits("tvd", "tvd", 0.5, True),
    Case(
        "linear_distillation",
        op=lambda hidden, weight, bias, other, teacher: fused.linear_distillation_loss(
            hidden, weight, other, teacher, bias=bias, chunk_rows=64, beta=0.3
        ),
        eager=lambda hidden, weight, bias, other, teacher: written_out(
            F.linear(hidden, weight, bias), F.linear(other, teacher), "jsd", 0.3
        ).mean(),
        inputs=lambda rows, columns: (
            normal(rows, columns, spread=0.3),
            normal(VOCAB, columns, spread=0.3),
            normal(VOCAB, spread=0.3),
            normal(rows, 5, spread=0.3),
            normal(VOCAB, 5, spread=0.3),
        ),
        saved=nbytes,
        frozen=(3, 4),
        sums=(0, 1, 2),
        special=False,
        triton=False,
    ),
]
