"""Small models, processes to run them in, and the bytes that these send."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedule.distributed.communication.groups import Collective, group_rank, group_size

LAYERS, WIDTH, ROWS, LENGTH = 2, 256, 2, 64
NUMBER = 4
"""Bytes of a number in float32."""


def _common(width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "intermediate_size": 4 * width,
        "vocab_size": 1024,
    }


def models(width: int = WIDTH) -> dict[str, Any]:
    """Small models of real shapes: name → configuration."""
    common = _common(width)
    return {
        "gpt2": transformers.GPT2Config(n_layer=LAYERS, n_embd=width, n_head=8, vocab_size=1024, n_positions=256),
        "llama (8:2)": transformers.LlamaConfig(**common, num_key_value_heads=2),
        "bert": transformers.BertConfig(**common),
        "mixtral": transformers.MixtralConfig(**common, num_key_value_heads=2, num_local_experts=4),
    }


def mixtures() -> dict[str, Any]:
    """Small mixtures of experts: name → configuration."""
    few = {"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": WIDTH, "num_experts": 8}
    qwen = transformers.Qwen3MoeConfig(**_common(WIDTH), **few, num_experts_per_tok=3)
    return {"mixtral": models()["mixtral"], "qwen3-moe": qwen}


def made(config: Any, length: int = LENGTH, attention: str = "eager") -> tuple[nn.Module, dict[str, Tensor]]:
    """Build the model of a configuration, and a batch for it."""
    auto = transformers.AutoModelForMaskedLM if config.model_type == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config, attn_implementation=attention).eval()
    ids = torch.randint(3, 1000, (ROWS, length))
    return model, {"input_ids": ids, "labels": ids}


def sent(collectives: Sequence[Collective], ranks: int) -> int:
    """Return the bytes sent by each rank with ring algorithms, from the sizes of its inputs."""
    total = 0
    for one in collectives:
        part = one.nbytes * (ranks - 1)
        total += {"all_reduce": 2 * part // ranks, "all_gather": part}.get(one.op, part // ranks)
    return total


class Sent(TorchDispatchMode):
    """Counts the collectives of this rank, and the bytes that it sends to others."""

    observes_only = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Count collectives, and run everything."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ != "wait_tensor":
            op = re.sub("(_into)?(_tensor|_single)$", "", func.overloadpacket.__name__)
            x, *_, group = args
            self.counts[op] += 1
            if op == "all_to_all":
                others = sum(args[2]) - args[2][group_rank(group)]
                self.nbytes += x.nbytes * others // max(1, len(x))
            else:
                self.nbytes += sent([Collective(op, x.nbytes)], group_size(group))
        return func(*args, **(kwargs or {}))


def _process(rank: int, store: str, ranks: int, work: Callable[[], Iterator[Any]], found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = list(work())
    if rank == 0:
        found.put(rows)
    dist.destroy_process_group()


def in_processes(work: Callable[[], Iterator[Any]], ranks: int) -> list[Any]:
    """Run ``work`` in processes of one gloo group, and return what the first one yields."""
    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, args=(f"{folder}/store", ranks, work, found), nprocs=ranks)
    rows: list[Any] = found.get()
    return rows
