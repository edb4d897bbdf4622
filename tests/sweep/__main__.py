"""``python -m tests.sweep``: all architectures that have no result yet, then ``docs/coverage.md``.

With ``--beyond`` it is models of other libraries, and ``docs/beyond.md``; with ``--plans`` the tensor-parallel plans of
architectures that are called with tokens alone, and ``docs/plans.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

from tests.sweep import coverage
from tests.sweep.beyond import names as names_beyond
from tests.sweep.models import architectures
from tests.sweep.one import check
from tests.sweep.plans import check_plan, is_text
from tests.sweep.run import BEYOND, PLANS, RESULTS, ROOT, fingerprint, load, sweep

COUNTS = ROOT / "tests" / "sweep" / "results"


def main() -> int:
    """Run; the exit status is 1 if anything was computed wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="these architectures, comma-separated, even if known")
    parser.add_argument("--changed", action="store_true", help="those whose sources or ours changed since the result")
    parser.add_argument("--again", action="store_true", help="all, known or not")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--plans", action="store_true", help="find tensor-parallel plans and simulate them")
    parser.add_argument("--beyond", action="store_true", help="models of other libraries that are installed")
    options = parser.parse_args()
    folder = PLANS if options.plans else BEYOND if options.beyond else RESULTS
    every, known, rewritten = names_beyond() if options.beyond else architectures(), load(folder), load(RESULTS)
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
    found = {name: result for name, result in load(folder).items() if name in every}
    wrong = [name for name in names if any(kind.startswith("WRONG") for kind in found[name]["reasons"])]
    if options.plans:
        found = {name: plan for name, plan in found.items() if plan.get("text")}
    page, total = (coverage.PLANS, len(found)) if options.plans else (coverage.COVERAGE, len(every))
    page = coverage.BEYOND if options.beyond else page
    older = sum(result.get("of") != fingerprint(name) for name, result in found.items())
    print(page.write(found, total, older, ROOT / "docs" / f"{folder.name}.md", COUNTS / f"{folder.name}.json"))
    if wrong:
        print(f"WRONG: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
