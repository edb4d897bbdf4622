"""Layers whose forwards change Python state: loaded twice, once a world."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8
LOG: list[Any] = []
COUNTS: dict[str, int] = {}
SEEN: set[int] = set()
CALLS = 0
_logger = logging.getLogger("adversary.layers")


class Stack(nn.Module):
    """Two layers of one class."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([cls() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class Effect(nn.Module):
    """An MLP with a side effect between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.odd()

    def odd(self) -> None:
        """Set what is odd up."""

    def effect(self, hidden: torch.Tensor) -> Any:
        """Do it; what is returned is the new ``hidden``."""
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An MLP with a residual."""
        return x + self.drop(self.fc2(self.effect(F.gelu(self.fc1(x)))))


class ListAppend(Effect):
    def odd(self) -> None:
        self.seen: list[Any] = []

    def effect(self, hidden: torch.Tensor) -> Any:
        self.seen.append(tuple(hidden.shape))
        return hidden


class ListAppendTensor(ListAppend):
    def effect(self, hidden: torch.Tensor) -> Any:
        self.seen.append(hidden.detach().mean())
        return hidden


class DictSet(Effect):
    def odd(self) -> None:
        self.seen: dict[str, Any] = {"last": None}

    def effect(self, hidden: torch.Tensor) -> Any:
        self.seen["last"] = hidden.shape[0]
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        return hidden


class DictSetTensor(DictSet):
    def effect(self, hidden: torch.Tensor) -> Any:
        self.seen["last"] = hidden.detach()
        return hidden


class SetAdd(Effect):
    def odd(self) -> None:
        self.seen: set[int] = set()

    def effect(self, hidden: torch.Tensor) -> Any:
        self.seen.add(hidden.dim())
        return hidden


class Counter(Effect):
    def odd(self) -> None:
        self.calls = 0

    def effect(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return hidden


class CounterRead(Counter):
    def effect(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return hidden * self.calls


class CounterUp(Counter):
    """Counts on a child and in an object."""

    def odd(self) -> None:
        self.fc1.calls = 0
        self.box = [0]

    def effect(self, hidden: torch.Tensor) -> Any:
        self.fc1.calls += 1
        self.box[0] += 1
        return hidden


class Buffer(Effect):
    def odd(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def effect(self, hidden: torch.Tensor) -> Any:
        self.count += 1
        return hidden * self.count


class BufferReplaced(Buffer):
    def effect(self, hidden: torch.Tensor) -> Any:
        self.count = self.count + 1
        return hidden * self.count


class Average(Effect):
    def odd(self) -> None:
        self.register_buffer("mean", torch.zeros(2 * WIDTH))

    def effect(self, hidden: torch.Tensor) -> Any:
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().flatten(0, -2).mean(0), alpha=0.1)
        return hidden - self.mean


class Kept(Effect):
    """Keeps its activations."""

    def odd(self) -> None:
        self.last: Any = None

    def effect(self, hidden: torch.Tensor) -> Any:
        self.last = hidden
        return hidden


class KeptRead(Kept):
    """Adds what it kept."""

    def effect(self, hidden: torch.Tensor) -> Any:
        if self.last is not None and self.last.shape == hidden.shape:
            hidden = hidden + self.last
        self.last = hidden.detach()
        return hidden


class GlobalAppend(Effect):
    def effect(self, hidden: torch.Tensor) -> Any:
        LOG.append(hidden.dim())
        return hidden


class GlobalCount(Effect):
    def effect(self, hidden: torch.Tensor) -> Any:
        global CALLS
        CALLS += 1
        COUNTS["calls"] = COUNTS.get("calls", 0) + 1
        SEEN.add(hidden.dim())
        return hidden


class ClassCount(Effect):
    total = 0

    def effect(self, hidden: torch.Tensor) -> Any:
        type(self).total += 1
        return hidden


class Printing(Effect):
    def effect(self, hidden: torch.Tensor) -> Any:
        print("called", hidden.dim())
        return hidden


class Logging(Effect):
    def effect(self, hidden: torch.Tensor) -> Any:
        _logger.warning("called with %d dimensions", hidden.dim())
        return hidden


class Warning_(Effect):
    def effect(self, hidden: torch.Tensor) -> Any:
        warnings.warn("called", stacklevel=1)
        return hidden


class InPlace(Effect):
    """Writes into an activation."""

    def effect(self, hidden: torch.Tensor) -> Any:
        hidden = hidden * 1.0
        hidden[..., 0] = 0.0
        hidden.mul_(2.0)
        return hidden


class Mutating(nn.Module):
    """Changes what it is given: a tensor, a list, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, into: torch.Tensor, seen: Any, table: Any) -> torch.Tensor:
        """Write to all of them."""
        hidden = F.gelu(self.fc1(x))
        into.add_(1.0)
        seen.append(hidden.dim())
        table["mean"] = hidden.detach().mean()
        return self.fc2(hidden)


class MutatingTensor(nn.Module):
    """Changes a tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Write to it before and after."""
        into.add_(1.0)
        hidden = F.gelu(self.fc1(x))
        into[0] = 0.5
        return self.fc2(hidden) * into.mean()


class ReturnsState(nn.Module):
    """Returns objects of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.table, self.register = {"k": 1.0}, [1, 2]
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        """Objects with an identity."""
        out = self.fc2(F.gelu(self.fc1(x)))
        return {
            "out": out,
            "table": self.table,
            "list": self.register,
            "offset": self.offset,
            "w": self.fc1.weight,
            "x": x,
        }


class Branching(nn.Module):
    """Branches on data after children with effects: the graph must not run them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.counter = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Another branch for negative inputs."""
        hidden = F.gelu(self.fc1(x))
        hidden = self.counter(self.drop(self.norm(hidden.flatten(0, -2)).view_as(hidden)))
        if x.sum() > 1000.0:
            hidden = hidden * 2.0
        return self.fc2(hidden)


class Counting(nn.Module):
    """A child that counts its calls, in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        self.calls += 1
        self.seen.append(x.dim())
        return x * 1.5


class Parent(nn.Module):
    """Calls a child that counts, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.counter = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through the child, around a GELU."""
        return self.fc2(self.counter(F.gelu(self.fc1(self.counter(x)))))


class OwnGenerator(Effect):
    """Draws by a generator of its own."""

    def odd(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def effect(self, hidden: torch.Tensor) -> Any:
        return hidden + torch.rand(hidden.shape, generator=self.generator)


class Noise(Effect):
    def effect(self, hidden: torch.Tensor) -> Any:
        return hidden + 0.1 * torch.randn_like(hidden)


class Iterating(Effect):
    """Takes from an iterator of its own."""

    def odd(self) -> None:
        self.stream = [3.0, 2.0, 1.0] * 20

    def effect(self, hidden: torch.Tensor) -> Any:
        return hidden * self.stream.pop()


class Raising(Effect):
    """Raises on a setting."""

    def odd(self) -> None:
        self.limit = 10

    def effect(self, hidden: torch.Tensor) -> Any:
        if hidden.shape[0] > self.limit:
            raise ValueError("too many rows")
        return hidden


class GradSwitch(Effect):
    """Switches gradients off for a part."""

    def effect(self, hidden: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = hidden.abs().max()
        return hidden / scale


class LazyInit(Effect):
    """Makes a buffer when it is first called."""

    def odd(self) -> None:
        self.cache = None

    def effect(self, hidden: torch.Tensor) -> Any:
        if self.cache is None or self.cache.shape[0] != hidden.shape[-2]:
            self.cache = torch.arange(hidden.shape[-2], dtype=hidden.dtype)[:, None]
        return hidden + self.cache


class TensorHook(Effect):
    """Registers a hook on an activation."""

    def odd(self) -> None:
        self.seen: list[Any] = []

    def effect(self, hidden: torch.Tensor) -> Any:
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.seen.append(grad.dim()))
        return hidden
