"""The page of releases: what runs of the tests found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fused.assumptions import TABLE
from tests.versions.rows import Found, results


def version_reference() -> str:
    """The results of the tests for each set of releases, then the features that need an assumption."""
    return "\n".join([_results(results()), "", _features()])


def _results(found: list[Found]) -> str:
    libraries = ("Python", "torch", "transformers", "triton", "networkx", "rich", "jinja2", "typer")
    lines = [_row([*libraries, "run on", "passed", "failed", "skipped", "off"]), _row(["---"] * (len(libraries) + 5))]
    for each in found:
        versions = [each.versions[name] for name in libraries]
        off = ", ".join(each.off) or "–"
        lines.append(_row([*versions, each.date, each.passed, each.failed, sum(each.skipped.values()), off]))
    parts = ["\n".join(lines)]
    for each in found:
        title = f"### torch {each.versions['torch']}, Python {each.versions['Python']}"
        why = [f"- {count} × {_plain(reason)}" for reason, count in _by_kind(each.skipped).items()]
        failed = [f"- failed: `{name}`" for name in each.failures]
        off = [f"- off: {name}: {otherwise}" for name, otherwise in each.off.items()]
        parts.append(
            "\n".join([title, "", "Skipped, and why:" if why else "Nothing was skipped.", "", *why, *failed, *off])
        )
    return "\n\n".join(parts)


def _features() -> str:
    lines = ["## What the package assumes", "", _row(["feature", "seen on", "without it"]), _row(["---"] * 3)]
    lines += [_row([each.name, each.seen, each.otherwise]) for each in TABLE]
    return "\n".join(lines)


def _by_kind(skipped: Mapping[str, int]) -> dict[str, int]:
    """Add up reasons that are the same up to a colon, such as ``no Triton kernels: star_relu``; the most first."""
    counts = Counter[str]()
    for reason, count in skipped.items():
        counts[reason.partition(": ")[0]] += count
    return dict(counts.most_common())


def _row(cells: list[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _plain(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;")
