"""Fetch the tests of transformers into ``build/peers``, at the installed version.

The source distribution holds ``tests/test_*.py`` only; the tests of each model are in the repository alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "peers"
REPOSITORY = "https://github.com/huggingface/transformers"
_PARTS = ("/tests", "/utils", "/conftest.py", "/pyproject.toml", "/setup.py")
_IMPORTED = ("parameterized", "httpx", "httpcore")  # by the tests, and by nothing that we depend on


@dataclass(frozen=True)
class Sources:
    """Where the tests are.

    Attributes:
        checkout: the folder to run them in.
        packages: what they import that need not be installed here.
        commit: the revision of the repository.
        exact: whether that is the tag of the installed version.
    """

    checkout: Path
    packages: Path
    commit: str
    exact: bool


def version() -> str:
    """The installed version of transformers."""
    return importlib.metadata.version("transformers")


def sources(repository: str = REPOSITORY, ref: str | None = None) -> Sources:
    """Return the tests of the installed version; download them the first time.

    Args:
        repository: a URL or a path that ``git clone`` takes.
        ref: a branch or tag; the installed version's tag if None. For another one, the files of the installed
            version's source distribution are laid over it.
    """
    tag = f"v{version()}"
    checkout = BUILD / f"transformers-{version()}"
    if not (checkout / "tests").is_dir():
        partial = BUILD / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        _clone(repository, ref or tag, partial)
        if ref not in (None, tag):
            _lay_over(partial)
        _link_package(partial)
        partial.rename(checkout)
    packages = BUILD / "packages"
    if not packages.is_dir():
        _pip("install", "--quiet", "--no-deps", "--target", str(packages), *_IMPORTED)
    commit = _git(checkout, "rev-parse", "HEAD")
    return Sources(checkout, packages, commit, not (checkout / "tests" / ".laid_over").exists())


def _clone(repository: str, ref: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--depth=1", "--filter=blob:none", "--sparse", f"--branch={ref}"]
    url = Path(repository).resolve().as_uri() if Path(repository).exists() else repository
    subprocess.run(["git", "clone", *options, url, str(target)], check=True)
    _git(target, "sparse-checkout", "set", "--no-cone", *_PARTS)


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def _lay_over(checkout: Path) -> None:
    """Put the source distribution's own tests and settings over those of another revision."""
    name = f"transformers-{version()}"
    archive = BUILD / f"{name}.tar.gz"
    if not archive.exists():
        wanted = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"transformers=={version()}")
        _pip("download", "--quiet", "--dest", str(BUILD), *wanted)
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            path = member.name.removeprefix(f"{name}/")
            if member.isfile() and (path.startswith("tests/") or path in ("pyproject.toml", "setup.py")):
                member.name = path
                packed.extract(member, checkout, filter="data")
    (checkout / "tests" / ".laid_over").touch()


def _link_package(checkout: Path) -> None:
    """Some tests read the package's sources beside them: those of the installed package."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("transformers is not installed")
    (checkout / "src").mkdir(exist_ok=True)
    (checkout / "src" / "transformers").symlink_to(Path(found.origin).parent)
