"""Losses of preference optimization, on hidden states: log-probabilities of tokens without the full logits.

Each loss is a few operations on one number per sequence or token; what costs memory is the logits of the policy, which
`token_log_probs` and `sequence_log_probs` compute in chunks of rows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

from fused.checks import MismatchError, check_float, shape
from fused.linear_cross_entropy import linear_cross_entropy

Tensor = torch.Tensor
Kind = Literal["sigmoid", "hinge", "ipo"]


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute the log-probability of each target under ``softmax(F.linear(hidden, weight, bias) / temperature)``.

    Args:
        hidden, weight, bias, softcap, chunk_rows: as in `linear_cross_entropy`.
        targets: ``[...]``, integers from 0 to vocab − 1, or `ignore_index`. They belong to the hidden states at the
            same position: for a language model, the tokens that follow.
        ignore_index: targets of which the result is 0, with no gradient.
        temperature: above 0; the logits are divided by it. None other than 1 is possible with `softcap`.

    Returns:
        ``[...]``; float32 for 16-bit inputs. Saves its inputs; the backward pass computes the logits of each chunk
        again.

    Raises:
        TypeError, ValueError, IndexError: as `linear_cross_entropy`, also for a temperature that is not possible.
    """
    op = "token_log_probs"
    if not temperature > 0.0 or (softcap is not None and temperature != 1.0):
        raise ValueError(f"{op}: temperature must be above 0, and 1 with a soft cap, got {temperature}")
    if temperature != 1.0:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    return -linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias,
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="none",
        chunk_rows=chunk_rows,
    )


def sequence_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    average: bool = False,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute the log-probability of each sequence of targets: the sum of `token_log_probs` over the last dimension.

    Args:
        hidden, weight, targets, bias, ignore_index, temperature, softcap, chunk_rows: as in `token_log_probs`, with
            targets ``[..., tokens]``.
        average: divide by the number of targets other than `ignore_index`, for losses that do not depend on the length
            (ORPO, SimPO, IPO). A sequence without such targets has the result 0.

    Returns:
        ``[...]``; float32 for 16-bit inputs.

    Raises:
        TypeError, ValueError, IndexError: as `token_log_probs`.
    """
    of_tokens = token_log_probs(
        hidden,
        weight,
        targets,
        bias,
        ignore_index=ignore_index,
        temperature=temperature,
        softcap=softcap,
        chunk_rows=chunk_rows,
    )
    total = of_tokens.sum(-1)
    return total / (targets != ignore_index).sum(-1).clamp(min=1) if average else total


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: Kind = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the mean loss of direct preference optimization.

    With z the difference of the log-ratios, ``(chosen − reference_chosen) − (rejected − reference_rejected)``, the loss
    of a pair is ``−(1 − ε)·log σ(β·z) − ε·log σ(−β·z)`` ("sigmoid"), ``max(0, 1 − β·z)`` ("hinge"), or
    ``(z − 1 / (2·β))²`` ("ipo", of averages over tokens).

    Args:
        chosen, rejected: ``[...]``, log-probabilities of sequences under the policy, from `sequence_log_probs`.
        reference_chosen, reference_rejected: ``[...]``, the same under the reference model; no gradient.
        beta: weight of the log-ratios, above 0.
        kind: the form of the loss.
        label_smoothing: ε, the probability that a preference is the wrong way round, from 0 to below 0.5; only for
            "sigmoid".

    Returns:
        A number.

    Raises:
        TypeError: if an argument is no floating-point tensor.
        ValueError: for tensors of different shapes, settings out of range, or another kind.

    Source: Rafailov et al. 2023; conservative DPO, Mitchell 2023; hinge, Zhao et al. 2023; IPO, Azar et al. 2023.
    """
    op = "dpo_loss"
    named = {"chosen": chosen, "rejected": rejected}
    named |= {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    _check(op, named, beta)
    if not 0.0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(f"{op}: label_smoothing must be from 0 to below 0.5, 0 for {kind!r}, got {label_smoothing}")
    z = (chosen - reference_chosen.detach()) - (rejected - reference_rejected.detach())
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * z)
        if label_smoothing:
            losses = losses - label_smoothing * F.logsigmoid(-beta * z)
    elif kind == "hinge":
        losses = torch.relu(1 - beta * z)
    elif kind == "ipo":
        losses = (z - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"{op}: kind must be 'sigmoid', 'hinge' or 'ipo', got {kind!r}")
    return losses.mean()


def simpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> Tensor:
    """Compute the mean loss of SimPO, ``−log σ(β·(chosen − rejected) − margin)``: no reference model.

    Args:
        chosen, rejected: ``[...]``, averaged log-probabilities, from ``sequence_log_probs(…, average=True)``.
        beta: weight of the difference, above 0.
        margin: γ, the wanted difference times `beta`. (The paper's ratio γ/β is 0.5 for these defaults.)

    Returns:
        A number.

    Raises:
        TypeError, ValueError: as `dpo_loss`.

    Source: Meng, Xia and Chen 2024.
    """
    _check("simpo_loss", {"chosen": chosen, "rejected": rejected}, beta)
    return -F.logsigmoid(beta * (chosen - rejected) - margin).mean()


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Compute the mean odds-ratio term of ORPO, ``−β·log σ(log odds(chosen) − log odds(rejected))``.

    The whole loss is the sum of this and the cross entropy of the chosen sequences.

    Args:
        chosen, rejected: ``[...]``, averaged log-probabilities below 0, from ``sequence_log_probs(…, average=True)``.
        beta: λ, the weight of the term, above 0.

    Returns:
        A number.

    Raises:
        TypeError, ValueError: as `dpo_loss`.

    Source: Hong, Lee and Thorne 2024.
    """
    _check("orpo_loss", {"chosen": chosen, "rejected": rejected}, beta)
    log_odds = (chosen - _log_complement(chosen)) - (rejected - _log_complement(rejected))
    return -beta * F.logsigmoid(log_odds).mean()


def _log_complement(log_p: Tensor) -> Tensor:
    """Compute log(1 − p) of log p < 0, without cancellation on either side."""
    near = log_p > -math.log(2)
    small, large = torch.where(near, log_p, -1.0), torch.where(near, -1.0, log_p)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


def kto_loss(
    log_probs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    divergence: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute the mean loss of KTO, from examples that are each desirable or not.

    With the log-ratio ``r = log_probs − reference``, the loss is ``desirable_weight·(1 − σ(β·(r − divergence)))`` of a
    desirable example, and ``undesirable_weight·(1 − σ(β·(divergence − r)))`` of another.

    Args:
        log_probs, reference: ``[...]``, log-probabilities of sequences under the policy and the reference model, from
            `sequence_log_probs`; no gradient for the reference.
        desirable: ``[...]``, boolean.
        divergence: estimate of the policy's divergence from the reference, such as the mean log-ratio of mismatched
            prompts and completions; a negative one counts as 0; no gradient.
        beta: weight of the log-ratio, above 0.
        desirable_weight, undesirable_weight: weights of the two kinds of examples.

    Returns:
        A number.

    Raises:
        TypeError: as `dpo_loss`, also if `desirable` is not boolean.
        ValueError: as `dpo_loss`.

    Source: Ethayarajh et al. 2024.
    """
    op = "kto_loss"
    _check(op, {"log_probs": log_probs, "reference": reference}, beta)
    if desirable.dtype is not torch.bool:
        raise TypeError(f"{op}: desirable must be boolean, got {desirable.dtype}")
    _check_shape(op, "desirable", desirable, log_probs)
    origin = torch.as_tensor(divergence, dtype=log_probs.dtype, device=log_probs.device).detach().clamp(min=0)
    gain = beta * (log_probs - reference.detach() - origin)
    wanted = desirable_weight * torch.sigmoid(-gain)
    return torch.where(desirable, wanted, undesirable_weight * torch.sigmoid(gain)).mean()


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    clip: float = 0.2,
    clip_above: float | None = None,
    beta: float = 0.0,
    by_sequence: bool = True,
) -> Tensor:
    """Compute the clipped policy loss of GRPO, with a penalty for the divergence from a reference model.

    With the ratio ``ρ = exp(log_probs − old)`` and ``δ = reference − log_probs``, the loss of a token is
    ``−min(ρ·A, clamp(ρ, 1 − clip, 1 + clip_above)·A) + β·(exp(δ) − δ − 1)``.

    Args:
        log_probs: ``[..., tokens]``, from `token_log_probs`.
        advantages: A, ``[...]``, one for each sequence; no gradient.
        old: ``[..., tokens]``, log-probabilities under the policy that drew the tokens; None for this policy.
        reference: ``[..., tokens]``, log-probabilities under the reference model; needed for `beta` above 0.
        mask: ``[..., tokens]``, boolean, True for the tokens that count; None for all.
        clip, clip_above: bounds of the ratio below and above 1; the same by default.
        beta: weight of the penalty, 0 or more.
        by_sequence: whether each sequence weighs the same (GRPO), or each token (DAPO).

    Returns:
        A number.

    Raises:
        TypeError: if an argument is no floating-point tensor, or the mask not boolean.
        ValueError: for shapes that do not fit, or settings out of range.

    Source: Shao et al. 2024 (DeepSeekMath); Yu et al. 2025 (DAPO) for `clip_above` and the mean over tokens.
    """
    op = "grpo_loss"
    if not beta >= 0.0 or (beta and reference is None):
        raise ValueError(f"{op}: beta must be 0 or more, and needs the reference's log-probabilities, got {beta}")
    upper = clip if clip_above is None else clip_above
    if not 0.0 <= clip <= 1.0 or not upper >= 0.0:
        raise ValueError(f"{op}: clip must be from 0 to 1 and clip_above 0 or more, got {clip} and {clip_above}")
    given = {"old": old, "reference": reference}
    _check(op, {"log_probs": log_probs, **{name: one for name, one in given.items() if one is not None}}, 1.0)
    check_float(op, "advantages", advantages)
    _check_shape(op, "advantages", advantages.unsqueeze(-1), log_probs[..., :1])
    old = log_probs.detach() if old is None else old.detach()
    ratio, advantage = torch.exp(log_probs - old), advantages.detach().unsqueeze(-1)
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + upper) * advantage)
    if beta and reference is not None:
        delta = reference.detach() - log_probs
        losses = losses + beta * (torch.expm1(delta) - delta)
    if mask is None:
        return losses.mean()
    if mask.dtype is not torch.bool:
        raise TypeError(f"{op}: mask must be boolean, got {mask.dtype}")
    _check_shape(op, "mask", mask, log_probs)
    losses = torch.where(mask, losses, 0.0)
    if by_sequence:
        return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    return losses.sum() / mask.sum().clamp(min=1)


def _check(op: str, named: dict[str, Tensor], beta: float) -> None:
    """Check that tensors are floating point and of one shape, and that beta is above 0."""
    first = next(iter(named.values()))
    for name, tensor in named.items():
        check_float(op, name, tensor)
        _check_shape(op, name, tensor, first)
    if not beta > 0.0:
        raise ValueError(f"{op}: beta must be above 0, got {beta}")


def _check_shape(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise MismatchError(f"{op}: {name} must have the shape {shape(like)} of the others, got {shape(tensor)}")
