"""Snapshots of the Python state and tensors reachable from a model."""

from schedule.capture.snapshots.entries import Entry
from schedule.capture.snapshots.modes import modes_restored
from schedule.capture.snapshots.pieces import entries_as_after
from schedule.capture.snapshots.snapshot import Snapshot, restored

__all__ = ["Entry", "Snapshot", "entries_as_after", "modes_restored", "restored"]
