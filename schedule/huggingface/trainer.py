"""``Trainer`` callback to schedule the model on its first training batch."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from schedule.api.optimize import optimize
from schedule.api.schedule import Schedule, create_schedule
from schedule.capture import map_structure
from schedule.optimizer import Rules
from schedule.report.report import Report
from schedule.util.arguments import keywords_checked
from schedule.util.errors import NotApplicable
from schedule.util.generators import generator_states, restore_generators
from schedule.util.logs import ROOT
from schedule.util.wording import counted
from schedule.verify import verify

_LOG = logging.getLogger(f"{ROOT}.trainer")


def _say(level: int, text: str, *args: object) -> None:
    """Log one line, also where nothing was set up for logging: it comes once in a training."""
    if _LOG.level == logging.NOTSET:
        _LOG.setLevel(logging.INFO)
    if not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler())
    _LOG.log(level, text, *args)


class OptimizeCallback(TrainerCallback):
    """Callback to rewrite the model when training begins: ``Trainer(model, ..., callbacks=[OptimizeCallback()])``.

    The batch is taken from the training data without changing its order. If the model does not take it as it is,
    because the loss calls the model with parts of it, the model is rewritten at its first call, for these arguments.
    Optimizer, checkpoints and ``save_model`` work as before: it is the same model with the same parameters.

    Args:
        rules, cost_guard: as for :func:`schedule.optimize`.
        check: verify the rewritten model against the original before the first step.
        progress: show a progress bar of that in a terminal.
        keep: leave the model scheduled when training ends; otherwise undo all steps.
        writer: where to write the numbers below as scalars at each log: anything with
            ``add_scalar(name, value, step)``, such as ``torch.utils.tensorboard.SummaryWriter("runs/fxschedule")``.

    At each log of the Trainer, ``fxschedule/active`` (rewrites in effect now), ``fxschedule/fallbacks`` (calls that ran
    an original forward so far) and ``fxschedule/adaptations`` (further kinds of calls that got graphs of their own) are
    added to ``state.log_history``, and so to ``trainer_state.json``.

    Attributes:
        report: report of the rewrites, once training has begun.
        schedule: the schedule, with its history.

    Raises:
        VerificationError: with ``check``, before the first step, if the rewritten model differs.
    """

    @keywords_checked()
    def __init__(
        self,
        rules: Rules = "default",
        *,
        cost_guard: bool = True,
        check: bool = False,
        keep: bool = True,
        writer: Any = None,
        progress: bool = True,
    ) -> None:
        self.rules, self.cost_guard, self.check, self.keep, self.writer = rules, cost_guard, check, keep, writer
        self.progress, self._is_first = progress, True
        self.report: Report | None = None
        self.schedule: Schedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Schedule the model on a batch of the training data."""
        model, data = given["model"], given["train_dataloader"]
        if self.schedule is not None and self.schedule.module is model and self.schedule.history:
            return  # a further call of train()
        self._is_first = state.is_world_process_zero
        states = generator_states(model)
        try:
            batch = map_structure(
                next(iter(data)), lambda leaf: leaf.to(args.device) if isinstance(leaf, torch.Tensor) else leaf
            )
        finally:
            restore_generators(states)
        sch = create_schedule(model, batch)
        try:
            sch.tree.graphs.recording  # noqa: B018  runs the model
        except NotApplicable:  # it does not take the batch as it is
            self._rewrite_at_the_first_call(model)
        else:
            self._rewrite(sch, batch)

    def _rewrite(self, sch: Schedule, batch: Any) -> None:
        self.schedule = sch
        self.report = optimize(sch, rules=self.rules, cost_guard=self.cost_guard)
        if self.check:
            verify(sch, batch, progress=self.progress)
        if self._is_first:
            self._tell(self.report)

    def _tell(self, report: Report) -> None:
        """Log in one line what was rewritten, or warn that nothing was, and why."""
        if report.count():
            checked = ", verified" if self.check else ""
            places = counted(len({entry.path for entry in report.select(status="applied")}), "module")
            _say(logging.INFO, "fxschedule: %s in %s%s", counted(report.count(), "match", "matches"), places, checked)
        else:
            told = (f"{entry.rule}: {entry.reason.partition(chr(10))[0]}" for entry in report.entries if entry.reason)
            reasons = dict.fromkeys(told)
            why = "; ".join(list(reasons)[:3]) or "no rule is about anything in this model"
            _say(logging.WARNING, "fxschedule: nothing was rewritten: %s", why)

    def _rewrite_at_the_first_call(self, model: nn.Module) -> None:
        def rewrite(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hook.remove()  # the inside of a module with hooks is left alone
            batch = _inputs(module, args, kwargs)
            self._rewrite(create_schedule(module, batch), batch)

        hook = model.register_forward_pre_hook(rewrite, with_kwargs=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Add the numbers of rewrites in effect, fallbacks and adaptations to what is logged."""
        if self.report is None:
            return
        counts = {"active": self.report.active, "fallbacks": sum(self.report.fallbacks.values())}
        counts["adaptations"] = sum(map(len, self.report.adapted.values()))
        for name, count in counts.items():
            for entry in (logs, *state.log_history[-1:]):
                if entry is not None:
                    entry[f"fxschedule/{name}"] = count
            if self.writer is not None and state.is_world_process_zero:
                self.writer.add_scalar(f"fxschedule/{name}", count, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Undo all steps unless ``keep`` is set."""
        if not self.keep and self.schedule is not None and self.schedule.history:
            self.schedule.undo_all()


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as example inputs: by position, or by name if any was passed so."""
    if not kwargs:
        return args
    positional = inspect.signature(module.forward).bind_partial(*args).arguments
    return {**positional, **kwargs}
