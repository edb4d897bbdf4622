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
    "Optional": (
        "self.gain = P(torch.full((8,), 2.5))",
        "self.gain = P(torch.tensor(2.5))",
        "self.mask = torch.arange(8.0)",
        "self.shift = None",
        "del self.shift",
        "self.shift = P(torch.full((8,), 2.5))",
        "self.offset = None",
        "del self.offset",
        "self.late = 2.5",
        "self.register_buffer('late', torch.arange(8.0))",
        "self.late = P(torch.arange(8.0))",
        "self.late = nn.Identity()",
        "self.fc1.bias = None",
        "del self.fc1.bias",
        "self.fc2.bias = None",
        "self.fc1.bias = P(torch.ones(1))",
        "self.fc1.register_parameter('extra', P(torch.ones(1)))",
    ),
    "Looping": (
        "self.steps.append(nn.Linear(8, 8))",
        "self.steps.pop(-1) if hasattr(self.steps, 'pop') else self.steps.__delitem__(-1)",
        "self.steps._modules = dict(zip('01', reversed(self.steps._modules.values())))",
        "self.steps[1] = self.steps[0]",
        "self.steps = nn.ModuleList(list(self.steps) + [nn.Identity()])",
        "self.steps[0] = nn.Sequential(self.steps[0], nn.Tanh())",
        "self.gains.append(P(torch.full((8,), 2.5)))",
        "self.gains[0] = P(torch.full((8,), 2.5))",
        "self.gains[1] = self.gains[0]",
        "self.register_buffer('second', torch.ones(8))",
        "del self.offset",
        "self.table['more'] = nn.Linear(8, 8)",
        "self.table['out'] = nn.Identity()",
        "del self.table['out']",
    ),
    "Own": (
        "self.fc2.weight = self.fc1.weight",
        "self.fc2.bias = self.fc1.bias",
        "self.norm.bias = self.norm.weight",
        "self.fc1.bias = self.norm.bias",
        "self.fc2 = self.fc1",
        "self.fc1.weight.data = self.fc1.weight.data.t()",
        "self.fc1.weight = model.layers[0].fc1.weight",
        "self.fc1 = model.layers[0].fc1",
        "model.layers[1] = model.layers[0]",
    ),
    "OwnTied": ("self.fc2.weight = P(self.fc2.weight.detach().clone() * 2)", "self.fc2 = nn.Linear(8, 8)"),
    "Identities": (
        "self.fc2.weight = self.fc1.weight",
        "self.fc2 = self.fc1",
        "self.fc2.weight.data = self.fc1.weight.data",
    ),
    "Two": (
        "self.fc2 = nn.Linear(8, 8)",
        "self.fc1 = nn.Linear(8, 8)",
        "self.fc2 = copy.deepcopy(self.fc1)",
        "self.fc1.bias = None",
        "self.out = self.fc1",
    ),
    "Flags": (
        "self.drop.eval()",
        "self.drop.p = 0.5",
        "self.drop.p = 0",
        "self.norm.eval()",
        "self.norm.momentum = None",
        "self.norm.eps = 0.1",
        "self.norm.track_running_stats = False",
        "self.norm.running_mean = None; self.norm.running_var = None",
        "self.act = nn.GELU('tanh')",
        "self.act.approximate = 'tanh'",
        "self.eval()",
        "self.training = False",
    ),
    "Frozen": ("self.fc1.weight.requires_grad_(False)", "self.requires_grad_(False)", "model.requires_grad_(False)"),
    "Attended": (
        "self.q_proj.bias = P(torch.ones(8))",
        "self.q_proj.bias = P(torch.ones(8)); self.k_proj.bias = P(torch.ones(8))",
        "self.q_proj = nn.Linear(8, 8, bias=True)",
        "self.k_proj = self.q_proj",
        "self.k_proj.weight = self.q_proj.weight",
        "self.act = F.relu",
        "self.act = functools.partial(F.gelu, approximate='tanh')",
        "self.act = nn.GELU()",
        "self.act = lambda x: x * 2",
        "self.scale = 1.0",
        "self.scale = 2",
        "self.scale = torch.tensor(2.0)",
        "self.norm.eps = 0.5",
        "self.norm.weight = None; self.norm.bias = None",
        "self.norm.bias = None",
        "self.norm.normalized_shape = (4,)",
        "self.norm = nn.LayerNorm(8, elementwise_affine=False)",
        "self.norm = nn.RMSNorm(8)",
        "self.norm = nn.Identity()",
        "self.drop = nn.Identity()",
        "self.drop = nn.Dropout(0.9)",
        "self.drop = None",
        "self.drop.p = 0.9",
        "self.drop.p = 1.0",
        "self.drop.inplace = True",
        "self.drop.eval()",
        "self.fc1 = Doubled(8, 16)",
        "self.fc1.__class__ = Doubled",
        "self.fc1 = nn.Sequential(self.fc1)",
        "self.fc1 = nn.Linear(8, 16).double()",
        "self.fc1.double()",
        "self.fc1.bfloat16()",
        "self.fc1.weight = P(self.fc1.weight.detach() * 2)",
        "self.fc1.weight.data = self.fc1.weight.data * 2",
        "self.fc1.weight.data = self.fc1.weight.data.t().contiguous().t()",
        "self.fc1.weight.requires_grad_(False)",
        "self.fc1.bias.requires_grad_(False)",
        "self.fc1.bias = None",
        "del self.fc1.bias",
        "del self.fc1",
        "self.fc1.bias = P(torch.ones(16)[:1])",
        "swapped(self.fc1.weight)",
        "self.fc1.weight.register_hook(lambda grad: grad * 2)",
        "self.fc1.forward = lambda x: F.linear(x, self.fc1.weight) * 2",
        "self.forward = lambda x, mask=None: x * 2",
        "self.forward = types.MethodType(module.Attended.forward, self)",
        "self.fc1.register_forward_hook(lambda *given: given[-1] * 2)",
        "self.fc1.register_forward_pre_hook(lambda part, given: (given[0] * 2,))",
        "self.fc1.register_forward_hook(lambda *given: None).remove()",
        "self.fc1.register_full_backward_hook(lambda part, ins, outs: tuple(each * 2 for each in ins))",
        "self.fc1.register_full_backward_pre_hook(lambda part, outs: tuple(each * 2 for each in outs))",
        "self.register_forward_hook(lambda *given: given[-1] * 2)",
        "self.register_forward_pre_hook(lambda part, given: (given[0] * 2,))",
        "self.register_full_backward_hook(lambda part, ins, outs: tuple(each * 2 for each in ins))",
        "self.drop.register_forward_hook(lambda *given: given[-1] * 2)",
        "self.drop.register_forward_hook(lambda part, ins, out: part.__dict__.setdefault('seen', []).append(1))",
        "self.norm.register_forward_hook(lambda *given: given[-1] * 2)",
        "nn.utils.parametrizations.weight_norm(self.fc1)",
        "nn.utils.parametrize.register_parametrization(self.fc1, 'weight', nn.Tanh())",
        "nn.utils.parametrize.register_parametrization(self.fc1, 'bias', nn.Tanh())",
        "nn.utils.prune.l1_unstructured(self.fc1, 'weight', 0.5)",
        "nn.utils.parametrizations.spectral_norm(self.fc1)",
        "self.fc2.load_state_dict({'weight': torch.ones(8, 16), 'bias': torch.ones(8)}, assign=True)",
        "self.fc2.load_state_dict({'weight': torch.ones(8, 16), 'bias': torch.ones(8)})",
        "self.fc1, self.fc2 = nn.Linear(8, 4), nn.Linear(4, 8)",
        "self.double()",
        "self.bfloat16(); self.float()",
        "self.eval()",
        "self.train(False); self.drop.train()",
        "self.drop.training = 0",
        "self.to('meta')",
        "self.register_module('late', nn.Linear(2, 2))",
        "self.fc1.register_buffer('late', torch.ones(1))",
        "self.__class__ = type('Other', (module.Attended,), {'forward': lambda self, x: x * 2})",
        "self.__class__ = type('Other', (module.Attended,), {})",
    ),
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
