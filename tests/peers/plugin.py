"""A pytest run in which every model of transformers is scheduled at its first call.

Run by path, not imported: ``python -P plugin.py <rules or "untouched"> <journal> <arguments of pytest…>``. Each test's
outcome is appended to the journal as it is known, so that a run that dies has lost only the test that killed it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import json
import sys
import threading
import types
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

_RANK = {"passed": 0, "skipped": 1, "failed": 2}


class Journal:
    """Write the outcome of each test, and of its subtests that failed, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.now: dict[str, Any] = {}

    def write(self, **line: Any) -> None:
        """Append a line."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test begins."""
        self.now = {"test": nodeid, "outcome": "passed", "subtests": 0, "failures": [], "properties": {}, "reason": ""}
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the worst of set-up, call, subtests and tear-down."""
        context = getattr(report, "context", None)
        self.now["subtests"] += context is not None
        self.now["properties"] = dict(report.user_properties)
        if report.when != "call" and report.outcome == "passed":
            return
        if _RANK[report.outcome] > _RANK[self.now["outcome"]] and (context is None or report.outcome == "failed"):
            self.now["outcome"] = report.outcome
            self.now["reason"] = report.longrepr[2] if report.outcome == "skipped" else ""
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)[-2000:]
            at = f"{crash.path}:{crash.lineno}" if crash else ""
            described = "" if context is None else f"{context.msg or ''} {dict(context.kwargs)}".strip()
            self.now["failures"].append({"subtest": described, "message": message[:1500], "at": at})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write what became of the test."""
        self.write(**self.now)


class EveryModelScheduled:
    """Schedule each model that is called, before its first call and with that call's own arguments.

    At construction there is nothing to schedule with, and weights may still be loaded or exchanged. The outermost model
    of a call is scheduled whole; calls that are compiled, exported or transformed change nothing.

    Attributes:
        counts: how many models were rewritten, had nothing to rewrite, were refused; calls of original forwards.
        reasons: why models were refused.
    """

    def __init__(self, rules: str, journal: Journal) -> None:
        self.rules, self.journal = rules, journal
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.inside = threading.local()

    def pytest_sessionstart(self) -> None:
        """Watch the calls of models from here on."""
        from transformers import PreTrainedModel

        from schedule.runtime.scheduled import ScheduledState

        def __call__(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or model in self.seen or getattr(self.inside, "now", False):
                return nn.Module.__call__(model, *args, **kwargs)
            self.schedule(model, args, kwargs)
            return nn.Module.__call__(model, *args, **kwargs)

        PreTrainedModel.__call__ = __call__
        fall_back = ScheduledState.fall_back

        def counted(state: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # counts here would be guards of what is compiled
                return fall_back(state, *args, **kwargs)
            before = state.fallbacks
            try:
                return fall_back(state, *args, **kwargs)
            finally:
                self.counts["fallbacks"] += state.fallbacks > before

        ScheduledState.fall_back = counted  # type: ignore[method-assign]

    def schedule(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Schedule ``model`` for calls like this one; whatever refuses it leaves it as it was."""
        import schedule
        from schedule.runtime.call_kinds import is_only_traced
        from schedule.util.copying import copied
        from schedule.util.errors import ScheduleError

        data_free = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        if is_only_traced(args, kwargs) or data_free:
            return
        self.inside.now = True
        try:
            bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
            batch = {name: value for name, value in bound.arguments.items() if name != next(iter(bound.arguments))}
            for parameter in bound.signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    batch |= batch.pop(parameter.name, {})
            with torch.inference_mode(False), torch.enable_grad():
                own = copied(batch, lambda tensor: tensor.detach().clone())
                report = schedule.optimize(model, own, rules=self.rules, cost_guard=False)
            self.counts["rewritten" if report.applied else "nothing to rewrite"] += 1
            self.seen.update(child for child in model.modules() if hasattr(child, "post_init"))
        except (ScheduleError, TypeError) as error:  # a call that the model itself refuses, for one
            if isinstance(error, TypeError) and "argument" not in str(error):
                raise
            self.counts["refused"] += 1
            self.reasons[f"{type(model).__name__}: {str(error)[:300]}"] += 1
        finally:
            self.inside.now = False

    def pytest_runtest_logfinish(self) -> None:
        """Write the counts of the test that ended."""
        if self.counts:
            self.journal.write(counts=dict(self.counts), reasons=dict(self.reasons))
            self.counts.clear()
            self.reasons.clear()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Give mocks for helpers that a checkout of another version lacks: tests that use one fail either way."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Any module among the tests, when no other finder has it."""
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("tests.") else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it whatever is asked for."""

        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock(name=name)

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def main(rules: str, journal: str, *arguments: str) -> int:
    """Run pytest; the exit status is its own."""
    sys.meta_path.append(_Absent())
    torch.set_num_threads(1)
    writing = Journal(Path(journal))
    plugins: list[Any] = [writing]
    if rules != "untouched":
        plugins.append(EveryModelScheduled(rules, writing))
    return int(pytest.main(list(arguments), plugins=plugins))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
