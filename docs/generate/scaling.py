"""Tables of the pages of scaling and of tuning: what was counted and searched, and what the cost model gives."""

from __future__ import annotations

from benchmarks.scaling import long_sequences, table
from benchmarks.sharing import Modeled
from benchmarks.tuning import EXTREMES, lines
from docs.generate.docstrings import as_table
from docs.generate.numbers import results

_NAMES = {
    "gpt2": "GPT-2",
    "bert": "BERT",
    "llama (8:2)": "Llama, 8 heads and 2",
    "mixtral": "Mixtral",
    "qwen3-moe": "Qwen3-MoE",
}


def counted_reference() -> str:
    """Collectives and bytes of tensor parallelism over the least there can be, without and with ``sequence=True``."""
    head = ["model", "all-reduces forward + backward", "bytes", "bytes with `sequence=True`", "held"]
    rows, found = [head], results("distributed")["counted"]
    for plain, sequence in zip(found[::2], found[1::2], strict=True):
        counts = f"{sum(plain['forward'].values())} + {sum(plain['backward'].values())}"
        ratios = [f"{row['sent'] / row['minimum']:.2f}" for row in (plain, sequence)]
        rows.append([_NAMES[plain["model"]], counts, *ratios, f"{plain['held']:.2f}"])
    return "\n".join(as_table(rows))


def shared_reference() -> str:
    """Bytes of ranks that share experts or sequences, counted and modeled."""
    head = ["model", "ranks", "collectives", "bytes", "over the minimum", "model"]
    rows = [[_NAMES[row["model"]], *Modeled(**row).cells[1:]] for row in results("distributed")["modeled"]]
    return "\n".join(as_table([head, *rows]))


def worked_out_reference() -> str:
    """The time of a step by the cost model."""
    return "\n".join(table())


def long_sequence_reference() -> str:
    """Tensor beside context parallelism, by the cost model."""
    return "\n".join(long_sequences())


def search_reference() -> str:
    """The best step found by three searches, and the extremes beside them."""
    found = results("tuning_gpt2_cpu")["searches"]
    none, every = (found[-1][name] for name in EXTREMES)
    extremes = (
        f"The extremes: without checkpointing a step needs {none['memory'] / 1e6:.0f} MB and takes {none['time']:.2f}; "
        f"with every block checkpointed it needs {every['memory'] / 1e6:.0f} MB and takes {every['time']:.2f}."
    )
    return "\n".join([*lines(found), "", extremes])
