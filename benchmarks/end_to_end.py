"""Whole models: original, scheduled, torch.compile, and both together.

    python -m benchmarks.end_to_end [--only gpt2 llama] [--attention eager sdpa] [--rounds 7]

Real architectures at full width with few layers, random weights, no dropout. One line per model and candidate: time of
a forward and of a training step relative to the original (medians of interleaved rounds with quartiles), bytes saved
for backward, peak memory of a step, and the seconds a fresh process takes to the end of its first step. The latter is
given for a model that ran before, for one with only its kernels cached because a model of half the depth ran before,
and with cold caches. On a shared machine only the ratios are meaningful.

Each figure is printed and written to the JSON file as it comes: of every model the times of steps and forwards and the
memory, and then the first steps, which take the longest (``--steps-only`` leaves them out).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import schedule
from benchmarks.ops import synchronized
from benchmarks.timing import Timing, interleaved, write_json
from schedule.report.costs import measure, peak_bytes

RESULTS = Path(__file__).parent / "results"
FIRST_STEPS = ("first step", "deeper", "cold")
CANDIDATES = {
    "original": None,
    "ours": "default",
    "ours, all": "all",
    "torch.compile": None,
    "ours + compile": "default",
}
"""Candidates, with the rules applied to each; None for no scheduling."""
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """An architecture, and the function to make its batch."""

    config: Callable[[], Any]
    auto: Any
    batch: Callable[[], Batch]

    def build(self, attention: str, device: str, shallower: bool = False) -> nn.Module:
        """Build the model in training mode, with the same weights each time, or one of half the depth."""
        torch.manual_seed(0)
        config = self.config()
        for name in ("num_hidden_layers", "num_decoder_layers") if shallower else ():
            if hasattr(config, name):
                setattr(config, name, getattr(config, name) // 2)
        model = self.auto.from_config(config, attn_implementation=attention)
        return model.to(device).train()


def tokens(rows: int, length: int, vocabulary: int) -> Batch:
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(4, 3, 224, 224, generator=generator), "labels": torch.tensor([0, 1, 0, 1])}


MODELS = {
    "gpt2": Model(
        lambda: hf.GPT2Config(n_layer=4, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        hf.AutoModelForCausalLM,
        lambda: tokens(4, 256, 50257),
    ),
    "bert": Model(
        lambda: hf.BertConfig(num_hidden_layers=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        hf.AutoModelForMaskedLM,
        lambda: tokens(4, 256, 30522),
    ),
    "llama": Model(
        lambda: hf.LlamaConfig(
            vocab_size=50257,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=4,
            num_attention_heads=12,
            num_key_value_heads=4,
            use_cache=False,
        ),
        hf.AutoModelForCausalLM,
        lambda: tokens(4, 256, 50257),
    ),
    "vit": Model(
        lambda: hf.ViTConfig(num_hidden_layers=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        hf.AutoModelForImageClassification,
        images,
    ),
    "t5": Model(
        lambda: hf.T5Config(num_layers=2, num_decoder_layers=2, dropout_rate=0, use_cache=False),
        hf.AutoModelForSeq2SeqLM,
        lambda: tokens(4, 256, 32128),
    ),
}


@dataclass(frozen=True)
class Measured:
    """One candidate of one model; None for what was not measured yet.

    Attributes:
        forward: seconds of a forward under ``no_grad``.
        step: seconds of forward, backward and AdamW.
        saved: bytes kept for backward; never measured with torch.compile, which hides them.
        peak: peak of bytes allocated in a step.
        first: seconds of a fresh process from the built model to the end of its first step, if the model ran before.
        first_deeper: the same if only a model of half the depth ran before: the kernels are cached, the graph is not.
        first_cold: the same if nothing was compiled before.
    """

    model: str
    attention: str
    candidate: str
    forward: Timing | None = None
    step: Timing | None = None
    saved: int | None = None
    peak: int | None = None
    first: float | None = None
    first_deeper: float | None = None
    first_cold: float | None = None


Figures = Iterator[tuple[str, dict[str, Any]]]
"""Pairs of a candidate and figures of it, by the names of :class:`Measured`'s attributes."""


def prepared(original: nn.Module, batch: Batch, candidate: str) -> Callable[..., Any]:
    """Return the callable of a candidate, after scheduling ``original`` in place if the candidate requires it."""
    rules = CANDIDATES[candidate]
    if rules is not None:
        schedule.optimize(original, batch, rules=rules)
    return torch.compile(original) if candidate.endswith("compile") else original


def stepping(model: Callable[..., Any], module: nn.Module, batch: Batch) -> Callable[[], None]:
    """Return a function to run one training step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_only(model: Callable[..., Any], batch: Batch) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            model(**batch)

    return forward


def running_figures(name: str, attention: str, device: str, rounds: int) -> Figures:
    """Measure the times of all candidates of one model in interleaved rounds, and then their memory."""
    torch._dynamo.reset()  # dynamo reaches its recompile limit if many models share a forward
    model = MODELS[name]
    batch = {key: value.to(device) for key, value in model.batch().items()}
    original = model.build(attention, device)
    modules = {candidate: copy.deepcopy(original) for candidate in CANDIDATES}
    runs = {candidate: prepared(module, batch, candidate) for candidate, module in modules.items()}
    steps = synchronized({c: stepping(runs[c], modules[c], batch) for c in CANDIDATES}, device)
    forwards = synchronized({c: forward_only(runs[c], batch) for c in CANDIDATES}, device)
    for figure, timed in {"step": steps, "forward": forwards}.items():
        for candidate, timing in interleaved(timed, rounds).items():
            yield candidate, {figure: timing}
    for candidate in CANDIDATES:
        if not candidate.endswith("compile"):
            yield candidate, {"saved": measure(modules[candidate], batch).saved_bytes}
        yield candidate, {"peak": peak_bytes(steps[candidate], device)}


def first_step_figures(name: str, attention: str, device: str) -> Figures:
    """Measure the first steps of all candidates of one model."""
    for candidate in CANDIDATES:
        warm, deeper, cold = first_steps(name, attention, candidate, device)
        yield candidate, {"first": warm, "first_deeper": deeper, "first_cold": cold}


def first_steps(name: str, attention: str, candidate: str, device: str) -> tuple[float, float, float]:
    """Return the seconds to the end of the first step in fresh processes: warm, with only kernels cached, and cold."""
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--first-step", name, attention, candidate]
    command += ["--device", device]

    def seconds(*runs: bool) -> list[float]:
        """Return the seconds of consecutive runs with shared caches (True: a model of half the depth)."""
        with tempfile.TemporaryDirectory() as caches:
            places = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
            outputs = [
                subprocess.run(
                    [*command, "--shallower"] if shallower else command,
                    capture_output=True,
                    text=True,
                    check=True,
                    env=os.environ | places,
                ).stdout
                for shallower in runs
            ]
        return [float(json.loads(output.splitlines()[-1])) for output in outputs]

    cold, warm = seconds(False, False)
    _, deeper = seconds(True, False)
    return warm, deeper, cold


def run_first_step(name: str, attention: str, candidate: str, device: str, shallower: bool) -> float:
    model = MODELS[name]
    batch = {key: value.to(device) for key, value in model.batch().items()}
    module = model.build(attention, device, shallower)
    start = time.perf_counter()
    stepping(prepared(module, batch, candidate), module, batch)()
    return time.perf_counter() - start


def table(lines: list[Measured]) -> Table:
    """Return a table with one line per candidate, relative to the original."""
    shown = Table(title="whole models, beside the original (median, quartiles)")
    for heading in ("model", "attention", "", "forward", "training step", "saved", "peak", *FIRST_STEPS):
        shown.add_column(heading)
    originals = {(line.model, line.attention): line for line in lines if line.candidate == "original"}
    for line in lines:
        cells = shown_figures(line, originals[line.model, line.attention]).values()
        shown.add_row(line.model, line.attention, line.candidate, *cells)
    return shown


def shown_figures(line: Measured, base: Measured) -> dict[str, str]:
    """Format the figures of a candidate, relative to the original where they can be; "-" for those not measured."""

    def ratio(value: int | None, of_base: int | None) -> str:
        return "-" if value is None or not of_base else f"{value / 1e6:.0f} MB ({value / of_base:.2f})"

    firsts = (line.first, line.first_deeper, line.first_cold)
    return {
        "forward": beside(line.forward, base.forward),
        "training step": beside(line.step, base.step),
        "saved": ratio(line.saved, base.saved),
        "peak": ratio(line.peak, base.peak),
        **{
            name: "-" if seconds is None else f"{seconds:.1f} s"
            for name, seconds in zip(FIRST_STEPS, firsts, strict=True)
        },
    }


def beside(time: Timing | None, base: Timing | None) -> str:
    """Format a time relative to the median of another, with quartiles."""
    if time is None or base is None:
        return "-"
    low, middle, high = (seconds / base.median for seconds in (time.low, time.median, time.high))
    return f"{middle:.2f} × [{low:.2f}, {high:.2f}]".replace("[", "\\[")


class Results:
    """The lines measured so far, printed and written at each figure."""

    def __init__(self, output: Path) -> None:
        self.output, self.console = output, Console(width=150)
        self.lines: dict[tuple[str, str, str], Measured] = {}

    def add(self, name: str, attention: str, figures: Figures) -> None:
        """Add the figures of a model as they come."""
        self.console.print(f"[dim]{name}, {attention} attention: measuring")
        for candidate, found in figures:
            key = (name, attention, candidate)
            before = self.lines.get(key, Measured(*key))
            line = self.lines[key] = replace(before, **found)
            write_json(self.output, [asdict(each) for each in self.lines.values()])
            base = self.lines.get((name, attention, "original"), line)
            self.console.print(f"{name}, {attention}, {candidate}: {_new(shown_figures(line, base), before, base)}")


def _new(figures: Mapping[str, str], before: Measured, base: Measured) -> str:
    """Return the figures that were not shown of the line before."""
    known = shown_figures(before, base)
    return ", ".join(f"{name} {text}" for name, text in figures.items() if text != known[name])


def main() -> None:
    """Measure the models, print each figure as it comes and the table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--attention", nargs="+", choices=("eager", "sdpa"), default=["eager", "sdpa"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps-only", action="store_true", help="leave out the first steps of new processes")
    parser.add_argument("--first-step", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--shallower", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    if options.first_step:
        print(run_first_step(*options.first_step, options.device, options.shallower))
        return
    card = "cpu" if options.device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "_")
    output = options.output or RESULTS / f"end_to_end_{card}.json"
    results = Results(output)
    models = [(name, attention) for name in options.only for attention in options.attention]
    for name, attention in models:
        results.add(name, attention, running_figures(name, attention, options.device, options.rounds))
    for name, attention in () if options.steps_only else models:
        results.add(name, attention, first_step_figures(name, attention, options.device))
    results.console.print(table(list(results.lines.values())))


if __name__ == "__main__":
    main()
