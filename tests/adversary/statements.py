"""Disturbances as statements: of ``self``, the middle layer, and ``module``, the file that defines it.

Each is applied before the model is scheduled, so that like layers differ, and after it, so that a guard has to see it.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

from tests.adversary.cases import Disturbance, World
from tests.adversary.statements_parts import PARTS

BOTH, AFTER, BEFORE = ("before", "after"), ("after",), ("before",)

LAYERS: dict[str, tuple[str, ...]] = {
    "Scalars": (
        "self.number = 3",
        "self.number = 2.0",
        "self.number = True",
        "self.number = np.int64(2)",
        "self.number = torch.tensor(2)",
        "self.number = [2]",
        "self.number = Counting(2)",
        "self.flag = False",
        "self.flag = 1",
        "self.flag = []",
        "self.flag = None",
        "self.zero = -0.0",
        "self.zero = float('nan')",
        "self.scale = float('nan')",
        "self.scale = float('inf')",
        "self.scale = 1",
        "self.scale = 1.5000001",
        "self.scale = nn.Parameter(torch.tensor(2.5))",
        "self.mode = 'y'",
        "self.mode = Named('x')",
        "self.nothing = 0",
        "self.nothing = False",
        "del self.number",
        "del self.number; module.Scalars.number = 7",
        "self.unread = 4",
        "self.fresh = 4",
    ),
    "Typed": (
        "self.value = 2.0",
        "self.value = True",
        "self.value = '2'",
        "self.value = np.float64(2)",
        "self.value = Stated.TWO",
        "self.value = 22",
        "self.value = -2",
        "self.value = None",
        "self.value = [2]",
        "self.value = (2,)",
    ),
    "Nested": (
        "self.a.inner.k = 2.5",
        "self.a.inner.inner.k = 2.5",
        "self.a.inner = copy.deepcopy(self.a.inner); self.a.inner.k = 2.5",
        "self.a.inner.inner = None",
        "self.a.k = 2.5",
        "self.a = module.Deep(2); self.a.inner.inner.k = 0.5",
        "del self.a.inner.k",
    ),
    "Buried": (
        "self.space.table['x'][0] = 2.5",
        "self.space.table['x'][1].k = 2.5",
        "self.space.table['x'] = [2.5, types.SimpleNamespace(k=2.5)]",
        "self.space.table = {'x': [1.5, types.SimpleNamespace(k=2.5)]}",
        "self.space = types.SimpleNamespace(table={'x': [2.5, types.SimpleNamespace(k=2.0)]})",
        "self.space.table['x'].insert(0, 3.0)",
        "self.space.table.clear()",
        "self.space.spare['y'][0] = 2",
    ),
    "Objects": (
        "self.plain.k = 2.5",
        "self.plain._hidden = 2.5",
        "self.plain.kind = 2.5",
        "self.data.k = 2.5",
        "self.data.inner.k = 2.5",
        "self.data = module.Data(2.5, self.data.inner)",
        "self.slotted.k = 2.5",
        "self.magic.table['k'] = 2.5",
        "self.named = self.named._replace(k=2.5)",
        "self.named = self.named._replace(other=2.5)",
        "self.plain.times = lambda value: value * 3",
    ),
    "Enums": ("self.level = module.Level.HIGH", "self.level = 1.5", "self.level = copy.copy(module.Level.LOW)"),
    "Containers": (
        "self.table['k'] = 2.5",
        "self.table = {'k': 2.5}",
        "self.table['new'] = 2.5",
        "self.list[1] = 2.5",
        "self.list.append(2.5)",
        "self.list.clear()",
        "self.set.discard(1)",
        "self.set.add(7)",
        "self.long[280] = 2.5",
        "self.ordered['k'] = 2.5",
        "self.default['k'] = 2.5",
        "self.queue[0] = 2.5",
        "self.queue.appendleft(2.5)",
    ),
    "HoldsTensors": (
        "self.tensors['gain'].mul_(2)",
        "self.tensors['gain'] = torch.ones(16)",
        "self.tensors['k'] = 3.0",
    ),
    "HoldsModules": (
        "self.modules_too['act'] = nn.ReLU()",
        "self.modules_too['k'] = 3.0",
        "self.listed[0] = nn.ReLU()",
        "self.listed.append(nn.Tanh())",
        "self.listed[0].register_forward_hook(lambda *given: given[-1] * 2)",
    ),
    "PlainTensor": (
        "self.gain = torch.full((16,), 2.5)",
        "self.gain.mul_(2)",
        "self.gain = self.gain.double()",
        "self.gain = self.gain[:1]",
        "self.gain.requires_grad_()",
        "self.gain = 2.5",
        "self.gain = None",
        "self.gain = self.fc1.bias",
    ),
    "HeldTensor": ("self.holder.gain = torch.full((16,), 2.5)", "self.holder.gain.mul_(2)"),
    "Closures": (
        "self.closed.__closure__[0].cell_contents = 2.5",
        "self.other.k = 2.5",
        "self.partial = functools.partial(torch.mul, other=2.5)",
        "self.partial = functools.partial(torch.add, other=1.5)",
        "self.deeper.keywords['settings']['k'] = 2.5",
        "self.closed = lambda value: value * 3",
        "self.method = module.PlainObject().times; self.method.__self__.k = 2.5",
        "self.closed.__code__ = (lambda factor_: lambda value: value + factor_)(0).__code__",
    ),
    "Configured": (
        "self.config.scale = 2.5",
        "self.config.sub.k = 2.5",
        "self.config.sub.sub.k = 2.5",
        "self.config.sub.sub.table['k'] = 2.5",
        "self.config.sub = module.Config(k=2.5, sub=self.config.sub.sub)",
        "self.config = copy.deepcopy(self.config); self.config.sub.sub.k = 2.5",
        "self.config.extra = 2.5",
    ),
    "Hidden": ("self._gain = 2.5", "self.extra['k'] = 2.5", "self.extra = {'k': 2.5}", "self.shadow = 5.0"),
    "Subclassed": ("type(self.style).kind = 2.5", "self.style.kind = 2.5", "type(self.style).kind = True"),
    **PARTS,
}
"""Model → statements for one of its layers."""

CLASSES: dict[str, tuple[str, ...]] = {
    "Scalars": (
        "module.Scalars.twist = lambda self, hidden: hidden * 2",
        "module.Layer.forward = lambda self, x: x * 2",
    ),
    "Objects": (
        "module.PlainObject.kind = 2.5",
        "module.PlainObject.times = lambda self, value: value * 3",
        "module.PlainObject.hidden = 2.5",
        "module.Described.values['k'] = 2.5",
        "module.Wearing.k = 2.5",
        "module.Magic.__getattr__ = lambda self, name: 2.5",
    ),
    "Globals": (
        "module.FACTOR = 2.5",
        "module.FACTOR = 2",
        "module.TABLE['factor'] = 2.5",
        "module.TABLE['list'][0] = 2.5",
        "module.TABLE = {'factor': 2.5, 'list': [1.0]}",
        "module.factor = lambda: 2.5",
        "module.factor.__code__ = (lambda: 2.5).__code__",
        "module.Globals.constant = 2.5",
        "self.constant = 2.5",
        "module.Globals.settings['k'] = 2.5",
        "module.Globals.helper = lambda self, value: value * 2",
        "self.helper = lambda value: value * 2",
        "self.twist = lambda value: value * 2",
        "module.Layer.constant = 2.5",
        "module.UNREAD = 2.5",
        "module.F = types.SimpleNamespace(gelu=torch.relu)",
        "del module.FACTOR",
    ),
    "Hidden": (
        "module.Hidden.gain = 2.5",
        "module.Hidden.gain = property(lambda self: 2.5)",
        "module.Hidden.shadow = 2.5",
    ),
    "Subclassed": ("module.PlainObject.kind = 9.0", "del type(self.style).kind"),
    "Attended": (
        "module.Attended.forward = lambda self, x, mask=None: x * 2",
        "module.F = types.SimpleNamespace(softmax=lambda x, dim: x)",
        "shared(nn.Linear, 'forward', lambda self, x: F.linear(x, self.weight) * 2)",
        "shared(nn.GELU, 'forward', lambda self, x: x)",
        "shared(nn.Dropout, 'forward', lambda self, x: x * 2)",
        "shared(nn.LayerNorm, 'forward', lambda self, x: x * 2)",
        "shared(F, 'softmax', lambda x, dim: x)",
        "shared(F, 'linear', lambda x, weight, bias=None: x @ weight.t())",
        "shared(torch.Tensor, 'transpose', lambda x, a, b: x.permute(0, 2, 1) * 2)",
        "hook_all('register_module_forward_hook', lambda *given: given[-1] * 2)",
        "hook_all('register_module_forward_pre_hook', lambda part, given: (given[0] * 2,))",
        "hook_all('register_module_full_backward_hook', lambda *given: None)",
    ),
}
"""Model → statements about what its layers share, for after it was scheduled."""


class Counting(int):
    """An int of a class of its own, that adds one more than it says."""

    def __radd__(self, other: Any) -> Any:
        """One more."""
        return other + int(self) + 1


class Named(str):
    """A str that equals nothing."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        """Never."""
        return False


class Stated(enum.IntEnum):
    """An int whose text is another."""

    TWO = 2

    def __str__(self) -> str:
        """A longer one."""
        return "two"


class Doubled(nn.Linear):
    """Twice a Linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Double it."""
        return super().forward(input) * 2


def _swapped(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, nn.Parameter(tensor.detach() * 2))


def names(model: nn.Module, world: World) -> dict[str, Any]:
    """What a statement may use."""
    layers = getattr(model, "layers", None)
    found: dict[str, Any] = {
        "__name__": __name__,
        "model": model,
        "self": model if layers is None else layers[1],
        "world": world,
    }
    found |= {"module": next(iter(world.modules.values()), None), "shared": world.set, "swapped": _swapped}
    found |= {"undo": world.undo.callback, "P": nn.Parameter, "np": np, "torch": torch, "nn": nn, "F": F}
    found |= {"copy": copy, "types": types, "functools": functools, "collections": collections}
    found |= {"Counting": Counting, "Named": Named, "Stated": Stated, "Doubled": Doubled}

    def hook_all(register: str, hook: Any) -> None:
        world.undo.callback(getattr(nn.modules.module, register)(hook).remove)

    return {**found, "hook_all": hook_all}


def statement(text: str, models: tuple[str, ...], whens: tuple[str, ...] = AFTER) -> Disturbance:
    """The disturbance that executes ``text``."""

    def apply(model: nn.Module, world: World) -> nn.Module | None:
        scope = names(model, world)
        exec(compile(text, "<statement>", "exec"), scope)
        changed: nn.Module | None = scope["model"]
        return changed

    return Disturbance(text, apply, models, whens)


STATEMENTS: list[Disturbance] = [
    *(statement(text, (model,), BOTH) for model, texts in LAYERS.items() for text in texts),
    *(statement(text, (model,)) for model, texts in CLASSES.items() for text in texts),
]
