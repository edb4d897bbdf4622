"""A DPO step on hidden states against the usual one on full logits: ``python -m benchmarks.preference [--rounds 5]``.

The policy is a Llama decoder with a vocabulary of its usual size; the reference model's log-probabilities are given, as
trainers compute them ahead. Candidates: the formula on full logits, the same under torch.compile, and
``fused.sequence_log_probs`` with ``fused.dpo_loss``. Losses and gradients are compared before anything is measured.
Printed are the seconds of a step and the peak of bytes newly allocated in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fused
from benchmarks.timing import interleaved, write_json
from schedule.report.costs import peak_bytes

RESULTS = Path(__file__).parent / "results" / "preference.json"
PAIRS, TOKENS, HIDDEN, VOCAB = 2, 256, 128, 32_000


def _policy() -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * HIDDEN
    )
    return hf.AutoModelForCausalLM.from_config(config)


def _on_full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    found = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets != -100, found, 0.0).sum(-1)


def _steps(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    tokens = torch.randint(VOCAB, (2 * PAIRS, TOKENS))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    reference = torch.full((2 * PAIRS,), -10.0 * TOKENS)

    def step(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            model.zero_grad()
            hidden = model.model(tokens).last_hidden_state
            found = log_probs(hidden, model.lm_head.weight, targets)
            loss = fused.dpo_loss(*found.chunk(2), *reference.chunk(2))
            loss.backward()
            return loss.detach()

        return run

    return {
        "full logits": step(_on_full_logits),
        "torch.compile": step(torch.compile(_on_full_logits)),
        "fused": step(fused.sequence_log_probs),
    }


def _gradients(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    return step(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)


def main() -> None:
    """Compare, measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model = _policy()
    steps = _steps(model)
    expected = _gradients(model, steps["full logits"])
    for step in steps.values():
        torch.testing.assert_close(_gradients(model, step), expected, rtol=1e-3, atol=1e-5)
    times = interleaved(steps, options.rounds)
    size = 2 * PAIRS * TOKENS * VOCAB * 4
    title = f"DPO step, logits of {size / 2**20:.0f} MiB"
    table = Table("candidate", "step s", "×", "peak MiB", "× logits", title=title)
    rows = {}
    for name, step in steps.items():
        peak = peak_bytes(step, "cpu")
        rows[name] = {"step": asdict(times[name]), "peak": peak}
        factor = times[name].median / times["full logits"].median
        table.add_row(name, f"{times[name].median:.2f}", f"{factor:.2f}", f"{peak / 2**20:.0f}", f"{peak / size:.2f}")
    Console().print(table)
    write_json(options.out, {"logits": size, **rows})


if __name__ == "__main__":
    main()
