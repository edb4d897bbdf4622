"""The top of a report: one sentence, four figures, and the facts about the model and the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fused.versions import untested_releases, versions_text
from schedule.report.costs import Cost, TimeRatio
from schedule.report.entries import STATUSES, Entry
from schedule.util.named_values import batch_text, dtype_text
from schedule.util.wording import counted, seconds_text, size_text
from schedule.verify.equivalence_report import EquivalenceReport

Tone = Literal["good", "bad", "neutral"]
_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no clear difference": "neutral"}


@dataclass(frozen=True)
class Figure:
    """One of the four figures of a report.

    Attributes:
        name: its subject, such as ``kept for backward``.
        value: the figure, or that there is none.
        note: a remark on it, or the call that measures it.
        tone: whether it is an improvement, a regression, or neither.
    """

    name: str
    value: str
    note: str
    tone: Tone

    @property
    def is_hint(self) -> bool:
        """Whether the note says only what gets the figure."""
        return self.note == HINTS.get(self.name)


HINTS = {
    "kept for backward": "report.measure() runs a training step before and after",
    "training step": "report.timed() runs steps of both models in turns",
    "same results": "report.verify() compares it with the original",
}
"""Name of a figure → what gets it."""


def rewrites(entries: Sequence[Entry], running: Iterable[str] = (), idle: int = 0) -> Figure:
    """Return the number of matches rewritten, and of internal errors, ``running`` those of calls since.

    ``idle`` of them are not in effect: the last calls of their modules ran the original forward.
    """
    matches, modules = _applied(entries)
    note = f"in {modules}" if matches else "nothing was changed"
    note += f"; {idle} not in effect: calls run the original forward" if idle else ""
    if internal := list(internal_errors(entries, running)):
        return Figure("rewrites", str(matches), f"{note}; {counted(len(internal), 'internal error')}", "bad")
    return Figure("rewrites", str(matches), note, "bad" if idle else "good" if matches else "neutral")


def internal_errors(entries: Iterable[Entry], running: Iterable[str]) -> Iterator[str]:
    """Yield the distinct internal errors, of scheduling and of the calls since."""
    yield from dict.fromkeys([*(entry.reason for entry in entries if entry.status == "internal error"), *running])


def _applied(entries: Iterable[Entry]) -> tuple[int, str]:
    """Return the number of matches rewritten, and the number of their modules as text."""
    applied = [entry for entry in entries if entry.status == "applied"]
    return sum(entry.count for entry in applied), counted(len({entry.path for entry in applied}), "module")


def saved(measured: Mapping[str, Cost], unmeasured: str, changed: bool = True) -> Figure:
    """Return the bytes kept for backward, before and after; of a model that was not changed, that it was not."""
    name = "kept for backward"
    if not changed and not measured:
        return Figure(name, "unchanged", "not measured: nothing was rewritten", "neutral")
    if not {"before", "after"} <= measured.keys():
        why = unmeasured.partition("\n")[0] or HINTS[name]
        return Figure(name, "not measured", why, "neutral")
    before, after = measured["before"].saved_bytes, measured["after"].saved_bytes
    tone: Tone = "good" if after < before else "bad" if after > before else "neutral"
    return Figure(name, f"{size_text(before)} → {size_text(after)}", ratio_text(after, before), tone)


def step_time(timing: TimeRatio | None, changed: bool = True) -> Figure:
    """Return the time of a training step, before and after; a difference within the quartiles is none."""
    name = "training step"
    if not changed and timing is None:
        return Figure(name, "unchanged", "not timed: nothing was rewritten", "neutral")
    if timing is None:
        return Figure(name, "not timed", HINTS[name], "neutral")
    tone = _TONES[timing.verdict]
    if timing.seconds is None:
        return Figure(name, f"{timing.median:.2f} ×", str(timing), tone)
    return Figure(name, " → ".join(map(seconds_text, timing.seconds)), str(timing), tone)


def verified(found: EquivalenceReport | None) -> Figure:
    """Return the result of a comparison with the original model."""
    name = "same results"
    if found is None:
        return Figure(name, "not verified", HINTS[name], "neutral")
    if not found.cases:
        return Figure(name, "nothing to verify", "no case was compared", "neutral")
    if found.failed is not None:
        return Figure(name, "DIFFERENT", str(found.failed), "bad")
    return Figure(name, "equal", f"in {found.compared}, largest relative deviation {found.max_deviation:.2g}", "good")


def sentence(
    entries: Sequence[Entry],
    measured: Mapping[str, Cost],
    timing: TimeRatio | None,
    running: Iterable[str] = (),
    idle: int = 0,
) -> str:
    """Return what was rewritten, and what a training step costs now if that was measured.

    After internal errors, ``running`` those of calls since, it begins with them. It ends with the ``idle`` matches,
    which are not in effect.
    """
    internal = list(internal_errors(entries, running))
    failed = f"{counted(len(internal), 'internal error')} of this package, see below. " if internal else ""
    matches, _ = _applied(entries)
    now = f" {idle} of {matches} not in effect: the last calls ran the original forward, see below." if idle else ""
    return failed + _sentence(entries, measured, timing) + now


def _sentence(entries: Sequence[Entry], measured: Mapping[str, Cost], timing: TimeRatio | None) -> str:
    if not entries:
        return "No rule is about anything in this model: nothing was changed."
    matches, modules = _applied(entries)
    if not matches:
        counts = {status: sum(e.count for e in entries if e.status == status) for status in STATUSES}
        others = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"Nothing was rewritten, so nothing was changed: {others}."
    what = f"{counted(matches, 'match', 'matches')} in {modules} {'was' if matches == 1 else 'were'} rewritten"
    effects = list(_effects(measured, timing))
    return f"{what}; a training step {' and '.join(effects)}." if effects else f"{what}."


def _effects(measured: Mapping[str, Cost], timing: TimeRatio | None) -> Iterator[str]:
    if {"before", "after"} <= measured.keys() and measured["before"].saved_bytes:
        kept = measured["after"].saved_bytes / measured["before"].saved_bytes
        yield f"keeps {_share(kept)} memory for the backward pass"
    if timing is not None:
        yield f"takes {_share(timing.median)} time"


def _share(ratio: float) -> str:
    percent = round(100 * abs(1 - ratio))
    return "as much" if percent == 0 else f"{percent} % {'less' if ratio < 1 else 'more'}"


def ratio_text(after: int, before: int) -> str:
    """Format a ratio, such as ``0.57 ×``."""
    return f"{after / before:.2f} ×" if before else "–"


def facts(model: nn.Module, batch: Any, guessed: bool = False) -> list[tuple[str, str]]:
    """Return the model, its weights and batch, ``guessed`` or not, and the versions that computed the report."""
    found = [("model", _model_text(model)), ("weights", _weights_text(model))]
    if batch is not None:
        found.append(("batch", batch_text(batch) + (", guessed from the model: none was given" if guessed else "")))
    return [*found, ("versions", "; ".join([versions_text(), *untested_releases()]))]


def _model_text(model: nn.Module) -> str:
    parameters = list(model.parameters())
    parts = [type(model).__name__, f"{sum(p.numel() for p in parameters):,} parameters"]
    kinds = dict.fromkeys(f"{dtype_text(p)} on {p.device.type}" for p in parameters)
    return ", ".join([*parts, *kinds])


def _weights_text(model: nn.Module) -> str:
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"loaded from {name}" if isinstance(name, str) and name else "not loaded from a checkpoint by transformers"
