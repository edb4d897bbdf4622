"""Build the wheel, install it in an empty environment without constraints, and use it from another folder.

``python -m tests.versions.wheel`` makes the environment, or takes the one given by ``--environment``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Return 0 if all that a new user does first works."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions.wheel", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--environment", type=Path, help="one that is there already")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = built(Path(folder))
        environment = given.environment or Path(folder) / "environment"
        if given.environment is None:
            run([given.python, "-m", "venv", environment], folder)
        python = environment / "bin" / "python"
        options = ["--force-reinstall", "--no-deps"] if given.environment else []
        run([python, "-m", "pip", "install", "--quiet", *options, f"{wheel}[hf]"], folder)
        run([python, "-c", "import fxschedule; print(fxschedule.optimize)"], folder)
        run([python, "-c", first_block()], folder)
        run([environment / "bin" / "fxschedule", "doctor"], folder)
    print("the wheel works")
    return 0


def built(folder: Path) -> Path:
    """Build the wheel, and check that it holds all files of the packages."""
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], folder)
    (wheel,) = folder.glob("fxschedule-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "fused", "fxschedule", "schedule"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    missing = [name for name in tracked.stdout.splitlines() if name not in inside]
    if missing:
        raise SystemExit(f"not in the wheel: {', '.join(missing)}")
    return wheel


def first_block() -> str:
    """Return the first block of Python in the README."""
    return (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0]


def run(command: list[str | Path], folder: str | Path) -> None:
    """Run a command from ``folder``, and stop if it fails."""
    print("$", *(str(part).strip().partition("\n")[0] for part in command), flush=True)
    subprocess.run([str(part) for part in command], cwd=folder, check=True)


if __name__ == "__main__":
    sys.exit(main())
