"""Rows of docs/versions.md: what is installed for each, and what a run found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

OLDEST_OF_OURS = ("networkx==3.2", "rich==13.0.0", "jinja2==3.1.0", "typer==0.16.0")
"""The oldest releases that pyproject.toml allows; tools of the tests ask for newer ones, but run with these."""


@dataclass(frozen=True)
class Row:
    """Requirements of an environment.

    Attributes:
        torch: what is installed first, with options of pip.
        others: what is installed beside the package.
        last: what is installed over what others ask for.
    """

    torch: tuple[str, ...] = ("torch",)
    others: tuple[str, ...] = ("transformers",)
    last: tuple[str, ...] = ()


ROWS = {
    # Triton 3.6's interpreter does not run on numpy 2.4.
    "oldest": Row(("torch==2.11.0",), ("transformers==5.0.0", "numpy<2.3"), OLDEST_OF_OURS),
    "torch-2.13": Row(("torch==2.13.0",), ("transformers==5.23.0",)),
    "torch-2.14": Row(("torch==2.14.1",), ("transformers==5.24.0",)),
    "newest": Row(),
    "nightly": Row(("--pre", "--index-url=https://download.pytorch.org/whl/nightly/cpu", "torch")),
}


@dataclass(frozen=True)
class Found:
    """Result of one run.

    Attributes:
        row: name in :data:`ROWS`.
        date: day of the run.
        versions: release of Python and of each library.
        passed, failed: numbers of tests.
        skipped: reason → number of tests.
        failures: names of the tests that failed.
        off: features that were off → how the package does without.
        minutes: how long the tests took.
    """

    row: str
    date: str
    versions: Mapping[str, str]
    passed: int
    failed: int
    skipped: Mapping[str, int]
    failures: Sequence[str]
    off: Mapping[str, str]
    minutes: float

    @property
    def python(self) -> str:
        """The first two numbers of the release of Python."""
        return ".".join(self.versions["Python"].split(".")[:2])

    def save(self) -> Path:
        """Write the result beside those of other rows."""
        path = RESULTS / f"{self.row}_python{self.python}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return path


def results() -> list[Found]:
    """Return the saved results, by releases of torch and Python."""
    found = [Found(**json.loads(path.read_text(encoding="utf-8"))) for path in RESULTS.glob("*.json")]
    return sorted(found, key=lambda each: [*_numbers(each.versions["torch"]), *_numbers(each.versions["Python"])])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".")]
