"""Make an environment, run the quick tests in it, and save the result: ``python -m tests.versions newest``.

The page docs/versions.md shows the saved results. Nothing in constraints.txt counts here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from pathlib import Path

from tests.versions.rows import ROWS, Found

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "transformers", "triton", "networkx", "rich", "jinja2", "typer", "numpy", "peft", "accelerate")


def main() -> int:
    """Run one row; the exit status is that of the tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--environment", type=Path, help="one that is there already, used as it is")
    parser.add_argument("--jobs", default="2", help="tests at a time")
    parser.add_argument("tests", nargs="*", default=["tests"], help="tests to run in place of all; nothing is saved")
    given = parser.parse_args()
    folder = given.environment or made(given.row, given.python)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    report = folder / "tests.xml"
    started = time.monotonic()
    command = [str(folder / "bin" / "python"), "-m", "pytest", "-m", "not slow", "-n", given.jobs]
    command += ["--dist", "worksteal", f"--junit-xml={report}", *given.tests]
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if given.tests == ["tests"] and report.exists():
        found = result(given.row, folder, report, (time.monotonic() - started) / 60)
        print(f"{found.save().relative_to(ROOT)}: {found.passed} passed, {found.failed} failed, {len(found.off)} off")
    return status


def made(row: str, python: str) -> Path:
    """Make the environment of a row."""
    numbers = "import sys; print(*sys.version_info[:2], sep='.')"
    name = subprocess.run([python, "-c", numbers], capture_output=True, text=True, check=True).stdout.strip()
    folder = ROOT / "build" / "versions" / f"{row}_python{name}"
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *ROWS[row].torch], check=True)
    subprocess.run([*pip, "-e", ".[hf,dev,docs]", *ROWS[row].others], cwd=ROOT, check=True)
    if ROWS[row].last:
        subprocess.run([*pip, "--no-deps", *ROWS[row].last], check=True)
    return folder


def result(row: str, folder: Path, report: Path, minutes: float) -> Found:
    """Read what pytest and the doctor say."""
    passed, skipped, failures = 0, Counter[str](), list[str]()
    for case in ET.parse(report).iter("testcase"):
        outcome = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            passed += 1
        elif outcome.tag == "skipped":
            skipped[outcome.get("message", "")] += 1
        else:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    versions = f"""
import importlib.metadata as m, json, platform
print(json.dumps({{"Python": platform.python_version(), **{{n: m.version(n) for n in {SHOWN!r}}}}}))
"""
    doctor = ["-m", "fxschedule", "doctor", "--json"]
    said, told = (
        subprocess.run([folder / "bin" / "python", *command], capture_output=True, text=True, cwd=folder, check=False)
        for command in (["-c", versions], doctor)
    )
    return Found(
        row=row,
        date=date.today().isoformat(),
        versions=json.loads(said.stdout),
        passed=passed,
        failed=len(failures),
        skipped=dict(skipped),
        failures=sorted(failures),
        off=json.loads(told.stdout)["off"],
        minutes=round(minutes, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
