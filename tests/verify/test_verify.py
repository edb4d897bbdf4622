"""Verification of a schedule: it names the guilty step, keeps out of the way, and leaves no trace."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from schedule.report.headline import verified
from schedule.util.errors import NotApplicable, VerificationError
from schedule.verify import verify
from schedule.verify.preserve import preserved

from .models import Block, FakeSchedule, bert, floats, gpt2, token_batch
from .mutations import MUTATIONS, DropoutSkipped, ErfForTanh, MissingBias, WrongScale

pytestmark = pytest.mark.unwritable("its steps are of a fake primitive")


class Renamed(Block):
    """The same computation under another class, as a rewrite leaves behind."""


class Untrainable(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("there is no backward")


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything that must be as before: to the bit for tensors, by identity for objects."""
    rows: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    for name, module in model.named_modules():
        hooks = {k: dict(v) for k, v in module.__dict__.items() if "hooks" in k and isinstance(v, dict)}
        rows.append((name, type(module), module.training, hooks, sorted(module.__dict__)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        rows.append((name, id(tensor), tensor.data_ptr(), tensor.tolist(), grad, tensor.requires_grad))
    return rows


BATCH = floats(2, 6, 16)


class OnlyInference(Stack):
    """A model that raises in train mode and in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("there is no training")
        return Untrainable.apply(super().forward(x))


def test_without_training_only_inference_is_compared() -> None:
    sch = FakeSchedule(OnlyInference())
    sch.swap_class("h.0", Renamed, "fuse(first)")
    with pytest.raises(NotApplicable, match="there is no backward"):
        verify(sch, BATCH)
    check = verify(sch, BATCH, training=False)
    assert check and {case.mode for case in check.report.cases} == {"eval"} and len(check.report.cases) == 6
    kinds = {deviation.kind for case in check.report.cases for deviation in case.deviations}
    assert kinds <= {"output", "input after the call", "buffer"}
    assert "skipped train mode, gradients and updates" in str(check)
    assert "in eval mode only" in verified(check.report).note
    sch.swap_class("h.1", WrongScale, "fuse(second)")
    with pytest.raises(VerificationError, match=r"fuse\(second\) changed"):
        verify(sch, BATCH, training=False)


def test_a_right_schedule_passes_as_a_call_and_as_a_context() -> None:
    sch = FakeSchedule(Stack())
    sch.swap_class("h.0", Renamed, "fuse(first)")
    check = verify(sch, BATCH)
    assert check and len(check.report.cases) == 12
    with verify(sch, BATCH) as check:
        sch.swap_class("h.1", Renamed, "fuse(second)")
    assert len(sch.history) == 2 and check.report.equal
    assert type(sch.module.get_submodule("h.1")) is Renamed


def test_an_empty_schedule_is_the_original() -> None:
    assert "no primitive was applied" in str(verify(FakeSchedule(Stack()), BATCH))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_mutation_is_caught_and_its_step_named(mutation: type[Block]) -> None:
    sch = FakeSchedule(Stack())
    sch.swap_class("h.0", Renamed, "fuse(right)")
    sch.swap_class("h.1", mutation, "fuse(wrong)")
    sch.swap_class("h.2", Renamed, "fuse(right as well)")
    before = fingerprint(sch.module)
    with pytest.raises(VerificationError, match=r"^fuse\(wrong\) changed what the model computes"):
        verify(sch, BATCH)
    assert [step.description for step in sch.history] == ["fuse(right)", "fuse(wrong)", "fuse(right as well)"]
    assert fingerprint(sch.module) == before


def test_the_message_says_what_where_and_how_far() -> None:
    sch = FakeSchedule(Stack())
    sch.swap_class("h.2", MissingBias, "fuse(bias_gelu) on h.2")
    with pytest.raises(VerificationError) as caught:
        verify(sch, BATCH)
    text = str(caught.value)
    assert "h.2.up.bias" in text and "eval mode, own weights, output [2, 6, 16]" in text
    assert "step 1 of 1" in text and "fix:" in text
    sch = FakeSchedule(Stack())
    sch.swap_class("h.2", WrongScale, "fuse")
    with pytest.raises(VerificationError, match=r"max abs .* relative .* allowed"):
        verify(sch, BATCH)


def test_the_first_of_two_wrong_steps_is_named() -> None:
    sch = FakeSchedule(Stack())
    for path, cls, description in (("h.0", Renamed, "a"), ("h.1", ErfForTanh, "b"), ("h.2", WrongScale, "c")):
        sch.swap_class(path, cls, description)
    with pytest.raises(VerificationError, match=r"^c changed"):
        verify(sch, BATCH)  # with its own weights the wrong GELU of b is within rounding, so c comes first
    sch.undo()
    with pytest.raises(VerificationError, match=r"^b changed(.|\n)*perturbed weights"):
        verify(sch, BATCH)


def test_a_step_that_a_later_one_completes_is_not_blamed() -> None:
    sch = FakeSchedule(Stack())
    sch.swap_class("h.0", WrongScale, "shard")
    sch.swap_class("h.0", Renamed, "sync")
    sch.swap_class("h.1", WrongScale, "wrong")
    with pytest.raises(VerificationError, match=r"^wrong changed"):
        verify(sch, BATCH)


def test_the_users_own_exception_passes_and_nothing_is_checked() -> None:
    sch = FakeSchedule(Stack())
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, verify(sch, BATCH) as check:
        sch.swap_class("h.1", WrongScale, "wrong")
        raise error
    assert caught.value is error and caught.value.__context__ is None
    assert not check.report.cases and len(sch.history) == 1


def test_a_difference_is_found_on_the_way_out() -> None:
    sch = FakeSchedule(Stack())
    with (
        pytest.raises(VerificationError, match=r"^skips dropout changed(.|\n)*train mode"),
        verify(sch, BATCH),
    ):
        sch.swap_class("h.1", DropoutSkipped, "skips dropout")


class Moody(nn.Module):
    """Batch norm, a hook that removes itself, a cached attribute, a frozen part, and gradients of before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.still = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.still.requires_grad_(False)
        self.still.eval()
        handle = self.out.register_forward_hook(lambda *_: handle.remove())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.longest = max(getattr(self, "longest", 0), x.shape[0])
        return self.out(self.norm(x)) + self.still(torch.rand_like(x))


class MoodyTwin(Moody):
    pass


class MoodyBroken(Moody):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(("new", "fails"), [(MoodyTwin, False), (MoodyBroken, True)])
def test_nothing_is_left_behind(new: type[nn.Module], fails: bool) -> None:
    model = Moody()
    model.out.weight.grad = torch.ones(4, 4)
    model.norm.weight.grad = torch.ones(4)
    sch = FakeSchedule(model)
    sch.swap_class("", new, "swap")
    before = fingerprint(model)
    if fails:
        with pytest.raises(VerificationError, match=r"^swap changed what.*raises RuntimeError.*broken on purpose"):
            verify(sch, floats(5, 4))
    else:
        verify(sch, floats(5, 4))
    assert fingerprint(model) == before


def test_the_originals_refusal_is_told_and_all_steps_are_back() -> None:
    sch = FakeSchedule(Stack())
    sch.swap_class("h.0", Renamed, "fuse")
    before = fingerprint(sch.module)
    with pytest.raises(NotApplicable, match=r"RuntimeError.*normalized_shape"):
        verify(sch, floats(2, 6, 5))
    assert fingerprint(sch.module) == before and len(sch.history) == 1


def test_a_model_that_does_not_repeat_itself_is_not_blamed_on_a_step() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(time.perf_counter_ns())  # one that it held would be put back
            return super().forward(x) + torch.randn(x.shape, generator=generator)

    class NoisyTwin(Noisy):
        pass

    sch = FakeSchedule(Noisy(4, 4))
    sch.swap_class("", NoisyTwin, "innocent")
    with pytest.raises(VerificationError, match="does not repeat itself"):
        verify(sch, floats(2, 4))


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        sch = FakeSchedule(Stack())
    sch.swap_class("h.0", Renamed, "fuse")
    with pytest.raises(VerificationError, match="meta device"):
        verify(sch, BATCH)


@pytest.mark.parametrize("make", [gpt2, bert])
def test_real_architectures(make: Any) -> None:
    model = make()
    sch = FakeSchedule(model)
    module = next(m for m in model.modules() if hasattr(m, "act") or hasattr(m, "intermediate_act_fn"))
    name = "act" if hasattr(module, "act") else "intermediate_act_fn"
    old, new = getattr(module, name), nn.GELU("none" if name == "act" else "tanh")
    sch.apply("noop", lambda: None, lambda: None)
    sch.apply("other gelu", lambda: setattr(module, name, new), lambda: setattr(module, name, old))
    before = fingerprint(model)
    with pytest.raises(VerificationError, match=r"^other gelu changed"):
        verify(sch, token_batch())
    assert fingerprint(model) == before
    sch.undo()
    assert verify(sch, token_batch())


def test_views_of_one_weight_stay_views_inside() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(4, 2)
            self.a, self.b = nn.Parameter(whole[:2]), nn.Parameter(whole[1:])

    model = Views()
    with preserved(model), torch.no_grad():
        model.a[1] = 7.0
        assert model.b[0].tolist() == [7.0, 7.0]
    assert model.b[0].tolist() == [0.0, 0.0]


def test_no_grad_outside_does_not_matter() -> None:
    sch = FakeSchedule(Stack(1))
    sch.swap_class("h.0", MissingBias, "wrong")
    with torch.no_grad(), pytest.raises(VerificationError):
        verify(sch, BATCH)
