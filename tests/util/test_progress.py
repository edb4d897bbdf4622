"""Progress bars: on a terminal alone, with the time left, none where none is asked for, one at a time."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
import torch

import schedule
from schedule.util.printing import alone, in_progress, terminal_width
from tests.small import bias_gelu, ids, small

_RUN = """
import sys
import schedule
from tests.small import ids, small

sch = schedule.create_schedule(small(), ids())
report = schedule.optimize(sch, cost_guard=False)
schedule.verify(sch, ids(), steps=1)
report.timed(rounds=1)
print("SILENT FROM HERE", file=sys.stderr, flush=True)
schedule.verify(sch, ids(), steps=1, progress=False)
report.timed(rounds=1, progress=False)
report.measure(progress=False)
"""


def _on_a_terminal(code: str) -> str:
    """Run Python with a pseudo-terminal as its error stream, and return what was written there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    ) as run:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    assert run.returncode == 0, written.decode()
    return written.decode()


def test_long_work_shows_bars_on_a_terminal() -> None:
    shown, _, silent = _on_a_terminal(_RUN).partition("SILENT FROM HERE")
    for what in ("tracing and matching", "verifying", "timing training steps"):
        assert what in shown
    assert "%" in shown and "0:00" in shown, "a share, and the time that is left"
    assert not silent.strip(), silent


def test_no_bar_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with in_progress(2, "work") as advance:
        advance()
    assert capfd.readouterr() == ("", "")


def test_a_part_shows_no_bar_of_its_own() -> None:
    with alone() as first:
        with alone() as second:
            assert first and not second
        with alone() as third:
            assert not third
    with alone() as again:
        assert again


def wrong(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + bias)


def test_a_verification_that_fails_ends_its_bar() -> None:
    sch = schedule.create_schedule(small(), ids())
    mlp = sch["blocks.0.mlp"]
    mlp.replace(wrong, mlp.find(bias_gelu, expect=1))
    with pytest.raises(schedule.VerificationError) as caught:
        schedule.verify(sch, ids(), steps=1)
    assert caught.tb is not None, "the frames are still there"
    with alone() as first:
        assert first


def test_text_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("80", 80), ("30", 60), ("200", 200)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal_width() == width
