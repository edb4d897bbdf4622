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
from torch.nn.utils import parametrize

import schedule
from schedule.runtime import classes
from schedule.runtime.scheduled import state_of
from tests.distributed.launch import passes
from tests.small import Mlp, ids, small
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN = torch.linspace(-1, 1, 160).reshape(2, 5, 16)


def fused() -> tuple[nn.Module, schedule.Schedule]:
    """A model with scheduled MLPs, in evaluation."""
    torch.manual_seed(0)
    model = small().eval()
    sch = schedule.create_schedule(model, ids())
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
    return model, sch


def mlp_of(model: nn.Module) -> Any:
    return model.get_submodule("blocks.0.mlp")


def is_clean(model: nn.Module) -> bool:
    """Whether nothing of a schedule is left."""
    return not any(
        classes.STATE in vars(module) or any(classes.ORIGINAL in vars(cls) for cls in type(module).__mro__)
        for module in model.modules()
    )


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


# -- other swaps of the class --------------------------------------------------------------------------------


class Counts:
    """What a user mixes into the class of a module."""

    def calls(self) -> int:
        return 7


def _mixed(module: nn.Module) -> None:
    module.__class__ = type(f"Counting{type(module).__name__}", (Counts, type(module)), {})


def _parametrized(module: nn.Module) -> None:
    module.register_parameter("extra", nn.Parameter(torch.ones(2)))
    parametrize.register_parametrization(module, "extra", nn.Identity())


@pytest.mark.parametrize("order", ["before", "after"])
def test_undo_leaves_the_users_mixin(order: str) -> None:
    model = small().eval()
    if order == "before":
        _mixed(mlp_of(model))
    expected = model(**ids())
    sch = schedule.create_schedule(model, ids())
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
    if order == "after":
        _mixed(mlp_of(model))
    for _ in range(2):
        assert mlp_of(model).calls() == 7 and state_of(mlp_of(model)) is not None
        torch.testing.assert_close(model(**ids()), expected)
        sch.undo()
        assert mlp_of(model).calls() == 7 and is_clean(model) and isinstance(mlp_of(model), Mlp)
        assert type(mlp_of(model)).__name__ == "CountingMlp"
        torch.testing.assert_close(model(**ids()), expected)
        sch.redo()


def test_another_step_leaves_the_users_mixin() -> None:
    model, sch = fused()
    _mixed(mlp_of(model))
    sch["blocks.0.mlp"].checkpoint()
    assert mlp_of(model).calls() == 7
    sch.undo()
    assert mlp_of(model).calls() == 7
    sch.undo()
    assert mlp_of(model).calls() == 7 and is_clean(model)


def test_a_swap_that_is_taken_away_first() -> None:
    model, sch = fused()
    mlp = mlp_of(model)
    _parametrized(mlp)
    assert parametrize.is_parametrized(mlp)
    parametrize.remove_parametrizations(mlp, "extra")
    assert state_of(mlp) is not None
    sch.undo()
    assert type(mlp) is Mlp


@pytest.mark.parametrize("order", ["before", "after"])
def test_undo_leaves_parametrizations(order: str) -> None:
    model = small().eval()
    mlp = mlp_of(model)
    if order == "before":
        _parametrized(mlp)
    sch = schedule.create_schedule(model, ids())
    sch["blocks.0.mlp"].fuse(sch["blocks.0.mlp"].find("bias_gelu_tanh", expect=1))
    if order == "after":
        _parametrized(mlp)
    assert torch.equal(mlp.extra, torch.ones(2))
    sch.undo()
    assert is_clean(model) and parametrize.is_parametrized(mlp) and torch.equal(mlp.extra, torch.ones(2))
    parametrize.remove_parametrizations(mlp, "extra")
    assert type(mlp) is Mlp


def test_a_class_of_the_users_that_has_a_name_stays() -> None:
    """It is derived from the generated class, which behaves as the original from then on."""
    model, sch = fused()
    mlp = mlp_of(model)
    expected = mlp(HIDDEN)

    class Negated(type(mlp)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return -super().forward(hidden)

    mlp.__class__ = Negated
    torch.testing.assert_close(mlp(HIDDEN), -expected)
    sch.undo()
    assert type(mlp) is Negated and state_of(mlp) is None
    torch.testing.assert_close(mlp(HIDDEN), -expected)


def _fsdp(mesh: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for order in ("before", "after"):
        torch.manual_seed(0)
        model = small().eval()
        expected = model(**ids())
        if order == "before":
            fully_shard(mlp_of(model), mesh=mesh)
        sch = schedule.create_schedule(model, ids())
        mlps = sch["blocks.*"] if order == "before" else sch["blocks.*.mlp"]
        if order == "before":
            mlps.checkpoint()
            sch["blocks.0.mlp"].checkpoint()
        else:
            mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
            fully_shard(mlp_of(model), mesh=mesh)
        assert isinstance(mlp_of(model), FSDPModule) and state_of(mlp_of(model)) is not None
        torch.testing.assert_close(model(**ids()), expected)
        if order == "before":
            sch.undo()
        sch.undo()
        assert is_clean(model) and isinstance(mlp_of(model), FSDPModule) and isinstance(mlp_of(model), Mlp)
        mlp_of(model).reshard()
        torch.testing.assert_close(model(**ids()), expected)
        sch.redo()
        assert isinstance(mlp_of(model), FSDPModule) and not is_clean(model)
        torch.testing.assert_close(model(**ids()), expected)
        sch.undo()
        assert is_clean(model) and isinstance(mlp_of(model), FSDPModule)


def test_undo_leaves_fully_sharded_modules() -> None:
    passes(_fsdp)


# -- several schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["as made", "reversed"])
@pytest.mark.parametrize("same", [True, False])
def test_schedules_of_one_model_are_undone_in_any_order(order: str, same: bool) -> None:
    model = small().eval()
    expected = model(**ids())
    before = [(type(module), set(vars(module))) for module in model.modules()]
    first, second = (schedule.create_schedule(model, ids()) for _ in range(2))
    mlp = first["blocks.0.mlp"]
    mlp.fuse(mlp.find("bias_gelu_tanh", expect=1))
    second["blocks.0.mlp" if same else "blocks.1.mlp"].checkpoint()
    last = second if order == "as made" else first
    for sch in (first, second) if order == "as made" else (second, first):
        sch.undo()
        torch.testing.assert_close(model(**ids()), expected)
        if sch is not last:
            path = "blocks.1.mlp" if last is second and not same else "blocks.0.mlp"
            assert state_of(model.get_submodule(path)) is not None, "only the schedule's own steps are reverted"
    assert is_clean(model) and [(type(module), set(vars(module))) for module in model.modules()] == before


def test_what_lies_under_another_schedule_is_not_redone() -> None:
    model = small().eval()
    first, second = (schedule.create_schedule(model, ids()) for _ in range(2))
    mlp = first["blocks.0.mlp"]
    mlp.fuse(mlp.find("bias_gelu_tanh", expect=1))
    second["blocks.0.mlp"].checkpoint()
    first.undo()
    with pytest.raises(schedule.ScheduleError, match="another schedule changed what the Mlp runs"):
        first.redo()
    second.undo()
    first.redo()
    first.undo()
    assert is_clean(model)


def test_a_replacement_under_another_one_is_refused_and_nothing_changes() -> None:
    model = small().eval()
    original = mlp_of(model).act
    first = schedule.create_schedule(model, ids())
    first["blocks.0.mlp.act"].replace(nn.GELU(approximate="tanh"))
    second = schedule.create_schedule(model, ids())
    second["blocks.0.mlp.act"].replace(nn.ReLU())
    with pytest.raises(schedule.ScheduleError, match="replaced the GELU 'act' by a ReLU"):
        first.undo()
    assert len(first.history) == 1
    second.undo()
    first.undo()
    assert mlp_of(model).act is original


# -- memory --------------------------------------------------------------------------------------------------


def test_nothing_grows_and_tracebacks_show_generated_lines() -> None:
    """In a process of its own: here every schedule that is made is held until its test is over."""
    run = subprocess.run([sys.executable, "-m", "tests.adversary.growth"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
