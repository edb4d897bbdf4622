"""Logs of what the compiler does: Python loggers under ``fxschedule``, one for each subject.

``FXSCHEDULE_LOGS="match,+guards"`` prints them, like torch's ``TORCH_LOGS``: a plain name for one line each, ``+`` for
details too, ``-`` for none, ``all`` for every subject. ``FXSCHEDULE_LOGS_FILE=run.jsonl`` also writes one JSON object
for each line, with the facts by name.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schedule.util.errors import ScheduleError, did_you_mean

SUBJECTS = {
    "trace": "each module that is traced, or the line that prevents it; details: its graph",
    "match": "each match of a rule, and why it is not rewritten; details: near misses",
    "guards": "the first guard that a call fails; details: all guards of each graph",
    "fallbacks": "each call that runs an original forward, and each graph made for a further kind of call",
    "kernels": "the backend that runs each fused op, once for each kind of call",
}
"""Subjects of logs → what they say."""

ROOT = "fxschedule"
_FACTS = "fxschedule_facts"


def is_on(subject: str, details: bool = False) -> bool:
    """Check whether anyone listens to a subject, so that what is costly is only computed then."""
    return logging.getLogger(f"{ROOT}.{subject}").isEnabledFor(logging.DEBUG if details else logging.INFO)


def log(subject: str, text: str, facts: Mapping[str, Any], details: bool = False) -> None:
    """Log one line.

    Args:
        subject: one of :data:`SUBJECTS`.
        text: the line.
        facts: what the line says, by name, for JSON; values that JSON does not have are written as text.
        details: whether it is a detail.
    """
    level = logging.DEBUG if details else logging.INFO
    logging.getLogger(f"{ROOT}.{subject}").log(level, "%s", text, extra={_FACTS: facts})


def of_mode(path: str, training: bool | None) -> str:
    """Return a module's path and its mode, for a line; ``training`` is None for both modes."""
    mode = {True: "training", False: "evaluation", None: "both modes"}[training]
    return f"{path or 'the root module'} in {mode}"


def set_logs(subjects: str | Iterable[str], file: str | os.PathLike[str] | None = None) -> None:
    """Print logs to the standard error stream, in place of the previous choice.

    Args:
        subjects: names of :data:`SUBJECTS`, as a list or separated by commas: ``"match"`` for one line each,
            ``"+match"`` for details too, ``"-match"`` for none, ``"all"`` for every subject. ``""`` ends all logs.
        file: a file to write the same as JSON lines to; None for none.

    Raises:
        ScheduleError: there is no such subject; nothing was changed.
    """
    levels = _levels(subjects.split(",") if isinstance(subjects, str) else subjects)
    root = logging.getLogger(ROOT)
    for handler in [each for each in root.handlers if each.get_name() == ROOT]:
        root.removeHandler(handler)
        handler.close()
    printed: logging.Handler = logging.StreamHandler()
    printed.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    written: list[logging.Handler] = []
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        written.append(logging.FileHandler(file, encoding="utf-8", delay=True))
        written[0].setFormatter(_JsonLines())
    for handler in (printed, *written) if levels else ():
        handler.set_name(ROOT)
        root.addHandler(handler)
    root.propagate = not levels
    for subject in SUBJECTS:
        logging.getLogger(f"{ROOT}.{subject}").setLevel(levels.get(subject, logging.WARNING if levels else 0))


def set_logs_by_environment() -> None:
    """Set the logs that ``FXSCHEDULE_LOGS`` and ``FXSCHEDULE_LOGS_FILE`` ask for; warn where they cannot be set."""
    subjects = os.environ.get("FXSCHEDULE_LOGS", "")
    if not subjects.strip():
        return
    try:
        set_logs(subjects, os.environ.get("FXSCHEDULE_LOGS_FILE") or None)
    except (ScheduleError, OSError) as error:
        warnings.warn(f"FXSCHEDULE_LOGS={subjects!r} is ignored: {error}", stacklevel=2)


def _levels(subjects: Iterable[str]) -> dict[str, int]:
    """Return the level of each subject asked for."""
    levels: dict[str, int] = {}
    for asked in filter(None, map(str.strip, subjects)):
        name = asked.lstrip("+-")
        if name != "all" and name not in SUBJECTS:
            near = did_you_mean(name, SUBJECTS)
            raise ScheduleError(
                f"there are no logs of {name!r}", fix=near or f"choose from: {', '.join(SUBJECTS)}, all"
            )
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(asked[0], logging.INFO)
        levels |= dict.fromkeys(SUBJECTS if name == "all" else (name,), level)
    return levels


class _JsonLines(logging.Formatter):
    """Writes a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": record.created, "subject": record.name.rpartition(".")[2], "text": record.getMessage()}
        return json.dumps({**said, **getattr(record, _FACTS, {})}, default=str)
