"""Results of the cost model of docs/scaling.md for tensor and data parallelism at 8, 64 and 1,024 GPUs.

    python -m benchmarks.scaling

Nothing is measured: the figures are computed by :mod:`schedule.tuning.cost_model`, which ``schedule.tune`` can also use
in a search. The document names the sources of the figures, and has these tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schedule.tuning.cost_model import Machine, Shape, StepTime, peak_bytes, step_time

A100 = Machine()
NVLINK, NODES = A100.inside, A100.between
SEQUENCE = 4096


@dataclass(frozen=True)
class Llama:
    """A Llama model of one size.

    Attributes:
        tokens: number of tokens per step and GPU.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int
    vocabulary: int = 32000

    @property
    def parameters(self) -> int:
        """Number of all parameters, with separate embeddings and head."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return int(self.layers * layer) + self.outside

    @property
    def outside(self) -> int:
        """Number of parameters outside of the layers: embedding, head and last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden


SHAPES = {"7B": Llama(4096, 32, 11008, 32, 32, 16384), "70B": Llama(8192, 80, 28672, 64, 8, 4096)}


def step(llama: Llama, tensor: int, data: int) -> StepTime:
    """Return the time of one step of a model on ``tensor`` × ``data`` GPUs."""
    shape = Shape(llama.parameters, llama.layers, llama.hidden, llama.kv_heads)
    return step_time(shape, A100, SEQUENCE, llama.tokens * tensor, tensor, data=data)


ROWS = (
    ("7B", 1, 8), ("7B", 2, 4), ("7B", 8, 1), ("7B", 2, 32), ("7B", 2, 512), ("7B", 8, 128),
    ("70B", 8, 1), ("70B", 8, 8), ("70B", 8, 128),
)  # fmt: skip


def table() -> Iterator[str]:
    """Yield the lines of the table in the document."""
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


def long_sequences() -> Iterator[str]:
    """Yield the lines of the document's table of tensor and of context parallelism on eight GPUs."""
    yield "| model | tokens | TP 8: messages | step | memory | CP 8: messages | step | memory |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, llama in SHAPES.items():
        keys = llama.hidden * llama.kv_heads // llama.heads
        shape = Shape(llama.parameters, llama.layers, llama.hidden, llama.kv_heads, keys=keys, outside=llama.outside)
        for tokens in (SEQUENCE, 2**15, 2**17):
            cells = [name, f"{tokens:,}"]
            for tensor, context in ((8, 1), (1, 8)):
                one = step_time(shape, A100, tokens, tokens, tensor, context=context)
                size = peak_bytes(shape, tokens, tensor, context=context)
                cells += [f"{one.tensor + one.context:.2f} s", f"{one.seconds():.1f} s", f"{size / 1e9:,.0f} GB"]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables, and the two figures of its last row quoted in the document."""
    print("\n".join([*table(), "", *long_sequences()]))
    largest = step(SHAPES["70B"], 8, 128)
    print(f"\nlast row, with nothing hidden: {largest.of_peak(hiding=False):.0%}")
    print(f"its tensor parallelism between nodes: {largest.tensor * NVLINK.bandwidth / NODES.bandwidth:.0f} s")


if __name__ == "__main__":
    main()
