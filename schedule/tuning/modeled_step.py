"""Cost of a training step on many devices for a search, by the cost model."""

from __future__ import annotations

from schedule.core.node import Node
from schedule.tuning.cost_model import Machine, Shape, peak_bytes, step_time
from schedule.tuning.measuring import Measured
from schedule.util.errors import NotApplicable


class ModeledStep:
    """Modeled cost for :func:`schedule.tune` of a training step on many devices, without running it.

    Its knobs are ``split`` (tensor parallel, pipeline; the rest is data parallel), ``micro_batch`` (rows per part),
    ``recomputed``, ``experts`` (data-parallel groups over which experts are spread) and ``context`` (devices that share
    each sequence). Time is in seconds, memory in bytes of the fullest device::

        cost = ModeledStep(Shape.of(model), devices=64, rows=512, sequence=4096)
        space = {"split": schedule.splits(64), "micro_batch": [1, 2, 4], "recomputed": [False, True]}
        tuning = schedule.tune(model, lambda sch: None, space, batch, memory=80 * 10**9, cost=cost)

    Args:
        shape: of the model.
        devices: number of devices.
        rows: of the batch of a step, on all devices.
        sequence: tokens per row.
        machine: to run on.
    """

    def __init__(self, shape: Shape, devices: int, rows: int, sequence: int, machine: Machine | None = None) -> None:
        self.shape, self.devices, self.rows, self.sequence = shape, devices, rows, sequence
        self.machine = machine or Machine()

    def __call__(
        self,
        sch: Node,
        split: tuple[int, int] = (1, 1),
        micro_batch: int = 1,
        recomputed: bool = False,
        experts: int = 1,
        context: int = 1,
    ) -> Measured:
        """Compute time and memory of a step.

        Raises:
            NotApplicable: heads, layers, tokens, devices, rows or experts cannot be divided evenly.
        """
        tensor, stages = split
        self._check_shares("devices", self.devices, tensor * context * stages)
        data = self.devices // (tensor * context * stages)
        self._check_shares("tokens", self.sequence, context)
        self._check_shares("heads", self.shape.heads, tensor)
        self._check_shares("layers", self.shape.layers, stages)
        self._check_shares("rows", self.rows, data * micro_batch)
        if experts > 1:
            self._check_shares("data-parallel groups", data, experts)
            count = self.shape.mixture.experts if self.shape.mixture else 1
            self._check_shares("experts", count, tensor * experts)
        parts, tokens = self.rows // (data * micro_batch), micro_batch * self.sequence
        time = step_time(
            self.shape,
            self.machine,
            self.sequence,
            parts * tokens,
            tensor,
            stages,
            data,
            parts,
            recomputed,
            experts,
            context,
        )
        memory = peak_bytes(self.shape, tokens, tensor, stages, parts, recomputed, experts, context)
        return Measured(time.seconds(), memory)

    def _check_shares(self, what: str, count: int, ways: int) -> None:
        if count % ways:
            raise NotApplicable(f"{count} {what} cannot be split evenly into {ways}", fix=f"a divisor of {count}")
