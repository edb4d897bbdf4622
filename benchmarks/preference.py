"""Training steps on hidden states against the usual ones on full logits: ``python -m benchmarks.preference``.

Two losses: DPO, of which the log-probabilities of the reference model are given, as trainers compute them ahead; and
distillation from a teacher of twice the width, whose hidden states are computed in each step. The models are Llama
decoders with a vocabulary of their usual size. Candidates: the formula on full logits, the same under torch.compile,
and the fused op. Losses and gradients are compared before anything is measured. Printed are the seconds of a step and
the peak of bytes newly allocated in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
CANDIDATES = ("full logits", "torch.compile", "fused")


def _decoder(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * hidden
    )
    return hf.AutoModelForCausalLM.from_config(config)


def _on_full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    found = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets != -100, found, 0.0).sum(-1)


def _steps_of(model: nn.Module, losses: dict[str, Callable[[Tensor], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Return a step for each loss of the hidden states of the same tokens."""
    tokens = _tokens()

    def step(loss_of: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            model.zero_grad()
            loss = loss_of(model.model(tokens).last_hidden_state)
            loss.backward()
            return loss.detach()

        return run

    return {name: step(loss) for name, loss in losses.items()}


def _tokens() -> Tensor:
    return torch.randint(VOCAB, (2 * PAIRS, TOKENS), generator=torch.Generator().manual_seed(0))


def _preference(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    targets = _tokens().roll(-1, 1)
    targets[:, -1] = -100
    reference = torch.full((2 * PAIRS,), -10.0 * TOKENS)

    def loss(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def of(hidden: Tensor) -> Tensor:
            return fused.dpo_loss(*log_probs(hidden, model.lm_head.weight, targets).chunk(2), *reference.chunk(2))

        return of

    candidates = (_on_full_logits, torch.compile(_on_full_logits), fused.sequence_log_probs)
    return _steps_of(model, {name: loss(each) for name, each in zip(CANDIDATES, candidates, strict=True)})


def _divergence(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Compute the mean Jensen-Shannon divergence on full logits."""
    log_q, log_p = (torch.log_softmax(h @ w.T, -1) for h, w in ((hidden, weight), (teacher_hidden, teacher_weight)))
    log_m = torch.log((log_p.exp() + log_q.exp()) / 2)
    divergences = (
        torch.nn.functional.kl_div(log_m, each, log_target=True, reduction="none") for each in (log_p, log_q)
    )
    return sum(each.sum(-1).mean() for each in divergences) / 2  # type: ignore[return-value]


def _distillation(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    teacher = _decoder(2 * HIDDEN)

    def loss(divergence: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def of(hidden: Tensor) -> Tensor:
            with torch.no_grad():
                known = teacher.model(_tokens()).last_hidden_state
            return divergence(hidden, model.lm_head.weight, known, teacher.lm_head.weight.detach())

        return of

    candidates = (_divergence, torch.compile(_divergence), fused.linear_distillation_loss)
    return _steps_of(model, {name: loss(each) for name, each in zip(CANDIDATES, candidates, strict=True)})


def _gradients(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    return step(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)


def main() -> None:
    """Compare, measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = _measured("DPO step", _preference, options.rounds)
    results["distillation"] = _measured("distillation step", _distillation, options.rounds)
    write_json(options.out, results)


def _measured(
    title: str, steps_of: Callable[[nn.Module], dict[str, Callable[[], Tensor]]], rounds: int
) -> dict[str, Any]:
    """Compare the candidates, measure them in turns, print the table, and return the figures."""
    model = _decoder(HIDDEN)
    steps = steps_of(model)
    expected = _gradients(model, steps["full logits"])
    for step in steps.values():
        torch.testing.assert_close(_gradients(model, step), expected, rtol=1e-3, atol=1e-5)
    times = interleaved(steps, rounds)
    size = 2 * PAIRS * TOKENS * VOCAB * 4
    table = Table(
        "candidate", "step s", "×", "peak MiB", "× logits", title=f"{title}, logits of {size / 2**20:.0f} MiB"
    )
    rows: dict[str, Any] = {}
    for name, step in steps.items():
        peak = peak_bytes(step, "cpu")
        rows[name] = {"step": asdict(times[name]), "peak": peak}
        factor = times[name].median / times["full logits"].median
        table.add_row(name, f"{times[name].median:.2f}", f"{factor:.2f}", f"{peak / 2**20:.0f}", f"{peak / size:.2f}")
    Console().print(table)
    return {"logits": size, **rows}


if __name__ == "__main__":
    main()
