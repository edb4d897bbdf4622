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


def test_it_is_measured_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([1.9])
    monkeypatch.setattr(onednn, "_measured", lambda: next(ratios))
    assert onednn.why_not() == onednn.why_not() == ""
    onednn.speedup.cache_clear()  # as in another process
    assert onednn.speedup(torch.get_num_threads()) == 1.9
    assert [path.read_text() for path in fresh.rglob("*.txt")] == ["1.900"]
    assert not list(fresh.rglob("*.part"))


def test_no_gain_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_measured", lambda: 1.04)
    assert onednn.why_not() == "torch's own products are as fast here: oneDNN's 1.04 times as fast"


def test_a_file_that_is_not_whole_is_written_anew(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_measured", lambda: 2.0)
    onednn.speedup(1)
    (path,) = fresh.rglob("*.txt")
    path.write_text("")
    onednn.speedup.cache_clear()
    assert onednn.speedup(1) == 2.0 and path.read_text() == "2.000"


def test_where_nothing_can_be_written_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(onednn, "cache", lambda: tmp_path / "file")
    monkeypatch.setattr(onednn, "_measured", lambda: 2.0)
    assert onednn.speedup(1) == 2.0


def test_the_measurement_is_a_ratio_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert 0.05 < onednn._measured() < 50
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_measured_in_float32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert 0.05 < onednn._measured() < 50
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_environment_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_measured", lambda: pytest.fail("measured"))
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
    monkeypatch.setattr(onednn, "_measured", lambda: 1.9)
    with fused.backend("auto"):
        assert str(fused.backends("cpu")["linear"]) == "linear on cpu: onednn (float32 by oneDNN, 1.9 × as fast here)"
        assert fused.backends("cuda")["linear"].backend == "reference"
    with fused.backend("reference"):
        assert fused.backends("cpu")["linear"].reason == "reference was asked for"
