"""Layers whose forwards read Python state: loaded twice by the harness, once a world."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8
FACTOR = 1.5
TABLE: dict[str, Any] = {"factor": 1.5, "list": [1.0, 2.0]}


def factor() -> float:
    """A global function."""
    return 1.5


class Layer(nn.Module):
    """An MLP with GELU and a residual; what is odd about it happens in :meth:`twist`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.25)
        self.odd()

    def odd(self) -> None:
        """Set what is odd up."""

    def twist(self, hidden: torch.Tensor) -> Any:
        """Change ``hidden`` by what is odd."""
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape ending in the width."""
        hidden = F.gelu(self.fc1(self.norm(x)))
        return x + self.drop(self.fc2(self.twist(hidden)))


class Stack(nn.Module):
    """Three layers of one class."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([cls() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class Scalars(Layer):
    """Plain attributes of all kinds."""

    def odd(self) -> None:
        self.number, self.scale, self.flag, self.zero = 2, 1.5, True, 0.0
        self.mode, self.nothing, self.unread = "x", None, 3

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.flag:
            hidden = hidden * self.scale
        if self.mode == "x":
            hidden = hidden + self.number
        if self.nothing is None:
            hidden = hidden - 0.5
        return hidden / (hidden.abs() + 1.0) + torch.copysign(torch.tensor(0.25), torch.tensor(self.zero))


class Typed(Layer):
    """The type of a setting matters: integer division, identity, and what ``str`` makes of it."""

    def odd(self) -> None:
        self.value: Any = 2

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1.5 if isinstance(self.value, float) else 1.0) * len(str(self.value))


class Deep(nn.Module):
    """What sits two modules down."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.k = 1.5
        self.inner = Deep(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Identity."""
        return x


class Nested(Layer):
    """Reads ``self.a.inner.k``, of a module two modules down that is never called."""

    def odd(self) -> None:
        self.a = Deep(2)

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.a.inner.k + self.a.inner.inner.k


class Buried(Layer):
    """Reads from a list inside a dict inside a namespace."""

    def odd(self) -> None:
        self.space = types.SimpleNamespace(table={"x": [1.5, types.SimpleNamespace(k=2.0)]}, spare={"y": [1]})

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.space.table["x"][0] + self.space.table["x"][1].k


class PlainObject:
    """An object of a class of the user's."""

    kind = 1.0

    def __init__(self) -> None:
        self.k, self._hidden = 1.5, 2.0

    @property
    def hidden(self) -> float:
        """Reads what is hidden."""
        return self._hidden

    def times(self, value: Any) -> Any:
        """A method that reads the object."""
        return value * self.k


@dataclasses.dataclass
class Data:
    """A dataclass."""

    k: float = 1.5
    inner: Any = None


class Slotted:
    """An object without a dict."""

    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 1.5


class Magic:
    """Answers every name from a table."""

    def __init__(self) -> None:
        self.__dict__["table"] = {"k": 1.5}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(name) from None


class Described:
    """A descriptor that keeps its value elsewhere."""

    values: dict[str, float] = {"k": 1.5}  # noqa: RUF012 - shared on purpose

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self.values["k"]


class Wearing:
    """Has a descriptor."""

    k = Described()


class Objects(Layer):
    """Reads objects of many kinds."""

    def odd(self) -> None:
        self.plain, self.data, self.slotted, self.magic = PlainObject(), Data(inner=Data(2.0)), Slotted(), Magic()
        self.named = collections.namedtuple("Named", "k other")(1.5, 2.0)
        self.wearing = Wearing()

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.plain.times(hidden) + self.plain.hidden + self.plain.kind
        hidden = hidden * self.data.k + self.data.inner.k
        return hidden * self.slotted.k + self.magic.k * self.named.k + self.wearing.k


class Level(enum.Enum):
    """An enum whose members may be changed."""

    LOW = 1.5
    HIGH = 2.5


class Enums(Layer):
    """Reads a member of an enum."""

    def odd(self) -> None:
        self.level = Level.LOW

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (2.0 if self.level is Level.HIGH else 1.0) * self.level.value


class Containers(Layer):
    """Reads dicts, lists, a set and a deque, one of them long."""

    def odd(self) -> None:
        self.table, self.list, self.set = {"k": 1.5}, [1.5, 2.0], {1, 2}
        self.long = [1.0] * 300
        self.ordered = collections.OrderedDict(k=1.5)
        self.default = collections.defaultdict(float, k=1.5)
        self.queue = collections.deque([1.5])

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.table["k"] + sum(self.list) + (1.0 if 1 in self.set else 0.0) + self.long[280]
        return hidden + self.default["k"] + self.queue[0] + self.ordered["k"]


class HoldsTensors(Layer):
    """Reads a dict that holds a tensor."""

    def odd(self) -> None:
        self.tensors = {"gain": torch.full((2 * WIDTH,), 1.5), "k": 2.0}

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.tensors["gain"] + self.tensors["k"]


class HoldsModules(Layer):
    """Reads a dict and a list that hold modules, which nobody registers."""

    def odd(self) -> None:
        self.modules_too = {"act": nn.Tanh(), "k": 2.0}
        self.listed = [nn.Tanh()]

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        for each in self.listed:
            hidden = each(hidden)
        return self.modules_too["act"](hidden) * self.modules_too["k"]


class PlainTensor(Layer):
    """A tensor that is no parameter and no buffer."""

    def odd(self) -> None:
        self.gain = torch.full((2 * WIDTH,), 1.5)

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.gain is None else hidden * self.gain


class HeldTensor(Layer):
    """A tensor in an object."""

    def odd(self) -> None:
        self.holder = types.SimpleNamespace(gain=torch.full((2 * WIDTH,), 0.5))

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.holder.gain


class Closures(Layer):
    """Functions: in an attribute, partial, closed over something, a bound method of another object."""

    def odd(self) -> None:
        factor_, self.other = 1.5, PlainObject()

        def closed(value: Any) -> Any:
            return value * factor_

        self.closed, self.method = closed, self.other.times
        self.partial = functools.partial(torch.mul, other=1.5)
        self.deeper = functools.partial(lambda value, settings: value * settings["k"], settings={"k": 1.5})

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.deeper(self.partial(self.method(self.closed(hidden))))


class Globals(Layer):
    """Reads global variables, a global function, and the class."""

    constant = 1.5
    settings: dict[str, float] = {"k": 1.5}  # noqa: RUF012 - shared on purpose

    def odd(self) -> None:
        """Nothing of its own."""

    def helper(self, value: Any) -> Any:
        """A method that may be patched."""
        return value * 1.25

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.helper(hidden) * FACTOR + factor() + TABLE["factor"]
        return hidden * self.constant + type(self).settings["k"] + TABLE["list"][0]


class Config:
    """A config of nested configs."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Configured(Layer):
    """Reads a config's config's config, and a dict in it."""

    def odd(self) -> None:
        self.config = Config(scale=1.5, sub=Config(k=2.0, sub=Config(k=0.5, table={"k": 1.5})))

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.config.scale + self.config.sub.k
        return hidden * self.config.sub.sub.k + self.config.sub.sub.table["k"]


class Hidden(Layer):
    """A property and ``__getattr__`` of the module itself."""

    def odd(self) -> None:
        self._gain, self.extra = 1.5, {"k": 2.0}

    @property
    def gain(self) -> float:
        """Reads hidden state."""
        return self._gain * self.extra["k"]

    def __getattr__(self, name: str) -> Any:
        if name == "shadow":
            return self.extra["k"]
        return super().__getattr__(name)

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain + self.shadow


class Subclassed(Layer):
    """Has an object whose class, one per layer, holds the setting."""

    def odd(self) -> None:
        self.style = type("Style", (PlainObject,), {"kind": 1.5})()

    def twist(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.style.kind
