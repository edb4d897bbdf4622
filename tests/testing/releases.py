"""Graphs of twenty architectures in two releases of transformers.

    PYTHONPATH=/path/to/one python -m tests.testing.releases build/graphs --update
    python -m tests.testing.releases build/graphs

The first call, with the packages of one release first on the path, writes the graph of one module of each class as a
golden file. The second, with another release, compares: for each graph that differs it prints both, side by side, and
at the end how many do.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import transformers
from torch import nn

import schedule.testing as testing
from schedule.util.errors import ScheduleError
from tests.zoo import ARCHITECTURES, batch, build


def paths(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the first module of each class that has a forward of its own and modules below it: class and path."""
    seen: set[type] = set()
    for path, module in model.named_modules():
        containing = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not list(module.children())
        if type(module) not in seen and not containing:
            seen.add(type(module))
            yield type(module).__name__, path


def compare(name: str, folder: Path, update: bool) -> Iterator[str]:
    """Compare or write the graphs of one architecture, and yield the result for each class."""
    model = build(name)
    for kind, path in paths(model):
        try:
            graph = testing.graph_of(model, batch(name), path)
            testing.assert_graph_matches(graph, folder / name / f"{kind}.txt", update=update)
        except ScheduleError as error:
            print(f"{name} {path or 'the model'} ({kind}): not traced: {error.why}")
            yield "not traced"
        except AssertionError as error:
            print(f"\n{name} {path or 'the model'} ({kind}): {error}")
            yield "different"
        else:
            yield "written" if update else "equal"


def main() -> int:
    """Compare or write, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name in ARCHITECTURES:
        counts.update(compare(name, options.folder, options.update))
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"\ntransformers {transformers.__version__}, {len(ARCHITECTURES)} architectures: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
