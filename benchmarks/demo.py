"""GPT-2, BERT and Llama, scheduled and trained next to their unscheduled twins: ``python -m benchmarks.demo``.

Random weights, eager attention, CPU. For each architecture: rewrite, verify, train both models 20 steps on the same
data with the same seeds, and report the rewrites, the savings, the step time, and how far the twins drifted apart.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers as hf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import fused
import schedule

VOCABULARY = 4096
WIDTH = dict(vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=3, num_attention_heads=8)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: hf.AutoModelForCausalLM.from_config(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=512, n_layer=3, n_head=8, use_cache=False),
        attn_implementation="eager",
    ),
    "BERT": lambda: hf.AutoModelForMaskedLM.from_config(
        hf.BertConfig(**WIDTH, intermediate_size=2048), attn_implementation="eager"
    ),
    "Llama": lambda: hf.AutoModelForCausalLM.from_config(
        hf.LlamaConfig(**WIDTH, num_key_value_heads=4, intermediate_size=1376, use_cache=False),
        attn_implementation="eager",
    ),
}
ROWS, LENGTH, LEARNING_RATE, WARM_UP = 4, 256, 1e-4, 3

Batch = dict[str, torch.Tensor]


def batch(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Batch:
    """Return random tokens with padding in the last row."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, -length // 8 :] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids.clone())


@dataclass
class Twin:
    """One of the two models in training.

    Attributes:
        seconds: duration of each step.
        losses: loss of each step.
    """

    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, eps=1e-6)

    def step(self, inputs: Batch, seed: int) -> None:
        """Run and time one training step."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss.detach()))


@dataclass(frozen=True)
class Result:
    """Comparison of the twins of one architecture after training.

    Attributes:
        ratio: step time of the scheduled model over its twin's: lower quartile, median, upper quartile.
        loss: largest relative difference between the losses.
        weight: largest difference of a weight, as a fraction of learning rate × steps.
    """

    ratio: tuple[float, float, float]
    seconds: tuple[float, float]
    loss: float
    weight: float
    verified: float


def train(ours: nn.Module, theirs: nn.Module, steps: int, tick: Callable[[], None]) -> tuple[Twin, Twin]:
    """Train both models step by step, alternating the order of the two."""
    twins = Twin(ours.train()), Twin(theirs.train())
    for step in range(steps):
        inputs = batch(seed=step)
        for twin in twins if step % 2 else reversed(twins):
            twin.step(inputs, seed=step)
        tick()
    return twins


def compare(ours: Twin, theirs: Twin, steps: int, verified: float) -> Result:
    """Compare step times, without the first steps (kernel compilation), and deviations over all steps."""
    timed = slice(min(WARM_UP, steps // 2), None)
    ratios = [a / b for a, b in zip(ours.seconds[timed], theirs.seconds[timed], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    medians = statistics.median(ours.seconds[timed]), statistics.median(theirs.seconds[timed])
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    weights = max(float((a - b).abs().max().detach()) for a, b in pairs)
    return Result((low, median, high), medians, losses, weights / (LEARNING_RATE * steps), verified)


def summary(results: dict[str, tuple[schedule.Report, Result]]) -> Table:
    """Return a table with one row per architecture."""
    table = Table(title="20 training steps beside the untouched twin", title_justify="left")
    for name in ("", "places", "kept for backward", "dispatched ops", "step time [quartiles]", "largest deviation"):
        table.add_column(name, justify="left" if not name else "right")
    for name, (report, result) in results.items():
        before, after = report.measured["before"], report.measured["after"]
        low, median, high = result.ratio
        table.add_row(
            name,
            str(sum(report.applied.values())),
            f"{before.saved_bytes / 1e6:,.0f} → {after.saved_bytes / 1e6:,.0f} MB",
            f"{before.dispatched:,} → {after.dispatched:,}",
            f"{result.seconds[1] * 1e3:,.0f} → {result.seconds[0] * 1e3:,.0f} ms\n"
            f"{median:.2f} × [{low:.2f}, {high:.2f}]",
            f"verified {result.verified:.0e}\nloss {result.loss:.0e}\nweights {result.weight:.0e}",
        )
    table.caption = (
        f"batch {ROWS} × {LENGTH}, {torch.get_num_threads()} threads, {fused.backends()['masked_softmax']}; "
        f"the first {WARM_UP} steps, which compile, are not timed; weights as a share of learning rate × steps"
    )
    return table


def run(name: str, steps: int, progress: Progress) -> tuple[schedule.Report, Result]:
    """Schedule, verify and train one architecture."""
    task = progress.add_task(f"{name}: schedule", total=steps + 3)
    torch.manual_seed(0)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, batch())
    report = schedule.optimize(sch)
    progress.update(task, advance=1, description=f"{name}: verify")
    verified = schedule.verify(sch, batch(4, 96), steps=1).report.max_deviation
    progress.update(task, advance=1, description=f"{name}: count")
    report.measure()
    progress.update(task, advance=1, description=f"{name}: train")
    twins = train(model, twin, steps, lambda: progress.advance(task))
    progress.update(task, description=f"{name}: done")
    return report, compare(*twins, steps, verified)


def main() -> None:
    """Run the architectures and print the reports and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=MODELS, action="append", help="an architecture; may be repeated")
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    console = Console(width=max(Console().width, 100))
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = {}
    with warnings.catch_warnings(), Progress(*columns, console=console) as progress:
        warnings.simplefilter("ignore")
        for name in options.only or MODELS:
            results[name] = run(name, options.steps, progress)
    for report, _ in results.values():
        console.print(report)
    console.print(summary(results))


if __name__ == "__main__":
    main()
