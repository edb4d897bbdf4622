"""A graph runs for arguments of the kinds it was made for, also after calls of other kinds."""

from __future__ import annotations

import copy
import importlib
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import install, state_of


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x + pair[0] * pair[1]


X = torch.ones(2, 3)
RIGHT = (X, (X, X))
OTHERS: dict[str, Any] = {
    "dtype": (X.double(), (X, X)),
    "dtype in a tuple": (X, (X, X.int())),
    "rank": (X[0], (X, X)),
    "rank in a tuple": (X, (X, X[None])),
    "device": (X.to("meta"), (X.to("meta"), X.to("meta"))),
    "no tensor": (X, (X, 2.0)),
    "another length": (X, (X, X, X)),
    "nested": (torch.nested.nested_tensor([X, X]), (X, X)),
}


@pytest.fixture
def dispatched() -> Any:
    model = Sum().eval()
    recording = record(model, RIGHT)
    (call,) = recording.calls[model]
    install(model, [specialize(model, Sum.forward, call, recording, training=False)])
    select = state_of(model).select
    return lambda args: select(model, args, {}) is not None


@pytest.mark.parametrize("other", OTHERS)
def test_other_kinds_are_told_before_and_after(dispatched: Any, other: str) -> None:
    assert not dispatched(OTHERS[other])
    assert dispatched(RIGHT) and dispatched(RIGHT)
    assert not dispatched(OTHERS[other])
    assert dispatched(RIGHT)


def test_sizes_strides_and_gradients_are_free(dispatched: Any) -> None:
    long, parameter = torch.ones(4, 3), nn.Parameter(X)
    for args in (RIGHT, (long, (long, long)), (X.t(), (X.t(), X.t())), (parameter, (X, X)), RIGHT):
        for _ in range(2):
            assert dispatched(args)
            with torch.no_grad():
                assert dispatched(args)


class Flexible(nn.Module):
    """Takes arguments in every way that Python has."""

    def forward(
        self, x: torch.Tensor, /, y: float = 2.0, *more: float, z: float = 3.0, **others: float
    ) -> torch.Tensor:
        for number in (y, *more, z, *others.values()):
            x = x * 10 + number
        return x


class Calling(nn.Module):
    """Calls a module with fixed arguments."""

    def __init__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.called, self.args, self.kwargs = called, args, kwargs

    def forward(self) -> torch.Tensor:
        return self.called(*self.args, **self.kwargs)


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, 4.0), {}),
    ((X, 4.0, 5.0, 6.0), {}),
    ((X,), {"y": 4.0}),
    ((X,), {"z": 5.0, "y": 4.0}),
    ((X, 4.0, 5.0), {"z": 6.0, "last": 7.0}),
    ((X,), {"a": 1.0, "b": 2.0}),
    ((X,), {"b": 2.0, "a": 1.0}),
    ((X,), {"b": 2.0, "y": 5.0, "a": 1.0}),
    ((X,), {"x": 8.0}),
]


@pytest.mark.parametrize("usual", range(len(CALLS)))
def test_arguments_are_bound_as_python_binds_them(usual: int) -> None:
    """Whichever call was recorded, others run their own graph or the original, also if only their order differs."""
    model = Flexible().eval()
    args, kwargs = CALLS[usual]
    recording = record(Calling(model, args, kwargs), ())
    (call,) = recording.calls[model]
    install(model, [specialize(model, Flexible.forward, call, recording, training=False)])
    taken = []
    for number, (args, kwargs) in enumerate(CALLS):
        selected = state_of(model).selected(model, args, kwargs)
        if selected is not None:
            run, given = selected
            assert torch.equal(run(*given), Flexible().forward(*args, **kwargs))
            taken.append(number)
    assert usual in taken


def test_what_does_not_bind_is_not_taken() -> None:
    model = Flexible().eval()
    recording = record(model, (X,))
    (call,) = recording.calls[model]
    install(model, [specialize(model, Flexible.forward, call, recording, training=False)])
    assert state_of(model).selected(model, (), {"x": X}) is None
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()


class Unread(nn.Module):
    """Asks for the rank of its second argument if told so, and never for anything of the third."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, asks: bool) -> torch.Tensor:
        return x * y.dim() if asks else x * 2


@pytest.mark.parametrize("asks", [True, False])
def test_kinds_of_arguments_that_are_not_read_are_free(asks: bool) -> None:
    model = Unread().eval()
    recording = record(model, (X, X, X, asks))
    (call,) = recording.calls[model]
    install(model, [specialize(model, Unread.forward, call, recording, training=False)])
    state = state_of(model)
    assert state.selected(model, (X, X, X[0].int(), asks), {}) is not None
    assert (state.selected(model, (X, X[0], X, asks), {}) is None) is asks
    assert state.selected(model, (X, None, X, asks), {}) is None


NAMES = [
    "self",
    "_state",
    "_own",
    "_followed",
    "_args",
    "_kwargs",
    "_usual",
    "_bound",
    "_input_1",
    "_run_0",
    "_compiling",
]
NAMES += ["__unexpected__", "_unexpected", "_Tensor_0_of_0", "_default_scale", "torch", "inf", "x_", "x_1", "input"]
NAMES += ["len", "type", "isinstance", "tuple", "getattr_1", "linear", "output", "kwargs", "args"]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that generated code uses for something else."""
    (tmp_path / f"model_{name}.py").write_text(
        textwrap.dedent(f"""
            import torch.nn.functional as F
            from torch import nn

            class Model(nn.Module):
                def __init__(this):
                    super().__init__()
                    this.a, this.b = nn.Linear(8, 16), nn.Linear(16, 8)

                def forward(this, x, {name}, *, scale=1.0):
                    return this.b(F.gelu(this.a(x))) * {name} * scale
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module(f"model_{name}").Model
    torch.manual_seed(0)
    twin = made()
    model, x, y = copy.deepcopy(twin), torch.randn(2, 8), torch.randn(2, 8)
    report = schedule.optimize(model, (x, y), rules=["bias_gelu"], cost_guard=False)
    assert report.count("bias_gelu") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in ((x, y), (y, x)):
            torch.testing.assert_close(model(*given), twin(*given))
            if name != "self":  # which `nn.Module.__call__` has too
                torch.testing.assert_close(model(given[0], **{name: given[1]}), twin(*given))
            torch.testing.assert_close(model(*given, scale=2.0), twin(*given, scale=2.0))
