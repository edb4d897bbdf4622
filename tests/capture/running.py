"""Modules run by the graphs of their own forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from schedule.capture.recording.recording import record
from schedule.capture.recording.structure import tensors
from schedule.capture.specializing.specialization import Specialization, specialize
from schedule.runtime.scheduled import install


def schedule_all(root: nn.Module, example: Any, only: str | None = None) -> list[Specialization]:
    """Trace the root (or the module at ``only``) for train and eval, and install the graphs."""
    recording = record(root, example)
    module = root.get_submodule(only or "")
    with recording.as_after_run():
        made = [
            specialize(module, type(module).forward, call, recording, training)
            for call in recording.calls[module]
            for training in (True, False)
        ]
    install(module, made, only or "")
    return made


def assert_same(a: Any, b: Any) -> None:
    left, right = list(tensors(a)), list(tensors(b))
    assert len(left) == len(right) and len(left) > 0
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
