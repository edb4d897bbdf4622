"""Part C: training steps of whole models: HuggingFace's own, scheduled, compiled, both, and with Liger-Kernel."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

import schedule
from benchmarks.gpu.clock import Clock, microseconds, peak_above
from benchmarks.gpu.log import Log
from benchmarks.gpu.queue import Item

Batch = dict[str, torch.Tensor]

CANDIDATES = ("HF sdpa", "ours", "ours, all", "torch.compile", "ours + compile", "Liger", "HF eager")
SCENARIOS = (
    ("gpt2", "autocast"),
    ("llama", "bf16"),
    ("gpt2", "bf16"),
    ("llama", "autocast"),
    ("bert", "autocast"),
    ("qwen3_moe", "bf16"),
    ("bert", "bf16"),
    ("qwen3_moe", "autocast"),
)
"""Models and precisions, most important first."""
FIRST_STEPS = 5
_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Model:
    """An architecture with the shape of its batch, at full size and for a dry run."""

    config: Callable[[], Any]
    tiny: Callable[[], Any]
    auto: Any
    rows: int
    length: int


MODELS = {
    "gpt2": Model(
        lambda: hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False),
        lambda: hf.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
        ),
        hf.AutoModelForCausalLM,
        16,
        1024,
    ),
    "llama": Model(
        lambda: hf.LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            use_cache=False,
        ),
        lambda: hf.LlamaConfig(**_TINY, num_key_value_heads=2, use_cache=False),
        hf.AutoModelForCausalLM,
        4,
        2048,
    ),
    "bert": Model(
        lambda: hf.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        lambda: hf.BertConfig(**_TINY, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        hf.AutoModelForMaskedLM,
        32,
        512,
    ),
    "qwen3_moe": Model(
        lambda: hf.Qwen3MoeConfig(
            vocab_size=32000,
            hidden_size=1024,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            moe_intermediate_size=512,
            num_experts=16,
            num_experts_per_tok=4,
            use_cache=False,
        ),
        lambda: hf.Qwen3MoeConfig(
            **_TINY,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        ),
        hf.AutoModelForCausalLM,
        8,
        1024,
    ),
}


def items(device: str) -> list[Item]:
    """Return the items: compilations beside one another first, then each scenario with its candidates."""
    found = [
        Item(f"warm {model} {precision} {name}", warm_up, (model, precision, name, device), 0, 150, 30)
        for model, precision in SCENARIOS[:2]
        for name in ("torch.compile", "ours + compile")
    ]
    for place, (model, precision) in enumerate(SCENARIOS, start=1):
        for name in CANDIDATES:
            if name == "Liger" and not _has_liger(MODELS[model].config().model_type, device):
                continue
            priority = place if name != "HF eager" else place + len(SCENARIOS)
            work = (model, precision, name, device)
            found.append(Item(f"{model} {precision} {name}", train, work, priority, 90, 12, alone=device == "cuda"))
    return found


def _has_liger(model_type: str, device: str) -> bool:
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return False
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    return model_type in patches


def build(model: str, precision: str, name: str, device: str) -> tuple[nn.Module, Batch]:
    """Build a model with the same weights for every candidate, and its batch."""
    kind = MODELS[model]
    config = kind.config() if device == "cuda" else kind.tiny()
    torch.manual_seed(0)
    with torch.device(device):
        attention = "eager" if name == "HF eager" else "sdpa"
        built = kind.auto.from_config(config, attn_implementation=attention).train()
        shape = (kind.rows, kind.length) if device == "cuda" else (2, 16)
        ids = torch.randint(0, config.vocab_size, shape)
    built = built.to(device, torch.bfloat16 if precision == "bf16" else None)
    return built, {"input_ids": ids, "labels": ids.clone()}


def precision_of(precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()


def prepared(model: nn.Module, batch: Batch, precision: str, name: str, device: str) -> tuple[Any, Any]:
    """Return what to call for a candidate, and the report of its schedule if it has one."""
    report = None
    if name.startswith("ours"):
        with precision_of(precision, device):
            rules = "default" if name == "ours" else "all"
            report = schedule.optimize(model, batch, rules=rules, cost_guard=device == "cuda")
    if name == "Liger":
        importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    if name.endswith("compile"):
        return torch.compile(model, backend="inductor" if device == "cuda" else "eager"), report
    return model, report


def warm_up(log: Log, model: str, precision: str, name: str, device: str) -> None:
    """Compile a candidate for one forward and backward pass, so that its kernels are in the caches on disk."""
    warnings.filterwarnings("ignore")
    built, batch = build(model, precision, name, device)
    run, _ = prepared(built, batch, precision, name, device)
    start = time.perf_counter()
    with precision_of(precision, device):
        loss = run(**batch).loss
    loss.backward()
    log.result(model=model, precision=precision, candidate=name, compiled=round(time.perf_counter() - start, 1))


def train(log: Log, model: str, precision: str, name: str, device: str) -> None:
    """Measure training steps of one candidate, after a few whose last loss is written down."""
    warnings.filterwarnings("ignore")
    built, batch = build(model, precision, name, device)
    start = time.perf_counter()
    run, report = prepared(built, batch, precision, name, device)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4, fused=device == "cuda")

    def step() -> torch.Tensor:
        with precision_of(precision, device):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        detached: torch.Tensor = loss.detach()
        return detached

    losses = [float(step()) for _ in range(FIRST_STEPS)]
    clock = Clock(device)
    clock.synchronize()
    first = time.perf_counter() - start
    # The weights and the state of the optimizer are there already: what a step adds is counted on top of them.
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    peak = held + peak_above(step, device)
    rounds, calls = (5, 4) if device == "cuda" else (1, 1)
    timing = clock.back_to_back({"step": lambda _: step}, rounds, calls)["step"]
    rewrites = {} if report is None else report.applied
    fallbacks = {} if report is None else report.fallbacks
    log.result(
        model=model,
        precision=precision,
        candidate=name,
        us=microseconds(timing),
        peak=peak,
        first_s=round(first, 1),
        losses=[round(loss, 4) for loss in losses],
        rewrites=rewrites,
        fallbacks=sum(fallbacks.values()),
    )
