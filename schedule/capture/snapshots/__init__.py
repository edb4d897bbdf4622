"""Snapshots of the Python state that a model can reach, and of its tensors."""

from schedule.capture.snapshots.entries import Entry
from schedule.capture.snapshots.modes import modes_restored
from schedule.capture.snapshots.pieces import entries_as_after
from schedule.capture.snapshots.snapshot import Snapshot, restored

__all__ = ["Entry", "Snapshot", "entries_as_after", "modes_restored", "restored"]
