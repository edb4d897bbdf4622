"""``python -m tests.peers.transformers``: transformers' own tests of its models, untouched and scheduled.

Every model that a test calls is scheduled at its first call. Prints what each architecture passes either way and what
is lost, and writes ``build/peers/transformers.json``. The exit status is 1 if a test that passes untouched does not
pass scheduled, or if nothing was rewritten.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial

import torch

from tests.peers.runs import Comparison, compare, run
from tests.peers.sources import BUILD, REPOSITORY, sources, version

NAMES = ("gpt2", "llama", "bert", "t5", "vit", "whisper", "qwen3", "gemma3")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if anything was lost, or nothing scheduled."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers.transformers", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="these architectures, comma-separated")
    parser.add_argument("--rules", default="default", help="what models are scheduled with: default, all, …")
    parser.add_argument("-k", dest="keyword", default="", help="tests whose name matches, as pytest's -k")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds that one process may take")
    parser.add_argument("--repository", default=REPOSITORY, help="where to clone the tests from")
    parser.add_argument("--ref", help="branch or tag to clone, if not the installed version's tag")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else NAMES
    tests = sources(options.repository, options.ref)
    path = BUILD / "transformers.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    compared = []
    print(f"{'':10} {'untouched':>10} {'scheduled':>10} {'subtests':>9} {'rewritten':>10} {'refused':>8}  lost")
    for name in names:
        files = [f"tests/models/{name}/test_modeling_{name}.py"]
        how = {"keyword": options.keyword, "limit": options.limit}
        one = compare(name, files, partial(run, tests, **how), partial(run, tests, rules=options.rules, **how))
        compared.append(one)
        print(_row(one), flush=True)
        about = {"transformers": version(), "torch": torch.__version__, "commit": tests.commit, "exact": tests.exact}
        found[f"{name} {options.rules}"] = {**about, "keyword": options.keyword, **one.as_json()}
        path.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(each.lost or each.vacuous for each in compared))


def _row(one: Comparison) -> str:
    counts = one.scheduled.counts
    cells = f"{one.untouched.passed:10} {one.scheduled.passed:10} {one.scheduled.subtests:9}"
    left = [each.rpartition("::")[2] for each in one.lost]
    unsteady = [f"({each.rpartition('::')[2]}, once)" for each in one.unsteady]
    said = ", ".join(left + unsteady) or ("nothing was rewritten" if one.vacuous else "–")
    return f"{one.name:10} {cells} {counts['rewritten']:10} {counts['refused']:8}  {said}"


if __name__ == "__main__":
    raise SystemExit(main())
