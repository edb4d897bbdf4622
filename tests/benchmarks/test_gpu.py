"""The queue of ``benchmarks.gpu``: what goes wrong in an item is written down, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.log import MOST_BYTES, Log, Record
from benchmarks.gpu.queue import Item, run_queue
from benchmarks.gpu.table import MOST_CHARACTERS, render

START = {"card": "none"}


def answer(log: Log) -> None:
    log.result(answer=42)


def answer_and_die(log: Log) -> None:
    log.result(answer=41)
    os.kill(os.getpid(), signal.SIGKILL)


def answer_and_hang(log: Log, seconds: float) -> None:
    child = subprocess.Popen(["sleep", str(seconds)])
    log.result(answer=child.pid)
    time.sleep(seconds)


def run_out_of_memory(log: Log) -> None:
    print("on the way")
    raise MemoryError("no memory for 80 GB")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    made = Log(tmp_path / "folder" / "results.jsonl")
    made.start(START)
    return made


def outcomes(log: Log) -> dict[str, Record]:
    return {record["item"]: record for record in log.read() if record["kind"] == "item"}


def answers(log: Log) -> dict[str, int]:
    return {record["item"]: record["answer"] for record in log.read() if record["kind"] == "result"}


def is_running(process: int) -> bool:
    """Check for a process that is not over; one that nobody waited for has no command line left."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


def test_a_child_that_dies_fails_or_hangs_leaves_its_results_and_the_others(log: Log) -> None:
    items = [
        Item("last", answer, priority=3),
        Item("dies", answer_and_die),
        Item("fails", run_out_of_memory, priority=1),
        Item("hangs", answer_and_hang, (60.0,), priority=2, limit=6.0),
    ]
    run_queue(items, log, budget=120.0, beside=1)
    found = outcomes(log)
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "dies": "killed by SIGKILL",
        "fails": "failed",
        "hangs": "timed out",
        "last": "done",
    }
    assert list(found) == ["dies", "fails", "hangs", "last"], "not in the order of priorities"
    assert found["fails"]["error"] == "MemoryError: no memory for 80 GB"
    assert answers(log)["dies"] == 41 and answers(log)["last"] == 42
    assert not is_running(answers(log)["hangs"]), "what the hanging child started was left behind"


def test_a_budget_that_runs_out_skips_what_is_left(log: Log) -> None:
    items = [
        Item("long", answer_and_hang, (60.0,), limit=50.0, least=0.0),
        Item("no time", answer, priority=1, least=0.5),
    ]
    start = time.monotonic()
    run_queue(items, log, budget=8.0, beside=1)
    assert time.monotonic() - start < 30
    found = outcomes(log)
    assert found["long"]["status"] == "timed out" and found["no time"]["status"] == "skipped"
    assert "answer" in log.read()[1]
    assert "skipped: no time" in render(log.read(), "A")


def test_an_item_that_measures_runs_alone(log: Log) -> None:
    items = [Item(f"beside {n}", answer_and_hang, (0.3,)) for n in range(2)]
    items += [Item("alone", answer, priority=1, alone=True), Item("after", answer, priority=2)]
    run_queue(items, log, budget=60.0, beside=2)
    ended = list(outcomes(log))
    assert set(ended[:2]) == {"beside 0", "beside 1"} and ended[2:] == ["alone", "after"]


def test_the_file_stays_small_and_takes_the_outcomes(log: Log) -> None:
    for number in range(300):
        log.of("talks").result(number=number, text="x" * 1000)
    log.of("talks").outcome("done", 1.0)
    assert log.path.stat().st_size < MOST_BYTES
    assert log.read()[-1]["status"] == "done"


def test_a_line_that_was_cut_off_is_left_out(log: Log) -> None:
    log.of("one").result(answer=1)
    with log.path.open("a") as file:
        file.write('{"kind": "result", "answer": {"b')
    assert [record["kind"] for record in log.read()] == ["start", "result"]


@pytest.mark.parametrize("part", ["A", "B", "C"])
def test_a_table_is_short_enough_for_the_end_of_an_output(part: str) -> None:
    timing = [10.0, 9.0, 11.0]
    result = {
        "A": {"failure": "test_x", "message": "wrong " * 50},
        "B": {
            "op": "gelu",
            "size": "card",
            "work": "both",
            "bytes": 10**8,
            "us": {"ours": timing},
            "peak": {},
            "errors": {},
        },
        "C": {
            "model": "gpt2",
            "precision": "bf16",
            "candidate": "ours",
            "us": timing,
            "peak": 10**9,
            "first_s": 3.0,
            "losses": [4.0],
            "rewrites": {"gelu": 12},
            "fallbacks": 0,
        },
    }[part]
    records = [{"kind": "start", **START}, *({"kind": "result", "item": "x", **result} for _ in range(400))]
    text = render(records, part)
    assert 0.9 * MOST_CHARACTERS < len(text) <= MOST_CHARACTERS and text.endswith("the rest is in the file")
    assert len(render(records[:3], part).splitlines()) < 8


def test_without_a_card_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "A", "--output", str(tmp_path / "results.jsonl")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr
    assert not (tmp_path / "results.jsonl").exists()


def test_a_dry_run_within_a_budget_of_no_time(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "C", "--dry-run", "--budget", "0"]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert records[0]["kind"] == "start" and {record["status"] for record in records if record["kind"] == "item"} >= {
        "skipped"
    }
    assert "llama bf16 ours" in done.stdout
