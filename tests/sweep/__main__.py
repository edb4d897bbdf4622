"""``python -m tests.sweep``: all architectures that have no result yet, then ``docs/coverage.md``."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

from tests.sweep.coverage import write
from tests.sweep.models import architectures
from tests.sweep.run import RESULTS, ROOT, fingerprint, load, sweep


def main() -> int:
    """Run; the exit status is 1 if anything was computed wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="these architectures, comma-separated, even if known")
    parser.add_argument("--changed", action="store_true", help="those whose sources or ours changed since the result")
    parser.add_argument("--again", action="store_true", help="all, known or not")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    options = parser.parse_args()
    every, known = architectures(), load()
    if options.only:
        names = options.only.split(",")
        unknown = sorted(set(names) - set(every))
        if unknown:
            parser.error(f"no such architecture: {', '.join(unknown)}")
    elif options.changed:
        names = [name for name in every if known.get(name, {}).get("of") != fingerprint(name)]
    else:
        names = [name for name in every if options.again or "of" not in known.get(name, {})]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())  # what is known half-way is a fair sample
    sweep(names, options.jobs)
    found = {name: result for name, result in load().items() if name in every}
    print(write(found, ROOT / "docs" / "coverage.md", RESULTS.parent / "coverage.json", len(every)))
    wrong = [name for name in names if any(kind.startswith("WRONG") for kind in found[name]["reasons"])]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
