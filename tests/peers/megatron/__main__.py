"""``python -m tests.peers.megatron FOLDER``: Megatron-LM's own layer tests, with its MLP and with `fused.MLP`.

FOLDER is a checkout of https://github.com/NVIDIA/Megatron-LM. The tests run in one process on the CPU, with stand-ins
for CUDA and for the layers of Transformer Engine (`on_cpu`). Those that need more (several processes, CUDA graphs, FP8,
Transformer Engine itself) fail or are skipped with either MLP, and say nothing. Prints for each file how many tests
there are, how many pass with Megatron's MLP, how many of those make one, how many pass that make a `fused.MLP`, and
which are lost; then what `checkpoints` finds. ``build/peers/megatron.json`` has why the others do not pass. The exit
status is 1 if a test is lost or fails, or if no test makes an MLP.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.peers.runs import Comparison, Run, compare, run
from tests.peers.sources import BUILD, Sources

UNIT_TESTS = Path("tests") / "unit_tests"
# Those with a test that makes an MLP, and that can be imported without Transformer Engine.
FILES = (
    "transformer/test_mlp.py",
    "transformer/test_transformer_layer.py",
    "transformer/test_transformer_block.py",
    "transformer/test_transformer_block_custom_pgs.py",
    "transformer/test_mhc_block_manager.py",
    "transformer/moe/test_shared_experts.py",
    "transformer/moe/test_moe_layer.py",
    "transformer/moe/test_sequential_mlp.py",
    "models/test_heterogeneous_gpt_model.py",
    "models/test_multimodal_projector.py",
    "models/test_radio_model.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if anything was lost, or no test made an MLP."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers.megatron", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--only", metavar="FILES", help="these files under tests/unit_tests, comma-separated")
    parser.add_argument("-k", dest="keyword", default="", help="tests whose name matches, as pytest's -k")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds that one process may take")
    options = parser.parse_args(arguments)
    plugins = Path(__file__).parent
    sources = Sources(options.folder.resolve(), plugins, _commit(options.folder), True)
    each = partial(run, sources, keyword=options.keyword, limit=options.limit)
    theirs, ours = ["-p", "on_cpu", "-p", "mlp"], ["-p", "on_cpu", "-p", "mlp", "--fused-mlp"]
    files = [str(UNIT_TESTS / name) for name in (options.only.split(",") if options.only else FILES)]
    one = compare("megatron", files, partial(each, options=theirs), partial(each, options=ours))
    print(f"{'':70} {'tests':>6} {'pass':>6} {'of an MLP':>10} {'fused':>6}  lost")
    for name in (*files, ""):
        print(_row(name, one))
    checks = each([str(plugins / "checkpoints.py")], options=["-p", "on_cpu", f"--confcutdir={plugins}"])
    print(f"checkpoints: {checks.passed} of {len(checks.outcomes)} as with Megatron's MLP")
    found = {"commit": sources.commit, **one.as_json(), "not passed": _reasons(one.untouched)}
    (BUILD / "megatron.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(one.lost) or not _of_an_mlp(one.scheduled) or checks.passed < len(checks.outcomes))


def _commit(folder: Path) -> str:
    asked = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() or "unknown, no git repository"


def _of_an_mlp(one: Run) -> list[str]:
    """Tests that pass, and make an MLP."""
    passed = [name for name, outcome in one.outcomes.items() if outcome == "passed"]
    return [name for name in passed if one.properties[name]["mlps"]]


def _row(file: str, one: Comparison) -> str:
    outcomes = [outcome for name, outcome in one.untouched.outcomes.items() if name.startswith(file)]
    made, fused = (sum(name.startswith(file) for name in _of_an_mlp(way)) for way in (one.untouched, one.scheduled))
    lost = [name.rpartition("::")[2] for name in one.lost if name.startswith(file)]
    lost += [f"({name.rpartition('::')[2]}, once)" for name in one.unsteady if name.startswith(file)]
    numbers = f"{len(outcomes):6} {outcomes.count('passed'):6} {made:10} {fused:6}"
    return f"{file or 'all':70} {numbers}  {', '.join(lost) or '–'}"


def _reasons(untouched: Run) -> dict[str, int]:
    """Why tests do not pass with Megatron's own MLP, and how many."""
    failed = (each[0]["message"].partition("\n")[0] for each in untouched.failures.values())
    died = ("died" for outcome in untouched.outcomes.values() if outcome == "died")
    return dict(Counter([*untouched.skipped.values(), *failed, *died]).most_common())


if __name__ == "__main__":
    raise SystemExit(main())
