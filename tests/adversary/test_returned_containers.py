"""Lists, dicts and dataclasses that a submodule returns and keeps, changed by other code or by the forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.util.errors import ScheduleError
from tests.adversary.changing import Child, Read, running_graphs


class Keeping(nn.Module):
    """Returns a container that it keeps."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.proj, self.made, self.kept = nn.Linear(4, 4), made, None

    def forward(self, x: Tensor) -> Any:
        self.kept = self.made(self.proj(x), x * 2)
        return self.kept


@dataclasses.dataclass
class Pair:
    """A result with two fields."""

    first: Tensor
    second: Tensor


def change_list(m: Any) -> None:
    m.keeping.kept[1] = m.keeping.kept[0]


def change_nested(m: Any) -> None:
    m.keeping.kept[1].append(m.keeping.kept[0])


def change_dict(m: Any) -> None:
    m.keeping.kept["second"] = m.keeping.kept["first"]


def change_field(m: Any) -> None:
    m.keeping.kept.second = m.keeping.kept.first


RETURNED: dict[str, tuple[Any, Read, Callable[[Any], None]]] = {
    "list": (lambda a, b: [a, b], lambda r: r[1], change_list),
    "length": (lambda a, b: [a, [b]], lambda r: r[0] * len(r[1]), change_nested),
    "in a tuple": (lambda a, b: (a, [b]), lambda r: r[1][-1], change_nested),
    "dict": (lambda a, b: {"first": a, "second": b}, lambda r: r["second"], change_dict),
    "dataclass": (Pair, lambda r: r.second, change_field),
}


class ReadingReturned(nn.Module):
    """Reads what one submodule returned after the call of another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        made, self.read, _ = RETURNED[name]
        self.keeping, self.child = Keeping(made), Child([self])

    def forward(self, x: Tensor) -> Tensor:
        result = self.keeping(x)
        y = self.child(x)
        return torch.tanh(y * self.read(result))


@pytest.mark.parametrize("name", RETURNED)
def test_a_container_that_one_submodule_returned_and_another_changes(name: str) -> None:
    module = ReadingReturned(name)
    twin, x = running_graphs(module)
    torch.testing.assert_close(module(x), twin(x))
    module.child.change = RETURNED[name][2]
    with pytest.raises(ScheduleError, match="keeping returned was changed"):
        module(x)


class ChangingReturned(nn.Module):
    """Changes what a submodule returned, and keeps."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any], change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.keeping, self.change = Keeping(made), change

    def forward(self, x: Tensor) -> Tensor:
        result = self.keeping(x)
        self.change(result, x)
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (lambda a, b: [a, b], lambda r, x: r.append(x)),
        (lambda a, b: [a, b], lambda r, x: r.__setitem__(0, x)),
        (lambda a, b: (a, [b]), lambda r, x: r[1].extend([x])),
        (lambda a, b: {"a": a}, lambda r, x: r.update(b=x)),
    ],
)
def test_a_forward_that_changes_what_a_submodule_returned_is_refused(
    made: Callable[[Tensor, Tensor], Any], change: Callable[[Any, Tensor], Any]
) -> None:
    sch = schedule.create_schedule(ChangingReturned(made, change), (torch.randn(2, 4),))
    with pytest.raises(ScheduleError, match="the result of a submodule"):
        sch.trace()
