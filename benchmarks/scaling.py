"""The cost model of docs/scaling.md, worked out: what tensor and data parallelism cost at 8, 64 and 1,024 GPUs.

    python -m benchmarks.scaling

Nothing is measured. A collective takes α a message and a time for each byte (rings); compute is counted FLOPs at a
fraction of the peak. The document says where the figures come from, and a test holds its table to this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PEAK, REACHED = 312e12, 0.6
"""FLOP/s of an A100 in bf16, and what its products reach of them."""
BYTES, SEQUENCE = 2, 4096


@dataclass(frozen=True)
class Network:
    """Seconds a message, and bytes a second of each GPU."""

    alpha: float
    bandwidth: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds for ``size`` bytes by rings: a reduce-scatter and an all-gather."""
        return 2 * (ranks - 1) * self.alpha + 2 * size * (ranks - 1) / ranks / self.bandwidth


NVLINK, NODES = Network(5e-6, 235e9), Network(10e-6, 25e9)


@dataclass(frozen=True)
class Shape:
    """A Llama.

    Attributes:
        name: such as ``7B``.
        tokens: of a step, a GPU.
    """

    name: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int
    vocabulary: int = 32000

    @property
    def parameters(self) -> int:
        """All of them; embeddings and head are two."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return int(self.layers * layer) + 2 * self.vocabulary * self.hidden + self.hidden


SHAPES = {
    "7B": Shape("7B", 4096, 32, 11008, 32, 32, 16384),
    "70B": Shape("70B", 8192, 80, 28672, 64, 8, 4096),
}


@dataclass(frozen=True)
class Step:
    """Seconds of one step.

    Attributes:
        compute: products.
        tensor: all-reduces of hidden states, none of them hidden.
        data: the all-reduce of the gradients, of which as much as half of the compute may hide.
    """

    compute: float
    tensor: float
    data: float

    @property
    def hidden(self) -> bool:
        """Whether the compute hides the gradients' all-reduce."""
        return self.data <= self.compute / 2

    def of_peak(self, hiding: bool = True) -> float:
        """FLOP/s reached, as a fraction of the peak."""
        seen = max(0.0, self.data - self.compute / 2) if hiding else self.data
        return REACHED * self.compute / (self.compute + self.tensor + seen)


def step(shape: Shape, tensor: int, data: int) -> Step:
    """One step of a model on ``tensor`` × ``data`` GPUs."""
    tokens = shape.tokens * tensor
    flops = 6 * shape.parameters + 12 * shape.layers * shape.hidden * SEQUENCE
    reduced = NVLINK.all_reduce(BYTES * tokens * shape.hidden, tensor)
    gradients = NODES.all_reduce(BYTES * shape.parameters / tensor, data)
    return Step(flops * tokens / tensor / (PEAK * REACHED), 4 * shape.layers * reduced, gradients)


ROWS = (
    ("7B", 1, 8), ("7B", 2, 4), ("7B", 8, 1), ("7B", 2, 32), ("7B", 2, 512), ("7B", 8, 128),
    ("70B", 8, 1), ("70B", 8, 8), ("70B", 8, 128),
)  # fmt: skip


def table() -> Iterator[str]:
    """The lines of the document's table."""
    yield "| model | GPUs | TP × DP | compute | TP | DP | of peak |"
    yield "|---|---|---|---|---|---|---|"
    for name, tensor, data in ROWS:
        one = step(SHAPES[name], tensor, data)
        gradients = "0" if data == 1 else f"{one.data:.2f} s, {'hidden' if one.hidden else 'half hidden'}"
        reduced = f"{one.tensor:.2f} s" if tensor > 1 else "0"
        yield (
            f"| {name} | {tensor * data:,} | {tensor} × {data} | {one.compute:.2f} s | {reduced} | {gradients} "
            f"| {one.of_peak():.0%} |".replace("%", " %")
        )


def main() -> None:
    """Print the table, and what the text says of its last row."""
    print("\n".join(table()))
    largest = step(SHAPES["70B"], 8, 128)
    print(f"\nlast row, with nothing hidden: {largest.of_peak(hiding=False):.0%}")
    print(f"its tensor parallelism between nodes: {largest.tensor * NVLINK.bandwidth / NODES.bandwidth:.0f} s")


if __name__ == "__main__":
    main()
