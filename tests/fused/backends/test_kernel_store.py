"""Stored kernels: only whole ones are loaded, and only from files that no other account can have written."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fused.backends import kernel_compiler, kernel_store, kernels
from fused.backends.compiled import bias_activation
from fused.backends.kernel_store import fitting, is_arithmetic
from fused.private_files import is_private

pytestmark = pytest.mark.usefixtures("warm_inductor")
SIZES = (6, 39, 39)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stored kernel in a cache of its own."""
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_by_sizes", {})
    folder = kernel_store.folder(bias_activation, "a test of stored kernels")
    assert folder is not None
    inputs = torch.randn(6, 39), torch.randn(39)
    kernel_compiler.compiled(bias_activation, inputs, {"activation": "gelu_tanh"}, folder)
    (stored,) = folder.glob("*.json")
    libraries = json.loads(stored.read_text())["libraries"].values()
    for path in (stored, *(kernel_store.cache() / path for path, _ in libraries)):
        there = tmp_path / path.relative_to(kernel_store.cache())
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    monkeypatch.setattr(kernel_store, "cache", lambda: tmp_path)
    kernel_store._library.cache_clear()
    yield next(tmp_path.rglob("*.json"))
    shutil.rmtree(folder)
    kernel_store._library.cache_clear()


def library_of(entry: Path) -> Path:
    ((path, _),) = json.loads(entry.read_text())["libraries"].values()
    return kernel_store.cache() / path


def loads(entry: Path) -> bool:
    """Whether the kernel is loaded; it then is right."""
    kernel_store._library.cache_clear()
    kernel = kernel_store.load(entry.parent, SIZES)
    if kernel is not None:
        x, bias = torch.randn(6, 39), torch.randn(39)
        torch.testing.assert_close(kernel((x, bias)), F.gelu(x + bias, approximate="tanh"))
    return kernel is not None


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes cut, zeroed, changed, doubled or replaced somewhere."""
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 16, 4096)))
    return draw.choice(
        (
            data[:start],
            data[:4096],
            data[:start] + bytes(end - start) + data[end:],
            data[:start] + draw.randbytes(end - start) + data[end:],
            data[:start] + data[end:],
            data + data[start:end],
            b"",
            draw.randbytes(64),
        )
    )


def test_damaged_entries_and_libraries_are_not_loaded(entry: Path) -> None:
    assert loads(entry)
    library = library_of(entry)
    whole = {path: path.read_bytes() for path in (entry, library)}
    for number in range(500):
        draw = random.Random(number)
        path = draw.choice((entry, library))
        changed = damaged(whole[path], draw)
        write_anew(path, changed)
        assert loads(entry) == (changed == whole[path])
        assert path == entry or library.exists() == (changed == whole[path])
        write_anew(path, whole[path])
    assert loads(entry)


def write_anew(path: Path, data: bytes) -> None:
    """Write another file: the library of the one that was there may be loaded."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def test_an_entry_of_another_content_is_not_run(entry: Path, tmp_path: Path) -> None:
    values = json.loads(entry.read_text())
    values["source"] = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{values['source']}"
    entry.write_text(json.dumps(values))
    assert not loads(entry) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "guard",
    [
        "__import__('os').system('true')",
        "(lambda: True)()",
        "t.__class__",
        "math.__dict__",
        "torch.load('ran')",
        "torch.sym_max.__globals__",
        "math.floor.__self__",
        "[each for each in t]",
        "open('ran', 'w')",
        "t[0] > 1 if t else 0",
        "(x := 1)",
        "f'{t}'",
        "True); __import__('os",
    ],
)
def test_guards_are_arithmetic(guard: str) -> None:
    assert not is_arithmetic(guard)
    known = "2 <= t[0] and torch.sym_max(t[1] % 3, 0) == 0 and math.floor(t[1] / 2) == 3 and not t[0] == -1"
    assert is_arithmetic(known) and fitting(known)((2, 6))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners")
def test_files_that_others_can_write_are_not_loaded(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = library_of(entry)
    for path in (entry.parent, entry, library):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert not is_private(path) and not loads(entry)
        path.chmod(mode)
        assert loads(entry)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert not is_private(entry) and not loads(entry)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners")
def test_a_cache_of_others_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, home = tmp_path / "theirs", tmp_path / "home"
    theirs.mkdir()
    theirs.chmod(0o777)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    with pytest.warns(UserWarning, match=r"another account owns that folder[\s\S]*TORCHINDUCTOR_CACHE_DIR is"):
        own = kernel_store.cache()
    assert own == home / ".cache" / "fused_kernels" and own.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_store.cache() == own
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
        assert kernel_store.cache() == tmp_path / "new" and is_private(tmp_path / "new")
