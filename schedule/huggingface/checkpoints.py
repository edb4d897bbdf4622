"""``Trainer`` whose checkpoints resume on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from schedule.distributed import full_tensor
from schedule.distributed.checkpoint import load_sharded, save_sharded

_WEIGHTS, _SCHEDULER = "sharded", "scheduler.pt"


class ShardedTrainer(Trainer):
    """``Trainer`` for sharded models, whose checkpoints resume on any number of processes.

    ``Trainer`` saves from one process, which has only its shards. Here all processes write the model and its
    optimizer together, each tensor once, to the folder ``sharded`` of a checkpoint
    (:func:`schedule.distributed.checkpoint.save_sharded`), which ``train(resume_from_checkpoint=…)`` reads, sharded in
    any way or not at all. :meth:`save_model` writes whole weights for ``from_pretrained``.

    For another trainer, inherit from both: ``class Mine(ShardedTrainer, SFTTrainer): ...``.
    """

    model: Any
    lr_scheduler: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights for ``from_pretrained``. All processes must call it."""
        folder = str(output_dir or self.args.output_dir)
        if _internal_call and output_dir is not None:  # of a checkpoint
            save_sharded(self.model, Path(folder, _WEIGHTS), None if self.args.save_only_model else self._optimizer())
            return
        whole, writes = self._whole_state(), self.args.should_save
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(folder, state_dict=whole, is_main_process=writes)  # on all: it may wait for the others
        if writes and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _whole_state(self) -> dict[str, torch.Tensor]:
        """Gather the ``state_dict``, each tied tensor once."""
        state = self.model.state_dict(keep_vars=True)
        gathered = {id(value): full_tensor(value.detach()) for value in {id(v): v for v in state.values()}.values()}
        return {name: gathered[id(value)] for name, value in state.items()}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the scheduler, since the optimizer was saved with the model."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_sharded(model or self.model, Path(resume_from_checkpoint, _WEIGHTS))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, _SCHEDULER).exists():  # not with save_only_model
            load_sharded(self.model, Path(checkpoint, _WEIGHTS), self._optimizer())
            saved = torch.load(Path(checkpoint, _SCHEDULER), weights_only=True)
            groups = len(self._optimizer().param_groups)
            self.lr_scheduler.load_state_dict({name: _of_groups(value, groups) for name, value in saved.items()})

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _optimizer(self) -> Any:
        """Return torch's optimizer, which accelerate wraps."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _of_groups(value: Any, groups: int) -> Any:
    """Return a list of one value a group for other groups: ``Trainer`` splits them by the mesh of their parameters."""
    if isinstance(value, list) and len(value) != groups and value == value[:1] * len(value):
        return value[:1] * groups
    return value
