"""Observation of a model on one batch: outputs, gradients, and the effect of training."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from fused.torch_internals.batch_norm_gradients import corrected_gradients
from schedule.util.generators import generator_states, seed_all
from schedule.util.named_values import (
    Plain,
    call,
    container_types,
    copied,
    full,
    limit_of,
    named_tensors,
    named_values,
)
from schedule.verify.perturbation import perturb, perturb_slightly
from schedule.verify.preserve import preserved
from schedule.verify.tolerances import Tolerance

Mode = Literal["train", "eval"]
Weights = Literal["own", "perturbed"]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Named = dict[str, torch.Tensor | None]

_SEED = 20_240_229


@dataclass(frozen=True)
class Case:
    """One way of running a model.

    Attributes:
        mode: dropout and batch statistics on or off.
        weights: the model's own, or perturbed ones.
        batch: the arguments to call it with.
        shapes: the shapes of ``batch``, for reports.
        steps: optimizer steps to take.
        optimizer: makes the optimizer; AdamW when None.
        dropout: in train mode, whether dropout is on.
        forked: whether modules draw random numbers of each rank, so that torch's generators are elsewhere afterwards.
        training: whether to compute gradients and take steps; without, the model runs without gradients.
        create_graph: whether to differentiate the gradients as well.
    """

    mode: Mode
    weights: Weights
    batch: Any
    shapes: str
    steps: int
    optimizer: OptimizerFactory | None = None
    dropout: bool = True
    forked: bool = False
    training: bool = True
    create_graph: bool = False


@dataclass
class Observation:
    """Results of one case, with full (gathered) and detached tensors by name."""

    outputs: dict[str, torch.Tensor | Plain] = field(default_factory=dict)
    structure: str = ""
    differentiable: set[str] = field(default_factory=set)
    outputs_without_grad: dict[str, torch.Tensor | Plain] = field(default_factory=dict)
    outputs_trained: dict[str, torch.Tensor | Plain] = field(default_factory=dict)
    inputs_after: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    input_gradients: Named = field(default_factory=dict)
    second_gradients: Named = field(default_factory=dict)
    once_differentiable: str = ""
    updates: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    parameter_names: set[str] = field(default_factory=set)
    trainable: set[str] = field(default_factory=set)
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    drew: bool = False
    loss: float = 0.0
    adam_eps: float = 0.0

    @property
    def unusable(self) -> str:
        """Reason against use as a reference (a loss or gradient is not finite), or "" if usable."""
        if self.loss - self.loss != 0.0:
            return f"the loss is {self.loss}"
        bad = [n for n, g in self.gradients.items() if g is not None and not bool(torch.isfinite(g).all())]
        return f"the gradient of {bad[0]} is not finite" if bad else ""


def observe(
    model: nn.Module,
    case: Case,
    tolerance: Tolerance,
    reference: Observation | None = None,
    perturbed_slightly: int = 0,
    updates: Named | None = None,
) -> Observation:
    """Run ``case`` on ``model`` and leave the model unchanged. A known error of torch's does not show.

    Args:
        reference: observation to compare with: its parameter names and its AdamW ``eps`` are used.
        perturbed_slightly: perturb the weights by a few roundings in this direction; 0 for the weights as they are.
        updates: updates of the weights from another model's training, added here in place of training.
    """
    seen = Observation()
    with preserved(model), corrected_gradients():
        parameters = dict(model.named_parameters())
        seen.parameter_names = reference.parameter_names if reference else set(parameters)
        if case.weights == "perturbed":
            perturb(model, seen.parameter_names)
        if perturbed_slightly:
            perturb_slightly(model, perturbed_slightly)
        model.train(case.mode == "train")
        if not case.dropout:
            _dropout_off(model)
        if case.mode == "eval" and case.training:
            # Without grad other code paths run than with grad in eval mode: fused ops save nothing for backward.
            seen.outputs_without_grad = _forward_only(model, case)
        _train(model, case, tolerance, seen, reference, updates)
        if set(parameters) == seen.parameter_names:
            seen.trainable = {name for name, p in parameters.items() if p.requires_grad}
        else:
            seen.trainable = reference.trainable if reference else set()
            seen.gradients = _in_names_of_state(model, seen.gradients)
            seen.updates = _in_names_of_state(model, seen.updates)
            inputs = {name: g for name, g in seen.second_gradients.items() if name not in parameters}
            seen.second_gradients = inputs | _in_names_of_state(model, seen.second_gradients)
    return seen


def _dropout_off(model: nn.Module) -> None:
    """Put all modules in eval mode, except those that compute running statistics."""
    for module in model.modules():
        module.training = module.training and getattr(module, "running_mean", None) is not None


def _train(
    model: nn.Module,
    case: Case,
    tolerance: Tolerance,
    seen: Observation,
    reference: Observation | None,
    updates: Named | None,
) -> None:
    """Run one forward and backward, and ``case.steps`` optimizer steps.

    Adam divides a gradient by its own size, so with the usual ``eps`` of 1e-8 a gradient of pure rounding moves
    its weight by a full learning rate in a random direction, and two correct programs diverge. ``eps`` is
    therefore a fraction of the model's largest gradient RMS: ordinary gradients still move their weights by
    about lr × steps, rounding does not.
    """
    parameters = dict(model.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    with torch.set_grad_enabled(case.training):
        loss = _first_pass(model, case, seen)
    seen.loss = float(loss.detach()) if loss is not None else 0.0
    # Clones: AdamW does not write to gradients, but another optimizer may.
    seen.gradients = {name: _taken(p.grad) for name, p in trainable.items()}
    if case.create_graph:
        _second_pass(model, case, trainable, seen)
    if not case.steps or not trainable or loss is None:
        return
    if updates is not None:
        _add(trainable, updates)
        seen.outputs_trained = _forward_only(model, case)
        return
    seen.adam_eps = reference.adam_eps if reference else tolerance.adam_eps * largest_rms(seen.gradients)
    start = {name: p.detach().clone() for name, p in trainable.items()}
    optimizer = _optimizer(list(trainable.values()), case, tolerance, seen.adam_eps)
    optimizer.step()
    for step in range(1, case.steps):
        optimizer.zero_grad(set_to_none=True)
        seed_all(_SEED + step)
        batch, _ = copied(case.batch)
        loss = loss_of(call(model, batch))
        if loss is not None:
            loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen.updates = {name: full(p.detach() - start[name]) for name, p in trainable.items()}
    # The same seed as in the first pass, so that only the weights differ.
    seen.outputs_trained = _forward_only(model, case)


@torch.no_grad()
def _add(parameters: dict[str, nn.Parameter], updates: Named) -> None:
    for name, parameter in parameters.items():
        update = updates.get(name)
        parameter.grad = None
        if update is not None:
            parameter.add_(update)


def _first_pass(model: nn.Module, case: Case, seen: Observation) -> torch.Tensor | None:
    seed_all(_SEED)
    seeded = _tensor_states(model)
    batch, leaves = copied(case.batch)
    output = call(model, batch)
    values = named_values(output)
    seen.outputs = {name: _taken_value(value) for name, value in values.items()}
    seen.structure = container_types(output)
    seen.differentiable = {n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    seen.inputs_after = {name: _taken(value) for name, value in named_tensors(batch).items()}
    seen.buffers = {name: _taken(buffer) for name, buffer in model.named_buffers()}
    loss = loss_of(output)
    if loss is not None:
        loss.backward()
    seen.input_gradients = {name: _taken(leaf.grad) for name, leaf in leaves.items()}
    states = _tensor_states(model)
    seen.drew = any(not torch.equal(state, seeded[name]) for name, state in states.items())
    seen.generators = {} if case.forked else states
    return loss


def _second_pass(model: nn.Module, case: Case, trainable: Mapping[str, nn.Parameter], seen: Observation) -> None:
    """Differentiate the norm of the gradient, as gradient penalties and Hessian-vector products do.

    The norm is over all parameters and floating inputs together, so it does not depend on how parameters are merged.
    A model that torch cannot differentiate twice is noted in ``once_differentiable``.
    """
    seed_all(_SEED)
    batch, leaves = copied(case.batch)
    loss = loss_of(call(model, batch))
    if loss is None:
        return
    operands = {**trainable, **{f"input {name}": leaf for name, leaf in leaves.items()}}
    before = [parameter.grad for parameter in trainable.values()]
    try:
        first = torch.autograd.grad(loss, list(operands.values()), create_graph=True, allow_unused=True)
        squares = [_square(full(g)) for g in first if g is not None and g.requires_grad]
        if squares:
            square = torch.stack(squares).sum()
            norm = square / square.detach().sqrt().clamp_min(1e-300)  # a norm of zero has no derivative
            for operand in operands.values():
                operand.grad = None
            norm.backward()  # autograd.grad would pass over what raises and leads to no operand
            seen.second_gradients = {name: _taken(operand.grad) for name, operand in operands.items()}
    except RuntimeError as error:  # torch has several ways to say that a backward has no derivative
        seen.once_differentiable = str(error).strip().splitlines()[0][:200]
    finally:
        for parameter, grad in zip(trainable.values(), before, strict=True):
            parameter.grad = grad


def _square(gradient: torch.Tensor) -> torch.Tensor:
    return as_real(gradient).double().pow(2).sum()


def _tensor_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators."""
    return {name: state for name, state in generator_states(model).items() if isinstance(state, torch.Tensor)}


def _forward_only(model: nn.Module, case: Case) -> dict[str, torch.Tensor | Plain]:
    seed_all(_SEED)
    with torch.no_grad():
        batch, _ = copied(case.batch)
        return {name: _taken_value(value) for name, value in named_values(call(model, batch)).items()}


def loss_of(output: object) -> torch.Tensor | None:
    """Return ``output.loss``, or else all floating outputs weighted by fixed random numbers, or None.

    A plain sum would hide errors: a softmax sums to one and a normalized row to zero for any input.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad:
        return full(loss)
    terms = []
    for name, value in named_tensors(output).items():
        if value.requires_grad and value.is_floating_point() and value.numel():
            whole = full(value)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight = torch.randn(tuple(whole.shape), generator=generator).to(whole.device, torch.float32)
            ordinary = torch.where(whole.detach().abs() < limit_of(whole.dtype), whole, 0.0)
            terms.append((ordinary * weight).sum() / whole.numel() ** 0.5)
    return torch.stack([term.float() for term in terms]).sum() if terms else None


def _optimizer(parameters: list[nn.Parameter], case: Case, tolerance: Tolerance, eps: float) -> torch.optim.Optimizer:
    if case.optimizer is not None:
        return case.optimizer(parameters)
    return torch.optim.AdamW(parameters, lr=tolerance.learning_rate, eps=max(eps, 1e-30))


def rms(tensor: torch.Tensor) -> float:
    """Return the root mean square over the finite entries, in float64."""
    values = as_real(tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double())
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    if not math.isfinite(norm):
        values = values[torch.isfinite(values)]
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm / math.sqrt(values.numel()) if values.numel() else 0.0


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of a complex tensor in a last dimension, or ``tensor`` itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def largest_rms(tensors: Named) -> float:
    """Return the largest :func:`rms` of the tensors, or 0 if there is none."""
    return max((rms(t) for t in tensors.values() if t is not None), default=0.0)


def _taken(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return full(tensor.to_dense() if tensor.is_sparse else tensor).clone()


def _taken_value(value: torch.Tensor | Plain) -> torch.Tensor | Plain:
    return _taken(value) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _in_names_of_state(model: nn.Module, values: Named) -> Named:
    """Convert ``values`` to the names of the ``state_dict``, for models with merged or split parameters.

    A state dict converts parameters back by splitting and concatenating, which also works for gradients and
    updates: they temporarily replace the parameters' data. A missing gradient becomes zeros, since the
    conversion needs a tensor.
    """
    parameters: Iterable[tuple[str, nn.Parameter]] = list(model.named_parameters())
    saved = [(p, p.data) for _, p in parameters]
    try:
        for name, parameter in parameters:
            value = values.get(name)
            parameter.data = torch.zeros_like(parameter) if value is None else value.to(parameter.dtype)
        return {name: _taken(tensor) for name, tensor in model.state_dict().items()}
    finally:
        for parameter, data in saved:
            parameter.data = data
