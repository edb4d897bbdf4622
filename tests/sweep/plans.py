"""The tensor-parallel plan of one text architecture, and that with experts spread, on two simulated ranks.

An architecture counts as *covered* if the simulated ranks compute the model's outputs and gradients and if in every
layer that is called the attention, or at least a quarter of the weights, is sharded. Its layers are the members of
its outermost module lists; embeddings and the projection onto the vocabulary do not count.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import nn

import schedule
from schedule.api.simulate import Simulation, simulate
from schedule.batches import Inputs
from schedule.capture.recording.recording import Call, record
from schedule.capture.recording.structure import TensorSpec, leaves, map_structure
from schedule.distributed.planning.plan_data import Plan, common_path
from schedule.distributed.planning.plan_steps import EXPERTS, HEADS, VOCABULARY, Group
from schedule.distributed.tensor_parallel.expert_proof import has_experts
from schedule.distributed.tensor_parallel.sharded_modules import MEANS, ROW, projection_of, role_of
from tests.sweep.models import NotBuilt, model_class
from tests.sweep.one import Outcome, staged
from tests.sweep.rounding import widened

RANKS = 2
TOLERANCE = 1e-3
WIDE = 1e-6  # rounding is 10⁻⁹ times as large in float64 as in float32, and a mistake is as large
LEAST = 0.25
TEXT = frozenset((
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask",
    "labels",
))  # fmt: skip


@dataclass
class Planned(Outcome):
    """What is known of the plan.

    Attributes:
        text: the model is called with tokens alone; nothing else is planned here.
        columns: projections that are column-parallel, outside of the vocabulary.
        rows: row-parallel.
        whole: neither.
        layers: how many there are.
        attention: layers of which the heads are sharded.
        features: layers of which other features are, such as the width of an MLP.
        share: of the layers' weights, how much is sharded; of the layer with the least of it.
        collectives: that the groups in the layers make, forward and backward.
        minimum: one for each attention and each MLP that is sharded.
        deviation: largest one of an output or gradient, relative to the largest value;
            in float64 if it is large in float32.
        covered: see above.
        left: why weights of layers stay whole → how many.
        experts: modules of experts that are spread over the ranks by ``experts=True``, and how many there are.
    """

    text: bool | None = None
    columns: int = 0
    rows: int = 0
    whole: int = 0
    layers: int = 0
    attention: int = 0
    features: int = 0
    share: float = 0.0
    collectives: tuple[int, int] = (0, 0)
    minimum: int = 0
    deviation: float | None = None
    covered: bool = False
    left: dict[str, int] = field(default_factory=dict)
    experts: tuple[int, int] = (0, 0)


def check_plan(name: str, save: Callable[[Outcome], None] = lambda outcome: None) -> Planned:
    """Build, plan, simulate, compare, as far as that goes."""
    outcome = Planned(name)
    try:
        outcome.text = None if getattr(model_class(name), "main_input_name", "input_ids") == "input_ids" else False
    except NotBuilt as error:
        outcome.reasons[error.kind] = error.why
    if outcome.text is None and not outcome.reasons:
        staged(outcome, (_planned, _spread), save)
    save(outcome)
    return outcome


def is_text(inputs: Inputs | dict[str, list[int]]) -> bool:
    """Whether a model that is called with these is called with tokens alone."""
    return "input_ids" in inputs and set(inputs) <= TEXT


def _planned(model: nn.Module, batch: Inputs, outcome: Planned) -> None:
    outcome.text = is_text(batch)
    if outcome.text:
        describe(model, batch, outcome)


def _spread(model: nn.Module, batch: Inputs, outcome: Planned) -> None:
    if outcome.text:
        spread_experts(model, batch, outcome)


def spread_experts(model: nn.Module, batch: Inputs, outcome: Planned) -> None:
    """Plan and simulate with whole experts spread over the ranks, and note in ``outcome`` for how many that holds."""
    found = mixtures(model, batch)
    if not found:
        return
    outcome.experts = 0, len(found)
    plan = schedule.create_schedule(copy.deepcopy(model).eval(), batch).shard_plan(RANKS, experts=True)
    seen, equal = _simulated(model, batch, plan)
    if not equal:
        outcome.reasons["WRONG, experts"] = f"{seen.where}: {max(seen.output, seen.gradient):.3g}"
        return
    outcome.experts = sum(group.kind == EXPERTS for group in plan.groups), len(found)
    if outcome.experts[0] < len(found):
        whole = next((path for path in found if f"experts of {path}" in plan.whole), "")
        outcome.reasons["experts not spread"] = plan.whole.get(f"experts of {whole}", "not called")


def mixtures(model: nn.Module, batch: Inputs) -> list[str]:
    """Paths of the modules with the parameters of experts that are called with their indices and weights."""
    calls = record(model, batch).calls
    return [path for path, one in model.named_modules() if has_experts(one) and any(map(_routes, calls.get(one, [])))]


def _routes(call: Call) -> bool:
    """Whether a call takes indices ``[tokens, k]`` and weights of the same shape."""
    specs = [leaf for _, leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, TensorSpec) and leaf.ndim == 2]
    weights = {spec.shape for spec in specs if spec.dtype.is_floating_point}
    return any(spec.dtype == torch.int64 and spec.shape in weights for spec in specs)


def describe(model: nn.Module, batch: Inputs, outcome: Planned) -> None:
    """Plan and simulate, and note what comes of it in ``outcome``."""
    whole = copy.deepcopy(model).eval()
    plan = schedule.create_schedule(whole, batch).shard_plan(RANKS)
    reached = called(whole, batch)
    layers = layers_of(model, reached)
    outcome.whole = len(_projections(model) & reached - {step.path for step in plan.shards})
    _count(model, plan, layers, outcome)
    seen, outcome.equal = _simulated(model, batch, plan)
    outcome.deviation = max(seen.output, seen.gradient)
    if not outcome.equal:
        outcome.reasons["WRONG, plan"] = f"{seen.where}: {outcome.deviation:.3g}"
    shares = [_share(model.get_submodule(layer), plan, layer) for layer in layers]
    heads = [any(group.kind == HEADS and _in(group, layer) for group in plan.groups) for layer in layers]
    outcome.share = round(min(shares, default=0.0), 3)
    substantial = [share >= LEAST or (attention and share > 0) for share, attention in zip(shares, heads, strict=True)]
    outcome.covered = outcome.equal and bool(layers) and all(substantial)
    if outcome.equal and not outcome.covered:
        whole = [layer for layer, enough in zip(layers, substantial, strict=True) if not enough]
        most = max(outcome.left, key=lambda why: outcome.left[why], default="there is no layer")
        outcome.reasons["too much stays whole"] = f"{len(whole)} of {len(layers)} layers: {most}"


def _simulated(model: nn.Module, batch: Inputs, plan: Plan) -> tuple[Simulation, bool]:
    """Simulate, and say whether the ranks compute the same: in float64 where float32 deviates, perhaps by rounding."""
    seen = simulate(model, batch, lambda sch: sch.apply_plan(plan), RANKS)
    if seen.equal(TOLERANCE):
        return seen, True
    wide = copy.deepcopy(model).double(), map_structure(batch, widened)
    seen = simulate(*wide, lambda sch: sch.apply_plan(plan), RANKS)
    return seen, seen.equal(WIDE)


def called(model: nn.Module, batch: Inputs) -> set[str]:
    """Paths of the modules that ``batch`` reaches: tokens alone do not reach what sees or listens."""
    calls = record(model, batch).calls
    return {path for path, module in model.named_modules() if calls.get(module)}


def layers_of(model: nn.Module, reached: Collection[str]) -> list[str]:
    """Paths of the members of the outermost module lists that multiply; of the model itself if there are none.

    A list of bare projections is no list of layers.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{layer}.") for layer in found)
        if isinstance(module, nn.ModuleList) and not inside:
            members = [f"{path}.{name}" for name, child in module.named_children() if list(child.children())]
            found += [one for one in members if any(_below(path, one) for path in reached)]
    return [layer for layer in found if _weights(model.get_submodule(layer), layer)] or [""]


def _weights(module: nn.Module, path: str) -> dict[str, int]:
    """Path → elements of the parameters below ``module`` that multiply: embeddings do not."""
    return {
        ".".join(filter(None, (path, inner, name))): parameter.numel()
        for inner, child in module.named_modules()
        if not isinstance(child, nn.Embedding)
        for name, parameter in child._parameters.items()
        if parameter is not None and parameter.ndim >= 2
    }


def _share(layer: nn.Module, plan: Plan, path: str) -> float:
    weights = _weights(layer, path)
    shared = {f"{step.path}.{step.name}" for step in plan.shards}
    return sum(size for name, size in weights.items() if name in shared) / sum(weights.values())


def _in(group: Group, layer: str) -> bool:
    return any(_below(step.path, layer) for step in group.shards)


def _below(path: str, layer: str) -> bool:
    return not layer or path == layer or path.startswith(f"{layer}.")


def _projections(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if projection_of(module) is not None}


def _count(model: nn.Module, plan: Plan, layers: list[str], outcome: Planned) -> None:
    inner = [g for g in plan.groups if g.kind != VOCABULARY and any(_in(g, layer) for layer in layers)]
    sharded = {
        step.path: role_of(model.get_submodule(step.path), step.name, step.axis)
        for group in inner
        for step in group.shards
        if step.name == "weight"
    }
    outcome.rows = sum(sharded.get(path) == ROW for path in _projections(model))
    outcome.columns = sum(path in sharded for path in _projections(model)) - outcome.rows
    outcome.layers = len(layers)
    outcome.attention = sum(any(group.kind == HEADS and _in(group, layer) for group in inner) for layer in layers)
    outcome.features = sum(any(group.kind != HEADS and _in(group, layer) for group in inner) for layer in layers)
    modes = Counter(sync.mode.startswith("bwd") for group in inner for sync in group.syncs)
    modes[True] += sum(sync.mode == MEANS for group in inner for sync in group.syncs)  # with their gradients
    outcome.collectives = modes[False], modes[True]
    outcome.minimum = len({_place(group, layer) for group in inner for layer in layers if _in(group, layer)})
    inside = {path for layer in layers for path in _weights(model.get_submodule(layer), layer)}
    outcome.left = dict(Counter(why for path, why in plan.whole.items() if path in inside))


def _place(group: Group, layer: str) -> str:
    """Where in a layer a group is; the experts of a mixture are at one place."""
    common = common_path(step.path for step in group.shards if _below(step.path, layer))
    return layer + re.sub(r"\.\d+(?=\.|$)", ".#", common.removeprefix(layer))
