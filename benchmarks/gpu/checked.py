"""Part A: the tests of the kernels and those marked `cuda`, on the card, each file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.log import Log
from benchmarks.gpu.queue import Item

ROOT = Path(__file__).parents[2]
QUALITY = "tests/fused/test_quality.py"
SHARDS = {"tests/fused/cuda/test_ops.py": 8, QUALITY: 6, "tests/fused/triton/test_launch.py": 2}
"""Files whose tests are many, with the number of processes to spread them over; kernels' own files take two."""
_LONGEST_MESSAGE = 300
_MOST_IN_A_DRY_RUN = 4


def items(device: str) -> list[Item]:
    """Return one item per file: the `cuda` tests first, then the kernels' own, then every op on Triton."""
    dry = device != "cuda"
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    risks = [str(path.relative_to(ROOT)) for path in files if "pytest.mark.cuda" in path.read_text()]
    kernels = [str(path.relative_to(ROOT)) for path in files if path.parent == ROOT / "tests" / "fused" / "triton"]
    found = [item for path in risks for item in _shards(path, "cuda", "", dry, 0)]
    found += [item for path in kernels for item in _shards(path, "not slow", "", dry, 1)]
    return [*found, *_shards(QUALITY, "not slow", "triton", dry, 1)]


def _shards(path: str, marked: str, named: str, dry: bool, priority: int) -> list[Item]:
    """Return the items that run the tests of a file between them."""
    count = 1 if dry else SHARDS.get(path, 1 + priority)
    return [
        Item(
            path if count == 1 else f"{path} {number + 1}/{count}",
            run_tests,
            (path, marked, named, dry, number, count),
            priority,
            300,
        )
        for number in range(count)
    ]


def run_tests(log: Log, path: str, marked: str, named: str, dry: bool, number: int, count: int) -> None:
    """Run a file of tests, and write down each failure when it happens and the counts at the end.

    Args:
        marked, named: pytest's `-m` and `-k`.
        dry: run the first few tests only, and those marked `cuda` on the CPU.
        number, count: run every `count`-th test, from this one on.
    """
    options = [
        str(ROOT / path),
        "-m",
        marked,
        "-k",
        named,
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    options += ["--timeout", "120", *(["--card", "cpu"] if dry else [])]
    reporter = _Reporter(log, slice(_MOST_IN_A_DRY_RUN) if dry and marked != "cuda" else slice(number, None, count))
    code = pytest.main(options, plugins=[reporter])
    log.result(tests=log.item, **reporter.counts, figures=reporter.figures)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}")
    if reporter.counts["failed"]:
        raise SystemExit(f"{reporter.counts['failed']} tests failed")


class _Reporter:
    """Plugin of pytest that counts outcomes, and writes down failures and the figures that tests recorded."""

    def __init__(self, log: Log, chosen: slice) -> None:
        self.log, self.chosen = log, chosen
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.figures: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self.chosen]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        self.figures |= {f"{report.nodeid.partition('::')[2]} {name}": value for name, value in report.user_properties}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr if crash is None else crash.message)
            self.log.result(failure=report.nodeid, message=message[:_LONGEST_MESSAGE])
