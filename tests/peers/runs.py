"""One file of tests, run untouched or scheduled, in processes of limited time; and what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.peers.sources import ROOT, Sources

_PLUGIN = Path(__file__).with_name("plugin.py")


@dataclass
class Run:
    """What became of the tests of one file.

    Attributes:
        outcomes: of each test: passed, skipped, failed, or died where it took its process along.
        subtests: how many subtests ran in all.
        failures: of each test that failed, its messages, one a subtest.
        counts: how many models were rewritten, were refused, …; empty if nothing was to be scheduled.
        reasons: why models were refused.
        skipped: why each test was skipped that was.
        properties: of each test, what its fixtures recorded (pytest's ``record_property``).
        seconds: wall time.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    subtests: int = 0
    failures: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    properties: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def read(self, journal: Path) -> None:
        """Take in the journal of one process; a test that began and did not end has died."""
        lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if "started" in line:
                self.outcomes[line["started"]] = "died"
            elif "test" in line:
                self.outcomes[line["test"]] = line["outcome"]
                self.properties[line["test"]] = line["properties"]
                self.subtests += line["subtests"]
                if line["reason"]:
                    self.skipped[line["test"]] = line["reason"]
                if line["failures"]:
                    self.failures[line["test"]] = line["failures"]
            else:
                self.counts.update(line["counts"])
                self.reasons.update(line["reasons"])

    @property
    def passed(self) -> int:
        """How many tests passed."""
        return sum(outcome == "passed" for outcome in self.outcomes.values())


def run(
    sources: Sources,
    tests: Sequence[str],
    rules: str = "untouched",
    keyword: str = "",
    limit: float = 1200.0,
    test_limit: int = 180,
    options: Sequence[str] = (),
) -> Run:
    """Run tests until each has an outcome: after a process that died, the rest in another one.

    Args:
        sources: where they are.
        tests: files or tests, as pytest takes them.
        rules: what every model is scheduled with; ``"untouched"`` for none.
        keyword: pytest's ``-k``.
        limit: seconds that one process may take.
        test_limit: seconds that one test may take.
        options: further arguments of pytest.
    """
    result, began = Run(), time.monotonic()
    while True:
        known = len(result.outcomes)
        journal = ROOT / "build" / "peers" / f"journal-{os.getpid()}.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text("")
        arguments = [
            "-q",
            "--no-header",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            f"--timeout={test_limit}",
            *options,
            *tests,
        ]
        arguments += ["-k", keyword] if keyword else []
        for done in result.outcomes:
            arguments += ["--deselect", done]
        try:
            status = _process(sources, [rules, str(journal), *arguments], limit)
        except subprocess.TimeoutExpired:
            status = None
        result.read(journal)
        journal.unlink()
        if status in (0, 1, 5) or len(result.outcomes) == known:  # ended by itself, or got nowhere
            break
    result.seconds = time.monotonic() - began
    if not result.outcomes:
        raise RuntimeError(f"no test of {', '.join(tests)} ran; the log is {_log()}")
    return result


def _log() -> Path:
    return ROOT / "build" / "peers" / "last_run.log"


def _process(sources: Sources, arguments: Sequence[str], limit: float) -> int:
    paths = (sources.checkout, ROOT, sources.packages)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "FUSED_ONEDNN": "0",
    }
    command = [sys.executable, "-P", str(_PLUGIN), *arguments]
    with _log().open("w") as log:
        return subprocess.run(
            command, cwd=sources.checkout, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit
        ).returncode


@dataclass
class Comparison:
    """Tests of one architecture, untouched and scheduled.

    Attributes:
        lost: tests that pass untouched and not scheduled.
        unsteady: tests that were lost once and passed when both were run again.
    """

    name: str
    untouched: Run
    scheduled: Run
    lost: list[str]
    unsteady: list[str]

    @property
    def vacuous(self) -> bool:
        """Whether no model was rewritten."""
        return not self.scheduled.counts["rewritten"]

    def as_json(self) -> dict[str, Any]:
        """The numbers, and the messages of what was lost."""
        failures = {name: self.scheduled.failures.get(name, []) for name in (*self.lost, *self.unsteady)}
        runs = {}
        for kind in ("untouched", "scheduled"):
            one: Run = getattr(self, kind)
            tally = dict(sorted(Counter(one.outcomes.values()).items()))
            runs[kind] = {"tests": tally, "subtests": one.subtests, "seconds": round(one.seconds, 1)}
        models = dict(self.scheduled.counts)
        return {**runs, "models": models, "refused": dict(self.scheduled.reasons), "lost": self.lost,
                "unsteady": self.unsteady, "failures": failures}  # fmt: skip


def lost(untouched: Run, scheduled: Run) -> list[str]:
    """Tests that pass untouched and, scheduled, do anything else."""
    passed = (name for name, outcome in untouched.outcomes.items() if outcome == "passed")
    return [name for name in passed if scheduled.outcomes.get(name) != "passed"]


def compare(
    name: str, tests: Sequence[str], untouched: Callable[[Sequence[str]], Run], changed: Callable[[Sequence[str]], Run]
) -> Comparison:
    """Run tests both ways, and once more what is lost."""
    first, second = untouched(tests), changed(tests)
    missing = lost(first, second)
    again = lost(untouched(missing), changed(missing)) if missing else []
    return Comparison(name, first, second, again, [each for each in missing if each not in again])
