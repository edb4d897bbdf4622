"""The class of a scheduled module does what the class it stands for does."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import schedule
from schedule.runtime.scheduled import state_of
from tests.adversary.fused_models import fused, is_clean, mlp_of
from tests.small import Mlp, ids
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN = torch.linspace(-1, 1, 160).reshape(2, 5, 16)


# -- construction and subclasses -----------------------------------------------------------------------------


def test_the_class_constructs_the_original() -> None:
    model, _ = fused()
    cls = type(mlp_of(model))
    assert cls is not Mlp
    made = cls(16)
    assert type(made) is Mlp and state_of(made) is None
    made.load_state_dict(mlp_of(model).state_dict())
    torch.testing.assert_close(made(HIDDEN), mlp_of(model)(HIDDEN))
    assert inspect.signature(cls) == inspect.signature(Mlp)
    assert inspect.signature(cls.__init__) == inspect.signature(Mlp.__init__)


def test_transformers_construct_and_load_through_it(tmp_path: Path) -> None:
    model = build("gpt2")
    original = type(model)
    schedule.optimize(model, batch("gpt2"), cost_guard=False)
    assert state_of(model) is not None
    inputs = {"input_ids": batch("gpt2")["input_ids"]}
    model.eval().save_pretrained(tmp_path)
    for made in (
        type(model)(model.config),
        type(model)._from_config(model.config),
        type(model).from_pretrained(tmp_path),
    ):
        assert type(made) is original
        assert made.eval()(**inputs).logits.shape == model(**inputs).logits.shape
    torch.testing.assert_close(made(**inputs).logits, model(**inputs).logits)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(made.generate(**inputs, **options), model.generate(**inputs, **options))


def test_subclasses_are_subclasses_of_the_original() -> None:
    model, _ = fused()

    class Doubling(type(mlp_of(model))):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.factor = 2

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * self.factor

    made = Doubling(16)
    assert type(made) is Doubling and isinstance(made, Mlp) and state_of(made) is None
    made.load_state_dict(mlp_of(model).state_dict())
    torch.testing.assert_close(made(HIDDEN), 2 * mlp_of(model)(HIDDEN))
    again = copy.deepcopy(made)
    assert type(again) is Doubling
    torch.testing.assert_close(again(HIDDEN), made(HIDDEN))


def test_a_subclass_of_a_scheduled_class_is_scheduled_for_itself() -> None:
    """The graphs of its forward are not run by the forward that it calls with ``super()``."""
    model, _ = fused()

    class Doubling(type(mlp_of(model))):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 2

    made = Doubling(16).eval()
    expected = made(HIDDEN)
    sch = schedule.create_schedule(made, HIDDEN)
    schedule.optimize(made, HIDDEN, cost_guard=False)
    torch.testing.assert_close(made(HIDDEN), expected)
    torch.testing.assert_close(made(HIDDEN.double().float()[:1]), expected[:1])
    assert isinstance(made, Doubling) and sch.module is made


class _Registered(nn.Module):
    """Knows its subclasses."""

    known: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__ in _Registered.known:
            raise ValueError(f"{cls.__name__} is registered twice")
        _Registered.known.append(cls.__name__)


class Gelu(_Registered):
    """Bias and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(16, 16), nn.GELU(approximate="tanh")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(hidden))


def test_a_class_that_registers_subclasses_does_not_hear_of_ours() -> None:
    model = Gelu()
    sch = schedule.create_schedule(model, HIDDEN)
    sch.fuse(sch.find("bias_gelu_tanh", expect=1))
    assert _Registered.known.count("Gelu") == 1 and state_of(model) is not None


# -- torch.fx and torch.jit ----------------------------------------------------------------------------------


def test_torch_fx_traces_the_original() -> None:
    model, sch = fused()
    ours = fx.symbolic_trace(mlp_of(model))
    sch.undo()
    theirs = fx.symbolic_trace(mlp_of(model))
    assert ours.code == theirs.code
    torch.testing.assert_close(ours(HIDDEN), theirs(HIDDEN))


class KeywordOnly(nn.Module):
    """Has an argument that is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(16, 16), nn.GELU(approximate="tanh")

    def forward(self, hidden: torch.Tensor, *, scale: float = 2.0, bias: float = 1.0) -> torch.Tensor:
        return self.act(self.fc(hidden)) * scale + bias


class Variable(KeywordOnly):
    """Takes more than it uses."""

    def forward(self, hidden: torch.Tensor, *rest: Any, **further: Any) -> torch.Tensor:
        return self.act(self.fc(hidden))


@pytest.mark.parametrize("cls", [KeywordOnly, Variable])
def test_torch_fx_traces_keyword_only_and_variable_arguments(cls: type[nn.Module]) -> None:
    model = cls().eval()
    theirs, expected = fx.symbolic_trace(model), model(HIDDEN)
    sch = schedule.create_schedule(model, HIDDEN)
    sch.fuse(sch.find("bias_gelu_tanh", expect=1))
    assert fx.symbolic_trace(model).code == theirs.code
    torch.testing.assert_close(model(HIDDEN), expected)
    assert state_of(model).fallbacks == 0


@pytest.mark.parametrize("path", ["blocks.0.mlp", "blocks.0"])
def test_torch_jit_compiles_the_original(path: str) -> None:
    model, sch = fused()
    block = model.get_submodule(path)
    expected = block(HIDDEN)
    ours = torch.jit.script(block)
    assert state_of(mlp_of(model)) is not None, "compiling leaves the model as it is"
    torch.testing.assert_close(ours(HIDDEN), expected)
    sch.undo()
    assert ours.code == torch.jit.script(block).code


@pytest.mark.parametrize("path", ["blocks.0.mlp", "blocks.0", ""])
def test_torch_jit_traces_the_original(path: str) -> None:
    model, sch = fused()
    module = model.get_submodule(path)
    inputs = (HIDDEN,) if path else tuple(ids().values())
    ours = torch.jit.trace(module, inputs, check_trace=False)
    assert "forward" not in vars(mlp_of(model)) and state_of(mlp_of(model)).fallbacks == 0
    sch.undo()
    theirs = torch.jit.trace(module, inputs, check_trace=False)
    kinds = [[node.kind() for node in traced.inlined_graph.nodes()] for traced in (ours, theirs)]
    assert kinds[0] == kinds[1]


def _closed_over(final: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(16, 16), nn.GELU(approximate="tanh")

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return final(self.act(self.fc(hidden)))

    return Scaled()


def test_a_forward_with_a_closure_is_compiled_as_well() -> None:
    model = _closed_over(torch.tanh).eval()
    expected = torch.jit.script(model)(HIDDEN)
    sch = schedule.create_schedule(model, HIDDEN)
    sch.fuse(sch.find("bias_gelu_tanh", expect=1))
    torch.testing.assert_close(torch.jit.script(model)(HIDDEN), expected)
    torch.testing.assert_close(model(HIDDEN), expected)


def test_what_inspects_the_class_sees_the_original() -> None:
    model, _ = fused()
    mlp = mlp_of(model)
    assert type(mlp).__name__ == "Mlp" and type(mlp).__module__ == Mlp.__module__ and isinstance(mlp, Mlp)
    assert inspect.getsource(type(mlp).forward) == inspect.getsource(Mlp.forward)
    assert inspect.getsource(type(mlp)) == inspect.getsource(Mlp)
    assert inspect.signature(mlp.forward) == inspect.signature(Mlp(16).forward)
    assert type(mlp).forward.__qualname__ == "Mlp.forward"
    assert inspect.get_annotations(type(mlp).forward) == inspect.get_annotations(Mlp.forward)


# -- copies --------------------------------------------------------------------------------------------------


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Sized(Gelu):
    """Made with an argument of ``__new__``."""

    def __new__(cls, width: int) -> Sized:
        self = super().__new__(cls)
        object.__setattr__(self, "width", width)
        return self

    def __init__(self, width: int) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[int]:
        return (self.width,)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, _pickled, _saved])
@pytest.mark.parametrize("make", [Gelu, lambda: Sized(3)])
def test_copies_are_scheduled(again: Callable[[Any], Any], make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    original = type(model)
    sch = schedule.create_schedule(model, HIDDEN)
    sch.fuse(sch.find("bias_gelu_tanh", expect=1))
    twin = again(model)
    assert state_of(twin) is not None and type(twin) is type(model) and isinstance(twin, original)
    assert torch.equal(twin(HIDDEN), model(HIDDEN))
    sch.undo()
    assert is_clean(model) and state_of(twin) is not None


@pytest.mark.slow
def test_nothing_grows_and_tracebacks_show_generated_lines() -> None:
    """In a process of its own: here every schedule that is made is held until its test is over."""
    run = subprocess.run([sys.executable, "-m", "tests.adversary.growth"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
