"""What counts as covered by a tensor-parallel plan, and the page that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from schedule import Schedule
from schedule.api.simulate import Simulation, simulate
from schedule.batches import Inputs
from tests.sweep import plans
from tests.sweep.coverage import PLANS, counted_plans, plan_summary
from tests.sweep.plans import Planned, called, check_plan, describe, is_text, layers_of, spread_experts

pytestmark = pytest.mark.filterwarnings("ignore")


class Stack(nn.Module):
    """Two layers of a list, the second without a width that two ranks could share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        sizes = (16, 15)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in sizes])
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in sizes])
        self.vision = nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x


def test_a_layer_that_stays_whole_is_not_covered() -> None:
    model, outcome, batch = Stack(), Planned("stack"), {"input_ids": torch.tensor([[1, 2, 3]])}
    assert layers_of(model, called(model, batch)) == ["layers.0", "layers.1"], "neither norms nor what is not called"
    describe(model, batch, outcome)
    assert outcome.equal and not outcome.covered and outcome.share == 0.0
    assert (outcome.columns, outcome.rows, outcome.whole, outcome.features) == (1, 1, 2, 1)
    assert outcome.collectives == (1, 1) and outcome.minimum == 1
    assert "15 cannot be shared evenly" in outcome.reasons["too much stays whole"]


class Amplified(Stack):
    """Rounding in float32 becomes a hundredth of the output."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (1e5 * super().forward(input_ids)).sin()


@pytest.mark.parametrize("mistake", [0.0, 1e-5])
def test_rounding_is_told_from_a_mistake_in_float64(mistake: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(model: nn.Module, batch: Inputs, apply: Callable[[Schedule], object], ranks: int) -> Simulation:
        def applied(sch: Schedule) -> None:
            apply(sch)
            sch.module.get_parameter("layers.0.0.weight").data.mul_(1 + mistake)

        return simulate(model, batch, applied, ranks)

    torch.manual_seed(0)
    outcome = Planned("stack")
    monkeypatch.setattr(plans, "simulate", mistaken)
    describe(Amplified(), {"input_ids": torch.tensor([[1, 2, 3]])}, outcome)
    assert outcome.equal == (mistake == 0) and ("WRONG, plan" in outcome.reasons) == (mistake > 0)


class Experts(nn.Module):
    """Every token through every expert, with the weights of those that it chose."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.up, self.down = count, *(nn.Parameter(torch.randn(count, 8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        of_expert = torch.stack([(weights * (index == one)).sum(-1, keepdim=True) for one in range(self.count)])
        result: torch.Tensor = (of_expert * ((x @ self.up).relu() @ self.down)).sum(0)
        return result


class Mixture(nn.Module):
    """A router and experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding, self.router, self.experts = nn.Embedding(9, 8), nn.Linear(8, count), Experts(count)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids).flatten(0, 1)
        chosen = self.router(x).softmax(-1).topk(2)
        result: torch.Tensor = x + self.experts(x, chosen.indices, chosen.values)
        return result


@pytest.mark.parametrize(("count", "spread", "why"), [(4, 1, None), (3, 0, "3 experts cannot be shared evenly by 2")])
def test_the_experts_of_a_mixture(count: int, spread: int, why: str | None) -> None:
    outcome = Planned("mixture")
    spread_experts(Mixture(count), {"input_ids": torch.tensor([[1, 2, 3]])}, outcome)
    assert outcome.experts == (spread, 1)
    assert outcome.reasons.keys() == ({"experts not spread"} if why else set())
    assert why is None or why in outcome.reasons["experts not spread"]


def test_a_model_without_experts() -> None:
    outcome = Planned("stack")
    spread_experts(Stack(), {"input_ids": torch.tensor([[1, 2, 3]])}, outcome)
    assert outcome.experts == (0, 0) and not outcome.reasons


def test_tokens_alone() -> None:
    assert is_text({"input_ids": [], "attention_mask": []}) and not is_text({"input_ids": [], "pixel_values": []})


def test_an_architecture_and_its_row(tmp_path: Path) -> None:
    saved: list[str] = []
    found = check_plan("llama", lambda outcome: saved.append(outcome.name))
    assert found.covered and found.share == 1.0 and saved
    plans = {"llama": vars(found)}
    line = PLANS.write(plans, 1, 0, tmp_path / "page.md", tmp_path / "data.json")
    assert line == plan_summary(counted_plans(plans))
    assert json.loads((tmp_path / "data.json").read_text())["counts"]["covered"] == 1
    assert line.startswith("1 text architectures, 1 covered by a tensor-parallel plan (100.0 %); 0 of them mixtures")
    (row,) = (line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| llama"))
    assert row == "| llama | yes | 2/2 | 2/2 | 10 / 4 / 0 | 100 % | 4 + 4 (4 + 4) |  |  |"
