"""Bytes of expert and context parallelism, against the minimum, the cost model and the results in the repository."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.sharing import MESHES, Modeled, shared_sequences, spread
from tests.distributed import launch

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "distributed.json"


def written() -> list[Modeled]:
    """The rows in the repository."""
    return [Modeled(**row) for row in json.loads(RESULTS.read_text())["results"]["modeled"]]


def check(row: Modeled) -> None:
    """As in the repository, and as modeled."""
    assert row in written()
    assert abs(row.deviation) <= 0.05


def spread_as_written(mesh: Any, name: str, ep: int, tp: int) -> None:
    row = spread(name, init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp")))
    check(row)
    assert row.minimum <= row.sent <= 1.01 * row.minimum, "beside the minimum, gradients of the routing weights"


def test_experts() -> None:
    launch.passes(partial(spread_as_written, name="mixtral", ep=2, tp=1))


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "tp"), MESHES)
def test_more_experts(ep: int, tp: int) -> None:
    for name in ("mixtral", "qwen3-moe"):
        launch.passes(partial(spread_as_written, name=name, ep=ep, tp=tp), ep * tp)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sequences(ranks: int) -> None:
    check(shared_sequences(ranks))


def test_all_are_within_five_percent_of_the_model() -> None:
    assert len(written()) == 2 * len(MESHES) + 2
    assert all(abs(row.deviation) <= 0.05 for row in written())
