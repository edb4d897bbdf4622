"""The module ``fxschedule``: the public names, and what is said if another package is called ``schedule``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxschedule
import schedule

ROOT = Path(__file__).parents[1]
OTHER = '"""Schedule jobs."""\n\n\ndef every(interval=1):\n    return interval\n'


def test_it_has_the_public_names() -> None:
    assert fxschedule.optimize is schedule.optimize
    assert dir(fxschedule) == sorted(schedule.__all__)
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = fxschedule.optimise


def test_importing_it_does_not_import_torch() -> None:
    code = "import fxschedule, sys; print('torch' in sys.modules); fxschedule.optimize; print('torch' in sys.modules)"
    done = _run("-c", code, path=ROOT)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["fxschedule rules", "python -m fxschedule rules", "python -m schedule rules"])
def test_the_installed_package_runs_from_any_folder(command: str, tmp_path: Path) -> None:
    """Also an editable one, which Python finds by a finder of its own."""
    name, *arguments = command.split()
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [Path(sys.executable).with_name(name), *arguments]
    done = subprocess.run(program, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _run(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, timeout=120)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with this distribution in it, as an installation has it."""
    for name in ("fused", "fxschedule"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "schedule").mkdir()
    for path in (ROOT / "schedule").iterdir():
        if path.name == "__pycache__":
            continue  # of the checkout
        (tmp_path / "schedule" / path.name).symlink_to(path)
    return tmp_path


def test_a_package_installed_over_this_one_is_named(installed: Path) -> None:
    (installed / "fxschedule").unlink()
    (installed / "fxschedule").mkdir()  # a link would lead back to the checkout
    for path in (ROOT / "fxschedule").glob("*.py"):
        (installed / "fxschedule" / path.name).write_bytes(path.read_bytes())
    (installed / "schedule" / "__init__.py").unlink()
    (installed / "schedule" / "__init__.py").write_text(OTHER)
    for arguments in (["-c", "from fxschedule import optimize"], ["-m", "fxschedule", "doctor"]):
        done = _run(*arguments, path=installed)
        assert done.returncode != 0
        assert "was installed over this one" in done.stderr
        assert "pip uninstall schedule" in done.stderr
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_file_of_the_users_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "schedule.py").write_text(OTHER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = [sys.executable, "-m", "fxschedule", "rules"]
    done = subprocess.run(code, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert str(tmp_path / "schedule.py") in done.stderr
    assert "rename that file" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_runs_where_nothing_is_in_the_way() -> None:
    done = _run("-m", "fxschedule", "--version", path=ROOT)
    assert done.returncode == 0, done.stderr
