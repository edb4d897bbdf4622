"""Which library multiplies: measured once for a machine, kept, and settled by the environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fused
from fused.backends import onednn


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is known of this machine."""
    monkeypatch.delenv("FUSED_ONEDNN", raising=False)
    monkeypatch.setattr(onednn, "cache", lambda: tmp_path)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    onednn.speedup.cache_clear()
    yield tmp_path
    onednn.speedup.cache_clear()


def measuring(monkeypatch: pytest.MonkeyPatch, *rounds: float) -> list[int]:
    """Let a measurement find these rounds, and return a list of the numbers of rounds known before each."""
    known: list[int] = []

    def measured(before: onednn.Speedup) -> onednn.Speedup:
        known.append(len(before.rounds))
        return onednn.Speedup((*before.rounds, *rounds))

    monkeypatch.setattr(onednn, "_measured", measured)
    return known


def test_it_is_measured_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = measuring(monkeypatch, *[1.9] * 9)
    assert onednn.why_not() == onednn.why_not() == ""
    onednn.speedup.cache_clear()  # as in another process
    assert onednn.speedup(torch.get_num_threads()).rounds == (1.9,) * 9 and known == [0]
    assert [path.read_text() for path in fresh.rglob("*.json")] == [str([1.9] * 9)]
    assert not list(fresh.rglob("*.part"))


def test_no_gain_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, *[0.98, *[1.04] * 7, 1.1])
    reason = "oneDNN is 1.04 times as fast as torch here (0.98 to 1.10 in 9 rounds), and used from 1.25 on"
    assert onednn.why_not() == reason


def test_a_doubtful_gain_is_measured_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    known = measuring(monkeypatch, *[1.1, *[1.3] * 8])
    assert "used from 1.25" in onednn.why_not()
    onednn.speedup.cache_clear()
    assert onednn.why_not() == "", "more rounds have settled it"
    onednn.speedup.cache_clear()
    assert onednn.why_not() == "" and known == [0, 9]


def test_one_that_stays_doubtful_is_measured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    known = measuring(monkeypatch, *[1.2, 1.3] * 50)
    for _ in range(4):
        assert "(1.20 to 1.30 in" in onednn.why_not()
        onednn.speedup.cache_clear()
    assert known == [0, 100]


def test_a_slow_round_does_not_decide() -> None:
    assert onednn.Speedup((*[1.9] * 16, 0.2)).is_gain
    assert not onednn.Speedup((*[1.0] * 16, 9.0)).is_gain
    assert not onednn.Speedup((9.0,) * 8).is_settled, "too few"


def test_a_file_that_is_not_whole_is_written_anew(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, *[2.0] * 9)
    onednn.speedup(1)
    (path,) = fresh.rglob("*.json")
    for text in ("", "[2.0, ", "3", "[null]", "{}"):
        path.write_text(text)
        onednn.speedup.cache_clear()
        assert onednn.speedup(1).is_gain and path.read_text() == str([2.0] * 9)


def test_where_nothing_can_be_written_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(onednn, "cache", lambda: tmp_path / "file")
    measuring(monkeypatch, *[2.0] * 9)
    assert onednn.speedup(1).is_gain


def test_the_measurement_is_a_ratio_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert all(0.01 < ratio < 100 for ratio in onednn._measured(onednn.Speedup()).rounds)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_measured_in_float32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert all(0.01 < ratio < 100 for ratio in onednn._measured(onednn.Speedup()).rounds)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_environment_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_measured", lambda known: pytest.fail("measured"))
    monkeypatch.setenv("FUSED_ONEDNN", "1")
    assert onednn.why_not() == ""
    monkeypatch.setenv("FUSED_ONEDNN", "0")
    assert onednn.why_not() == "FUSED_ONEDNN=0"
    monkeypatch.setenv("FUSED_ONEDNN", "yes")
    with pytest.raises(ValueError, match="FUSED_ONEDNN: got 'yes'; 1 is oneDNN, 0 torch's own"):
        onednn.why_not()


def test_a_build_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert onednn.why_not() == "this build of torch has no oneDNN"


def test_the_list_of_backends_tells_what_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, *[1.9] * 9)
    measured = "1.90 times as fast as torch here (1.90 to 1.90 in 9 rounds)"
    with fused.backend("auto"):
        assert str(fused.backends("cpu")["linear"]) == f"linear on cpu: onednn (float32 by oneDNN, {measured})"
        assert fused.backends("cuda")["linear"].backend == "reference"
    with fused.backend("reference"):
        assert fused.backends("cpu")["linear"].reason == "reference was asked for"
