"""Proof of a rule: outputs and gradients of each form of the construct compared with its rewritten graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fused
from schedule.capture import Call, compiled, expand, record, specialize
from schedule.rules.applying import find_all, rewritten
from schedule.rules.rule import Form, Proof, Rule

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
SLACK = 1.1
_SAMPLES, _MORE_SAMPLES = 8, 64
_FEW_JUMPS = 4.0  # times the allowed error: as much may be chance in the smaller sample
TOLERANCES = {torch.float64: (1e-12, 1e-12), torch.float32: (1.3e-6, 1e-6)}


@dataclass(frozen=True)
class ProofFailure:
    """Failed form in the proof of a rule.

    Attributes:
        rule: the name of the rule.
        form: the number of the form, or ``"refused 0"``.
        case: shape and dtype.
        problem: what is wrong.
    """

    rule: str
    form: str
    case: str
    problem: str

    def __str__(self) -> str:
        return f"{self.rule}, form {self.form}, {self.case}: {self.problem}"


class _Module(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.form(*tensors)


def prove(rule: Rule) -> list[ProofFailure]:
    """Compare every form in the proof of ``rule`` with its rewritten graph.

    No failures means proved. For each form, shape and dtype: the rule must match, and outputs and the gradients of all
    floating inputs must agree under one seed, so that dropout must draw the same numbers. The graph is made at the
    first shape of each number of dimensions only and must hold at the others.

    Raises:
        ValueError: the rule has no proof.
    """
    return list(failures_of(rule))


def failures_of(rule: Rule) -> Iterator[ProofFailure]:
    """Yield each failure of the proof of ``rule`` as soon as it is found; see :func:`prove`."""
    proof = rule.proof
    if proof is None:
        raise ValueError(f"the rule {rule.name} has no proof: give it schedule.rules.Proof(...)")
    for number, form in enumerate(proof.forms):
        for dtype in proof.dtypes:
            graph = _rewritten_by_rank(rule, form, proof, dtype)
            if isinstance(graph, str):
                yield ProofFailure(rule.name, str(number), str(dtype), graph)
                continue
            compare = _compare_rounding if dtype in _SIXTEEN_BITS else _compare
            for shapes, problem in compare(form, graph, proof, dtype):
                yield ProofFailure(rule.name, str(number), f"{dtype} {shapes}", problem)
    for number, form in enumerate(proof.refused):
        dtype = torch.float32
        if not isinstance(_rewritten(rule, form, proof.inputs(proof.shapes[0], dtype)), str):
            yield ProofFailure(rule.name, f"refused {number}", str(dtype), "the rule matches it")


def _rewritten_by_rank(rule: Rule, form: Form, proof: Proof, dtype: torch.dtype) -> Callable[..., Any] | str:
    """Rewrite the form as :func:`_rewritten`, once for each number of dimensions.

    A graph is valid for one number of dimensions and for all sizes.
    """
    functions: dict[tuple[int, ...], Callable[..., Any]] = {}
    for shape in {len(shape): shape for shape in reversed(proof.shapes)}.values():
        tensors = proof.inputs(shape, dtype)[: _arity(form)]
        made = _rewritten(rule, form, tensors)
        if isinstance(made, str):
            return made
        functions[tuple(tensor.ndim for tensor in tensors)] = made
    return lambda *inputs: functions[tuple(tensor.ndim for tensor in inputs)](*inputs)


def _rewritten(rule: Rule, form: Form, tensors: tuple[Tensor, ...]) -> Callable[..., Any] | str:
    """Return the form as a function after the rule, or the reason if the rule does not match."""
    module = _Module(form).train()
    given = tensors[: _arity(form)]
    recording = record(module, given)
    call: Call = recording.calls[module][0]
    traced = specialize(module, _Module.forward, call, recording, True)
    modules = dict(module.named_modules())
    graph = expand(traced, module, recording).graph
    findings = find_all(graph, [rule], modules, cost_guard=False)
    if not findings.chosen:
        reasons = "; ".join(index.reason for index in findings.rejected)
        return f"the rule does not match{': ' if reasons else ''}{reasons}"
    function = compiled(rewritten(graph, findings.chosen, modules))
    return lambda *inputs: function(module, *inputs)


def _arity(form: Form) -> int:
    return len(inspect.signature(form.forward if isinstance(form, nn.Module) else form).parameters)


def _compare(form: Form, function: Callable[..., Any], proof: Proof, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yield the problems at each shape, with every element compared within the tolerance of its dtype."""
    for shape in proof.shapes:
        ours, eager, exact = _run_all(form, function, proof.inputs(shape, dtype), dtype)
        for what, a in ours.items():
            problem = _unlike(a, eager[what]) or _off(a, eager[what], exact[what], dtype)
            if problem:
                yield str(list(shape)), f"{what}: {problem}"


def _compare_rounding(
    form: Form, function: Callable[..., Any], proof: Proof, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    """Yield the problems over all shapes together.

    The error may be 1.1 × eager's, and small samples are not enough to check this. Where rounding moves a value across
    a kink, as of ReLU6, the gradient jumps, and a few jumps decide: a larger sample judges what is off by little.
    """
    off = _off_by_rounding(form, function, proof, dtype, _SAMPLES)
    if off and max(off.values()) < _FEW_JUMPS:
        off = _off_by_rounding(form, function, proof, dtype, _MORE_SAMPLES)
    yield from off


def _off_by_rounding(
    form: Form, function: Callable[..., Any], proof: Proof, dtype: torch.dtype, samples: int
) -> dict[tuple[str, str], float]:
    """Return the problems, with the error as a multiple of eager's; infinite if it is no matter of rounding."""
    totals: dict[str, list[float]] = {}
    drawn = [(shape, proof.inputs(shape, dtype)) for shape in proof.shapes * samples]  # before a run sets the seed
    for shape, tensors in drawn:
        ours, eager, exact = _run_all(form, function, tensors, dtype)
        for what, a in ours.items():
            b, reference = eager[what], exact[what]
            problem = _unlike(a, b)
            if problem:
                return {(str(list(shape)), f"{what}: {problem}"): math.inf}
            sums = totals.setdefault(what, [0.0, 0.0, 0.0])
            for index, tensor in enumerate((a.double() - reference, b.double() - reference, reference)):
                sums[index] += float(tensor.nan_to_num().square().sum())
    found: dict[tuple[str, str], float] = {}
    for what, (error, eager_error, size) in totals.items():
        allowed = SLACK * eager_error**0.5 + 1e-6 * size**0.5
        if error**0.5 > allowed:
            problem = f"{what}: error {error**0.5:.3g}, eager's is {eager_error**0.5:.3g}"
            found["all shapes", problem] = error**0.5 / allowed if allowed else math.inf
    return found


def _run_all(
    form: Form, function: Callable[..., Any], tensors: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return three sets of outputs and gradients: ours, eager's and the float64 reference."""
    given = tensors[: _arity(form)]
    with fused.backend("reference"):
        ours = _run(function, given)
    eager = _run(form, given)
    wide = tuple(t.double() if t.is_floating_point() else t for t in given)
    return ours, eager, eager if dtype == torch.float64 else _run(form, wide)


def _run(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return outputs and gradients of all floating inputs under one seed, by their names in messages."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.manual_seed(7)
    returned = function(*inputs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    wanted = {f"gradient of input {n}": t for n, t in enumerate(inputs) if t.requires_grad}
    total = torch.stack([_weighted(output).double() for output in outputs]).sum()
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    results = {f"output {n}": output.detach() for n, output in enumerate(outputs)}
    for (what, given), gradient in zip(wanted.items(), gradients, strict=True):
        results[what] = torch.zeros_like(given) if gradient is None else gradient
    return results


def _weighted(output: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    return (output * weights.to(output.dtype)).sum()


def _unlike(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype}{list(ours.shape)} instead of {theirs.dtype}{list(theirs.shape)}"
    return "" if torch.equal(ours.isfinite(), theirs.isfinite()) else "other elements are not finite"


def _off(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype) -> str:
    if not ours.numel():
        return ""
    rtol, atol = TOLERANCES[dtype]
    allowed = atol + rtol * max(exact.abs().max().item(), 1.0)
    eager_off = (theirs.double() - exact).abs().max().item()
    worst = (ours.double() - exact).abs().max().item()
    return "" if worst <= max(allowed, SLACK * eager_off) else f"off by {worst:.3g}, allowed {allowed:.3g}"
