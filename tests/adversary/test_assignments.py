"""Assignments that a class makes something else of, and exceptions that a forward handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from tests.adversary.readings import Reading, as_untouched

pytestmark = pytest.mark.filterwarnings("ignore")

# -- assignments --------------------------------------------------------------------------------------------------


class Assigning(nn.Module):
    """Assigns through what its class makes of an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 16), nn.Linear(16, 4)
        self.__dict__["_s"] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.nn.functional.gelu(self.fc1(x)))
        self.s = 3.0
        return y + self._s


class ByProperty(Assigning):
    @property
    def s(self) -> float:
        return float(self._s)

    @s.setter
    def s(self, value: float) -> None:
        self._s = value * 2


class BySetattr(Assigning):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "s":
            self.__dict__["_s"] = value * 2
        else:
            super().__setattr__(name, value)


class Doubling:
    def __set__(self, owner: Any, value: float) -> None:
        owner.__dict__["_s"] = value * 2


class ByDescriptor(Assigning):
    s = Doubling()  # type: ignore[assignment]


class BySlot(Assigning):
    __slots__ = ("s",)


@pytest.mark.parametrize("cls", [ByProperty, BySetattr, ByDescriptor, BySlot])
def test_assignments_do_what_the_class_makes_of_them(cls: type[Assigning]) -> None:
    module, twin, x = cls(), cls(), torch.randn(2, 4)
    twin.load_state_dict(module.state_dict())
    schedule.optimize(module, x, cost_guard=False)
    assert hasattr(module, "s") == hasattr(twin, "s"), "scheduling leaves nothing behind"
    for _ in range(2):
        torch.testing.assert_close(module(x), twin(x))
        assert (module._s, getattr(module, "s", None)) == (twin._s, getattr(twin, "s", None))
        module.__dict__["_s"] = twin.__dict__["_s"] = 7.0


# -- exceptions ----------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("asked to")
        return x


class Handling(nn.Module):
    """Computes in a block whose exceptions it handles."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.child = nn.Linear(4, 16), nn.Linear(16, 4), Failing()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.nn.functional.gelu(self.fc1(x)))
        try:
            y = self.child(y)
        except ValueError:
            y = y * 2
        return y


def test_an_exception_that_the_forward_handles() -> None:
    module, twin, x = Handling(), Handling(), torch.randn(2, 4)
    twin.load_state_dict(module.state_dict())
    report = schedule.optimize(module, x, cost_guard=False)
    assert "handles exceptions" in str(report)
    module.child.fails = twin.child.fails = True
    torch.testing.assert_close(module(x), twin(x))


def test_a_lookup_that_fails_and_is_handled_is_followed() -> None:
    def read(m: Any) -> float:
        try:
            return float(m.held["k"])
        except KeyError:
            return 2.0

    as_untouched(Reading(read, held={}), lambda m: m.held.update(k=3.0))


class Dividing(nn.Module):
    """Divides sizes by a number in such a block, as einops does."""

    def __init__(self, evenly: bool) -> None:
        super().__init__()
        self.evenly = evenly

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        evenly = self.evenly
        try:
            half = x.shape[0] // 2 if evenly else x.shape[0] // (y.shape[0] - 2)
        except ZeroDivisionError:
            half = 1
        return torch.nn.functional.gelu(x[:half])


def test_a_division_that_may_raise_in_a_block_that_handles_it() -> None:
    dividing = schedule.create_schedule(Dividing(True), (torch.randn(4, 3), torch.randn(3, 3)))
    assert dividing.trace().graph
    with pytest.raises(schedule.TraceError, match="handles exceptions"):
        schedule.create_schedule(Dividing(False), (torch.randn(4, 3), torch.randn(3, 3))).trace()
