"""The table of a file of results, short enough for the end of an output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.gpu.log import Record

MOST_CHARACTERS = 12_000

Lines = list[Sequence[Any]]


def render(records: Sequence[Record], part: str) -> str:
    """Return the table of one part, cut to `MOST_CHARACTERS` from below."""
    results = [record for record in records if record["kind"] == "result"]
    outcomes = [record for record in records if record["kind"] == "item"]
    text = [_heading(part, records[0]), *_TABLES[part](results), *_problems(outcomes)]
    return _cut("\n".join(text))


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    note = "… the rest is in the file"
    return text[: MOST_CHARACTERS - len(note) - 1].rpartition("\n")[0] + "\n" + note


def _heading(part: str, start: Record) -> str:
    return f"part {part}: " + ", ".join(f"{name} {value}" for name, value in start.items() if name != "kind")


def _problems(outcomes: Sequence[Record]) -> list[str]:
    """Return the counts of outcomes, and a line for each item that was not done."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome["status"]] = counts.get(outcome["status"], 0) + 1
    summary = "items: " + ", ".join(f"{count} {status}" for status, count in counts.items())
    wrong = [outcome for outcome in outcomes if outcome["status"] != "done"]
    skipped = [outcome["item"] for outcome in wrong if outcome["status"] == "skipped"]
    lines = [f"{o['status']}: {o['item']}: {o.get('error', '')[:160]}" for o in wrong if o["status"] != "skipped"]
    return [summary, *lines, *([f"skipped: {', '.join(skipped)}"] if skipped else [])]


def aligned(lines: Iterable[Sequence[Any]]) -> list[str]:
    """Return lines of cells as text with columns of equal width, the first aligned left."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        " ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def _tests(results: Sequence[Record]) -> list[str]:
    lines: Lines = [("tests", "passed", "failed", "skipped")]
    lines += [(r["tests"], r["passed"], r["failed"], r["skipped"]) for r in results if "tests" in r]
    figures = [f"{name}: {value}" for r in results for name, value in r.get("figures", {}).items()]
    failures = [f"FAILED {r['failure']}: {' '.join(r['message'].split())[:200]}" for r in results if "failure" in r]
    return [*aligned(lines), *figures, *failures]


def _ops(results: Sequence[Record]) -> list[str]:
    copies = [f"copy of {r['bytes'] / 2e6:.0f} MB: {r['gb_s']} GB/s" for r in results if r.get("measure") == "copy"]
    heading = ("op", "pass", "MB", "ours µs", "quartiles", "of copy", "eager", "compile", "Liger", "peak", "error")
    lines: Lines = [heading]
    for result in results:
        if "op" in result:
            lines.append(_op_line(result))
    ratios = {r["threshold"]: r["ratios"] for r in results if "threshold" in r}
    powers = list(next(iter(ratios.values()), {}))
    thresholds: Lines = [("ours / eager", *(f"2^{power}" for power in powers))]
    thresholds += [(kind, *values.values()) for kind, values in ratios.items()]
    note = "eager, compile, Liger: our time over theirs; peak and error: ours over eager's"
    return [*copies, *aligned(lines), note, *(aligned(thresholds) if ratios else [])]


def _op_line(result: Record) -> Sequence[Any]:
    times, ours = result["us"], result["us"].get("ours")
    median = None if ours is None else ours[0]
    return (
        f"{result['op']}{'' if result['size'] == 'card' else ' ' + result['size']}",
        result["work"],
        round(result["bytes"] / 1e6),
        "-" if ours is None else f"{ours[0]:.1f}",
        "-" if ours is None else f"{ours[1]:.0f}-{ours[2]:.0f}",
        _over(times.get("copy", [None])[0], median),
        *(_over(median, times.get(other, [None])[0]) for other in ("eager", "torch.compile", "Liger")),
        *(_over(result[what].get("ours"), result[what].get("eager")) for what in ("peak", "errors")),
    )


def _over(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def _models(results: Sequence[Record]) -> list[str]:
    lines: Lines = [
        ("model", "step ms", "quartiles", "of sdpa", "peak GB", "of sdpa", "first s", "rewrites", "fall", "loss")
    ]
    measured = [result for result in results if "us" in result]
    bases = {(r["model"], r["precision"]): r for r in measured if r["candidate"] == "HF sdpa"}
    for result in measured:
        base = bases.get((result["model"], result["precision"]), {})
        median, low, high = (value / 1e3 for value in result["us"])
        lines.append(
            (
                f"{result['model']} {result['precision']} {result['candidate']}",
                f"{median:.2f}",
                f"{low:.2f}-{high:.2f}",
                _over(result["us"][0], base.get("us", [None])[0]),
                f"{result['peak'] / 1e9:.2f}",
                _over(result["peak"], base.get("peak")),
                result["first_s"],
                sum(result["rewrites"].values()),
                result["fallbacks"],
                result["losses"][-1],
            )
        )
    return aligned(lines)


_TABLES: dict[str, Callable[[Sequence[Record]], list[str]]] = {"A": _tests, "B": _ops, "C": _models}
