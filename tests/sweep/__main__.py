"""``python -m tests.sweep``: all architectures that have no result yet, then ``docs/coverage.md``.

With ``--plans`` it is the tensor-parallel plans of those that are called with tokens alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

from tests.sweep.coverage import write
from tests.sweep.models import architectures
from tests.sweep.one import check
from tests.sweep.plans import check_plan, is_text
from tests.sweep.run import PLANS, RESULTS, ROOT, fingerprint, load, sweep


def main() -> int:
    """Run; the exit status is 1 if anything was computed wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="these architectures, comma-separated, even if known")
    parser.add_argument("--changed", action="store_true", help="those whose sources or ours changed since the result")
    parser.add_argument("--again", action="store_true", help="all, known or not")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--plans", action="store_true", help="find tensor-parallel plans and simulate them")
    options = parser.parse_args()
    folder = PLANS if options.plans else RESULTS
    every, known, rewritten = architectures(), load(folder), load(RESULTS)
    if options.only:
        names = options.only.split(",")
        unknown = sorted(set(names) - set(every))
        if unknown:
            parser.error(f"no such architecture: {', '.join(unknown)}")
    elif options.changed:
        names = [name for name in every if known.get(name, {}).get("of") != fingerprint(name)]
    else:
        names = [name for name in every if options.again or "of" not in known.get(name, {})]
    if options.plans:  # what is known to be called with images or sounds needs no plan
        names = [n for n in names if is_text(rewritten.get(n, {}).get("inputs") or {"input_ids": []})]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())  # what is known half-way is a fair sample
    sweep(names, options.jobs, check_plan if options.plans else check, folder)
    found, plans = ({n: r for n, r in load(each).items() if n in every} for each in (RESULTS, PLANS))
    print(write(found, ROOT / "docs" / "coverage.md", RESULTS.parent / "coverage.json", len(every), plans))
    done = plans if options.plans else found
    wrong = [name for name in names if any(kind.startswith("WRONG") for kind in done[name]["reasons"])]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
