"""Equal models pass, and each way of being wrong is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from schedule.util.errors import NotApplicable, VerificationError
from schedule.verify import EquivalenceReport, equivalent
from schedule.verify.tolerances import TOLERANCES, coarsest_dtype

from .models import FAMILIES, Block, floats, token_batch
from .mutations import MUTATIONS, ErfForTanh, frozen, mutated


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deepcopied_twin_is_equal_to_the_bit(family: str) -> None:
    model = FAMILIES[family]()
    report = equivalent(model, copy.deepcopy(model), token_batch())
    assert report, report
    assert report.max_deviation == 0.0
    assert not report.skipped
    assert len(report.cases) == 12  # the batch with two sets of weights and four other shapes, in two modes
    assert {case.mode for case in report.cases} == {"train", "eval"}
    assert len({case.shapes for case in report.cases}) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_another_order_of_summation_is_equal(family: str) -> None:
    model = FAMILIES[family]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # SDPA draws its mask in another shape
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    twin = copy.deepcopy(model)
    twin.config._attn_implementation = "sdpa"
    report = equivalent(model, twin, token_batch())
    assert report, report
    assert 0.0 < report.max_deviation < 1e-2


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_mutation_is_caught(mutation: type[Block]) -> None:
    model = Block()
    report = equivalent(model, mutated(copy.deepcopy(model), mutation), floats(3, 6, 16))
    assert not report
    assert MUTATIONS[mutation] in f"{report}\n" + "\n".join(map(str, report.failed.deviations)), report
    assert report.worst is not None and report.worst.excess > 2


def test_the_unmutated_block_is_equal() -> None:
    model = Block()
    assert equivalent(model, copy.deepcopy(model), floats(3, 6, 16))


def _wrong_activation(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("act", "intermediate_act_fn"):
            if hasattr(module, name):
                setattr(module, name, nn.GELU("none" if name == "act" else "tanh"))
                return


def _wrong_scale(model: nn.Module) -> None:
    module = next(m for m in model.modules() if hasattr(m, "scaling"))
    module.scaling *= 1.5  # type: ignore[operator]


def _frozen_by_optimizer(model: nn.Module) -> None:
    """A parameter whose gradient is right but which a hook keeps from moving."""
    next(model.parameters()).register_hook(torch.zeros_like)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        ("gpt2", _wrong_activation),
        ("bert", _wrong_activation),
        ("llama", _wrong_scale),
        ("bert", _wrong_scale),
        ("gpt2", frozen),
        ("llama", _frozen_by_optimizer),
    ],
)
def test_a_mutation_of_a_real_architecture_is_caught(family: str, mutate: Callable[[nn.Module], None]) -> None:
    model = FAMILIES[family]()
    twin = copy.deepcopy(model)
    mutate(twin)
    assert not equivalent(model, twin, token_batch())


def test_a_frozen_weight_is_seen_by_its_update_alone() -> None:
    """The update is compared relative to its size: five steps move a weight by half a percent of itself."""
    model = Block()
    twin = copy.deepcopy(model)

    def without_up(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        mine = {id(p) for p in twin.parameters()}
        kept = [p for p in parameters if id(p) not in mine or p is not twin.up.weight]
        return torch.optim.AdamW(kept, lr=1e-5, eps=1e-6)

    report = equivalent(model, twin, floats(2, 6, 16), optimizer=without_up)
    assert not report
    updates = [d for d in report.failed.deviations if d.kind == "update"]
    assert updates[0].name == "up.weight"
    assert updates[0].max_rel == pytest.approx(1.0, abs=0.01)
    assert updates[0].max_abs < 1e-4
    assert "gradient" not in {d.kind for d in report.failed.deviations if not d.acceptable}


def test_without_stirring_the_wrong_gelu_would_pass() -> None:
    model = Block()
    report = equivalent(model, mutated(copy.deepcopy(model), ErfForTanh), floats(3, 6, 16))
    assert [case.equal for case in report.cases if case.weights == "own"] == [True, True]
    assert report.failed.weights == "perturbed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tolerance_follows_the_coarsest_dtype(dtype: torch.dtype) -> None:
    model = Block(p=0.0).to(dtype)
    assert coarsest_dtype(model) is dtype
    model.norm.double()
    assert coarsest_dtype(model) is dtype
    model.norm.to(dtype)
    assert equivalent(model, copy.deepcopy(model), floats(2, 6, 16).to(dtype))
    wrong = copy.deepcopy(model)
    wrong.scale = lambda: Block.scale(wrong) * 8  # type: ignore[method-assign]
    assert not equivalent(model, wrong, floats(2, 6, 16).to(dtype))


def test_float32_under_autocast_is_held_to_bfloat16() -> None:
    model = Block()
    with torch.autocast("cpu", torch.bfloat16):
        assert coarsest_dtype(model) is torch.bfloat16
        assert equivalent(model, copy.deepcopy(model), floats(2, 6, 16))
    assert coarsest_dtype(model) is torch.float32


def test_a_tolerance_can_be_given() -> None:
    model = Block()
    report = equivalent(
        model,
        mutated(copy.deepcopy(model), ErfForTanh),
        floats(3, 6, 16),
        tolerance=TOLERANCES[torch.bfloat16],
    )
    assert report, report


class Counting(nn.Module):
    """Refuses long sequences, and counts in a buffer while training."""

    def __init__(self, step: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = step
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        if x.shape[1] > 6:
            raise ValueError("at most 6 positions")
        if self.training:
            self.seen += self.step
        return {"y": self.linear(x), "note": "text", "pair": (x.shape[0], [None, self.linear(x).argmax()])}


def test_shapes_that_the_reference_refuses_are_skipped_and_said() -> None:
    model = Counting()
    report = equivalent(model, copy.deepcopy(model), floats(2, 6, 4))
    assert report
    assert len(report.skipped) == 4 and all("at most 6 positions" in reason for reason in report.skipped)
    assert "skipped" in str(report)


def test_a_batch_that_the_reference_refuses_is_told_in_its_words() -> None:
    with pytest.raises(NotApplicable, match="fails on this batch: ValueError: at most 6 positions"):
        equivalent(Counting(), Counting(), floats(2, 7, 4))


def test_buffers_count() -> None:
    report = equivalent(Counting(), Counting(step=2), floats(2, 6, 4))
    assert not report


def test_outputs_other_than_the_loss_must_stay_differentiable() -> None:
    class TwoOutputs(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return type("Output", (), {"__init__": lambda self: self.__dict__.update(loss=y.sum(), y=y)})()

    class Detached(TwoOutputs):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            output.y = output.y.detach()
            return output

    model = TwoOutputs(3, 3)
    twin = copy.deepcopy(model)
    assert equivalent(model, twin, floats(2, 3))
    twin.__class__ = Detached
    report = equivalent(model, twin, floats(2, 3))
    assert "y: is detached" in str(report.worst)


def test_masked_entries_do_not_drown_the_others() -> None:
    class Scores(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.masked_fill(torch.eye(y.shape[-1], dtype=torch.bool), torch.finfo(y.dtype).min)

    class Shifted(Scores):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    model = Scores(4, 4)
    twin = copy.deepcopy(model)
    twin.__class__ = Shifted
    assert equivalent(model, copy.deepcopy(model), floats(2, 4, 4))
    assert not equivalent(model, twin, floats(2, 4, 4))


def test_a_reference_that_is_not_finite_proves_nothing() -> None:
    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return type("Output", (), {"loss": super().forward(x).sum() * float("nan")})()

    with pytest.raises(VerificationError, match="not finite"):
        equivalent(Bad(2, 2), Bad(2, 2), floats(2, 2))


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        model = Block()
    with pytest.raises(VerificationError, match=r"norm.weight is on the meta device(.|\n)*schedule.build"):
        equivalent(model, model, floats(2, 6, 16))


def test_merged_parameters_are_compared_through_the_state_dict() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    class Merged(nn.Module):
        factor = 1.0

        def __init__(self, pair: Pair) -> None:
            super().__init__()
            self.both = nn.Linear(4, 8)
            self.register_state_dict_post_hook(self._split)
            self.register_load_state_dict_pre_hook(self._join)
            self.load_state_dict(pair.state_dict())

        @staticmethod
        def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for kind in ("weight", "bias"):
                parts = state.pop(f"{prefix}both.{kind}").chunk(2)
                state[f"{prefix}a.{kind}"], state[f"{prefix}b.{kind}"] = parts

        @staticmethod
        def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{prefix}{name}.{kind}") for name in "ab"]
                state[f"{prefix}both.{kind}"] = torch.cat(parts)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = (self.both(x) * self.factor).chunk(2, -1)
            return a, b

    pair = Pair()
    report = equivalent(pair, Merged(pair), floats(2, 4))
    assert report, report
    assert "update" in {d.kind for d in report.cases[0].deviations}
    wrong = Merged(pair)
    wrong.factor = 1.001
    assert not equivalent(pair, wrong, floats(2, 4))


def test_an_empty_report_says_so() -> None:
    assert "no primitive was applied" in str(EquivalenceReport())
