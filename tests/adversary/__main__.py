"""``python -m tests.adversary --cases 2000 --seed 1``: draw modules, and print how they went."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FUSED_ONEDNN"] = "0"

import argparse
import contextlib
import io
import logging
import sys
import time
from collections import Counter, defaultdict

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.adversary.cases import FALLBACK, WRONG, Verdict
from tests.adversary.drawn import Spec, case_of, shrunk, specs
from tests.adversary.harness import judge


def main() -> int:
    """Run the cases; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=40, help="how many wrong cases to shrink")
    parser.add_argument("--rules", default="default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    start, kinds, quiet = time.time(), Counter[str](), Counter[str]()
    wrong: list[Spec] = []

    @seed(options.seed)
    @settings(
        max_examples=options.cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def each(spec: Spec) -> None:
        verdict = _judged(spec, options.rules)
        kinds[verdict.kind] += 1
        if spec.only_unread:
            quiet[verdict.kind] += 1
        if verdict.kind == WRONG:
            wrong.append(spec)
        if sum(kinds.values()) % 100 == 0:
            print(f"{sum(kinds.values())} cases, {time.time() - start:.0f} s: {dict(kinds)}", file=sys.stderr)

    each()
    told = _told(wrong[: options.shrink])
    print(told)
    print(f"{sum(kinds.values())} cases in {time.time() - start:.0f} s, seed {options.seed}: {dict(kinds)}")
    share = quiet[FALLBACK] / max(1, sum(quiet.values()))
    print(f"only unread state changed in {sum(quiet.values())} of them: {dict(quiet)}, {share:.1%} of them fell back")
    return 1 if wrong else 0


def _judged(spec: Spec, rules: str) -> Verdict:
    with contextlib.redirect_stderr(io.StringIO()):
        return judge(case_of(spec, rules))


def _told(wrong: list[Spec]) -> str:
    groups: dict[str, list[tuple[Spec, Verdict]]] = defaultdict(list)
    for spec in wrong:
        with contextlib.redirect_stderr(io.StringIO()):
            least, verdict = shrunk(spec)
        groups[least.kinds + " (only unread state changed)" * spec.only_unread].append((least, verdict))
    lines = []
    for kinds, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        least, verdict = min(found, key=lambda each: len(each[0].story))
        lines += [f"=== {kinds}: {len(found)} wrong; the smallest:", least.story, str(verdict), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
