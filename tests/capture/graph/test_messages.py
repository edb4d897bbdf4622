"""Messages of a forward and blocks that set flags of torch are part of the graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import schedule

log = logging.getLogger(__name__)


class Speaking(nn.Module):
    """Calls ``speak`` between two operations."""

    def __init__(self, speak: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.speak = speak

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.fc(x))
        self.speak(x)
        return y + 1


def shout(x: Tensor) -> None:
    print("called", 1, sep="-")


def warn(x: Tensor) -> None:
    warnings.warn("called", FutureWarning)  # noqa: B028


def write(x: Tensor) -> None:
    log.warning("called %s times", 1)


def optimized(module: nn.Module) -> tuple[nn.Module, Tensor, schedule.Report]:
    x = torch.randn(4, 8)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, (x,), cost_guard=False)
    assert report.applied
    return module, x, report


def test_a_constant_is_printed_at_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    module, x, report = optimized(Speaking(shout))
    capsys.readouterr()
    for _ in range(3):
        module(x)
    assert capsys.readouterr().out == "called-1\n" * 3
    assert not report.fallbacks


@pytest.mark.parametrize("action, times", [("always", 3), ("default", 1)])
def test_a_warning_is_issued_where_the_forward_issues_it(action: Any, times: int) -> None:
    module, x, report = optimized(Speaking(warn))
    warn.__globals__.pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for _ in range(3):
            module(x)
    assert [each.category for each in caught] == [FutureWarning] * times
    assert all(each.filename == __file__ for each in caught)
    assert {each.lineno for each in caught} == {warn.__code__.co_firstlineno + 1}
    assert not report.fallbacks


def deprecate(x: Tensor) -> Tensor:
    warnings.warn("deprecated", FutureWarning, stacklevel=2)
    return x


def use(x: Tensor) -> Tensor:
    return deprecate(x)


def test_a_warning_names_the_caller_that_it_is_for() -> None:
    module, x, report = optimized(Speaking(use))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(x)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, use.__code__.co_firstlineno + 1)
    assert not report.fallbacks


class Around(nn.Module):
    """The caller of ``forward`` is torch, whose frames count too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Speaking(lambda x: warnings.warn("called", stacklevel=3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def test_a_warning_for_a_caller_outside_of_the_forward_is_refused() -> None:
    sch = schedule.create_schedule(Around(), (torch.randn(4, 8),))
    with warnings.catch_warnings(), pytest.raises(schedule.TraceError, match="or for its caller"):
        warnings.simplefilter("ignore")
        sch.trace(flatten=True)


def test_a_log_message_names_its_line(caplog: pytest.LogCaptureFixture) -> None:
    module, x, report = optimized(Speaking(write))
    caplog.clear()
    module(x), module(x)
    assert [each.getMessage() for each in caplog.records] == ["called 1 times"] * 2
    assert {(each.pathname, each.funcName) for each in caplog.records} == {(__file__, "write")}
    assert not report.fallbacks


@pytest.mark.parametrize(
    "speak",
    [
        lambda x: print(x.sum()),
        lambda x: warnings.warn("called", stacklevel=3),
        lambda x: log.warning("%s rows", x.shape[0]),
        lambda x: log.warning("called", exc_info=True),
    ],
)
def test_a_message_that_changes_is_refused(speak: Callable[[Tensor], Any]) -> None:
    module = Speaking(speak)
    sch = schedule.create_schedule(module, (torch.randn(4, 8),))
    with warnings.catch_warnings(), pytest.raises(schedule.TraceError, match="what may change from call to call"):
        warnings.simplefilter("ignore")
        sch.trace()


def test_a_message_that_names_a_size_names_the_size_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    module, _, report = optimized(Speaking(lambda x: print(f"{x.shape[0]} rows")))
    capsys.readouterr()
    for rows in (4, 3, 4):
        module(torch.randn(rows, 8))
    assert capsys.readouterr().out.splitlines() == ["4 rows", "3 rows", "4 rows"]
    assert list(report.fallbacks.values()) == [1]  # checking a graph of another size would print again


class Flagged(nn.Module):
    """Sets a flag of torch around its first operation and records what it was there."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inside = inside
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
            x = self.inside(x)
        return F.gelu(self.fc(x))


def test_flags_are_set_for_the_operations_in_the_block() -> None:
    module, x = Flagged(lambda x: torch.sin(x)), torch.randn(4, 8)
    sch = schedule.create_schedule(module, (x,))
    sch.trace()
    seen: list[bool] = []
    own = torch.sin

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is own:
                seen.append(torch.backends.cudnn.enabled)
            return func(*args, **(kwargs or {}))

    before = torch.backends.cudnn.enabled
    with Watched():
        sch.specializations[0].function(module, x)
    assert seen == [False]
    assert torch.backends.cudnn.enabled is before


def test_a_block_is_left_when_the_forward_raises() -> None:
    module, *_ = optimized(Flagged(lambda x: x @ torch.eye(8)))
    before = torch.backends.cudnn.enabled
    with pytest.raises(RuntimeError):
        module(torch.randn(4, 7))
    assert torch.backends.cudnn.enabled is before


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: x + 1 if torch.backends.cudnn.enabled else x,
        lambda x: x + 1 if torch.backends.cuda.flash_sdp_enabled() else x,
    ],
)
def test_a_flag_read_inside_such_a_block_is_refused(inside: Callable[[Tensor], Tensor]) -> None:
    sch = schedule.create_schedule(Flagged(inside), (torch.randn(4, 8),))
    with pytest.raises(schedule.TraceError, match="a flag of torch inside a block that sets such flags"):
        sch.trace()
