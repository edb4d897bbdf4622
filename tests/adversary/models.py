"""The models of the adversarial cases: tiny ones with odd Python state, and architectures of HuggingFace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.adversary.cases import Batch, Model, World

HERE = Path(__file__).parent


def batch(rows: int = 2, length: int = 5, **more: Callable[[], Any]) -> Batch:
    """Inputs of the odd models: [rows, length, width]."""
    generator = torch.Generator().manual_seed(100 * rows + length)
    x = torch.randn(rows, length, 8, generator=generator).requires_grad_()
    return {"x": x, **{name: make() for name, make in more.items()}}


FIRST_CALL = "the first call sets up what later ones use"


def _stacked(file: str, name: str, *tags: str) -> Model:
    def build(world: World) -> nn.Module:
        module = world.load(HERE / f"{file}.py")
        made: nn.Module = module.Stack(getattr(module, name))
        return made

    return Model(name, build, batch, frozenset({"odd", "stacked", file, *tags}))


def _single(file: str, name: str, make: Callable[..., Batch] = batch, *tags: str, title: str = "") -> Model:
    def build(world: World) -> nn.Module:
        made: nn.Module = getattr(world.load(HERE / f"{file}.py"), name)()
        return made

    return Model(title or name, build, make, frozenset({"odd", file, *tags}))


def _mask() -> torch.Tensor:
    return torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))


def _ids(rows: int = 2, length: int = 5) -> Batch:
    return {"ids": torch.randint(0, 16, (rows, length), generator=torch.Generator().manual_seed(1))}


def _architecture(name: str) -> Model:
    def build(world: World) -> nn.Module:
        from tests import zoo

        return zoo.build(name, seed=20)

    def make(*sizes: int) -> Batch:
        from tests import zoo

        return zoo.batch(name, *sizes)

    return Model(name, build, make, frozenset({"hf", name}))


_STATE = (
    "Layer Scalars Typed Nested Buried Objects Enums Containers HoldsTensors HoldsModules "
    "PlainTensor HeldTensor Closures Globals Configured Hidden Subclassed"
)
_PARTS = "Optional Looping Own OwnTied Identities Two Flags Normed Frozen Attended"
_MODES = (
    "GradEnabled Inference Autocast AutocastDtype Distributed DefaultDtype Deterministic Anomaly Environ Getenv "
    "Threads Mkldnn RecursionLimit MatmulPrecision RequiresGrad Contiguous Strides HalfInput DefaultMade Drawing "
    "Clock Leaf FunctionModes SizeAsked"
)
_EFFECTS = (
    "ListAppend ListAppendTensor DictSet DictSetTensor SetAdd Counter CounterRead CounterUp Buffer BufferReplaced "
    "Average Kept GlobalAppend GlobalCount ClassCount Printing Logging Warning_ InPlace Branching Parent "
    "OwnGenerator Noise Iterating Raising GradSwitch TensorHook"
)

MODELS: dict[str, Model] = {
    model.name: model
    for model in [
        *(_stacked("layers_state", name, "state") for name in _STATE.split()),
        *(_stacked("layers_parts", name, "parts") for name in _PARTS.split()),
        *(_stacked("layers_modes", name, "modes") for name in _MODES.split()),
        *(_stacked("layers_effects", name, "effects") for name in _EFFECTS.split()),
        *(_stacked("layers_effects", name, "effects", FIRST_CALL) for name in ("LazyInit", "KeptRead")),
        _single("layers_parts", "Headed", _ids, "parts"),
        _single("layers_parts", "Attended", lambda: batch(mask=_mask), "parts", title="Masked"),
        _single("layers_parts", "Attended", batch, "parts", title="Unmasked"),
        _single("layers_effects", "ReturnsState", batch, "effects"),
        _single(
            "layers_effects", "Mutating", lambda: batch(into=lambda: torch.zeros(3), seen=list, table=dict), "effects"
        ),
        _single("layers_effects", "MutatingTensor", lambda: batch(into=lambda: torch.zeros(3)), "effects"),
        *(_architecture(name) for name in ("gpt2", "llama", "bert", "t5")),
    ]
}
"""Name → model."""
