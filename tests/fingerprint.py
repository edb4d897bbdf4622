"""All that a failed primitive must leave as it was, as one comparable value."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from schedule import Schedule
from schedule.runtime.scheduled import state_of

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def fingerprint(sch: Schedule, *others: nn.Module) -> dict[str, Any]:
    """Graphs, modules, hooks, parameters to the byte, random state and history of a schedule.

    Args:
        others: modules outside the model, such as a replacement, whose state counts too.
    """
    root = sch.root.module
    found: dict[str, Any] = {
        "history": [step.description for step in sch.history],
        "pending": sch.tree.history.pending,
        "annotations": dict(sch.tree.annotations),
        "explicit traces": {id(m): [id(s.graph) for s in made] for m, made in sch.tree.graphs.explicit.items()},
        "cpu generator": torch.get_rng_state().numpy().tobytes(),
        "python generator": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "state dict": list(root.state_dict()),
    }
    for prefix, start in [("", root), *((f"other {i}: ", other) for i, other in enumerate(others))]:
        for path, module in start.named_modules(remove_duplicate=False):
            found[prefix + path] = _module(module)
    return found


def _module(module: nn.Module) -> dict[str, Any]:
    state = state_of(module)
    return {
        "module": id(module),
        "class": type(module),
        "attributes": sorted(name for name in vars(module)),
        "children": [(name, id(child)) for name, child in module._modules.items()],
        "training": module.training,
        "hooks": {t: (id(vars(module)[t]), list(vars(module)[t].items())) for t in _HOOKS if t in vars(module)},
        "tensors": {name: _tensor(t) for name, t in {**module._parameters, **module._buffers}.items()},
        "graphs": None
        if state is None
        else [(id(s.graph), s.graph.python_code("self").src) for s in state.specializations],
        "state": id(state),
    }


def _tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return id(tensor), tensor.requires_grad, dict(vars(tensor)), tensor.grad is None, data
