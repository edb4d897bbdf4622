"""Availability of the backends on this machine: a C++ compiler, Triton."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings

CPP_COMPILERS = ("g++", "clang++", "c++", "cl")

_broken: dict[tuple[str, str], str] = {}
_warned: set[str] = set()


def why_unavailable(backend: str, device: str) -> str | None:
    """Return the reason for `backend` not running on device type `device`, with the fix, or None if it runs."""
    if backend == "reference":
        return None
    if (backend, device) in _broken:
        return _broken[backend, device]
    if backend == "triton":
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"Triton kernels run on cuda tensors, not {device} (TRITON_INTERPRET=1 tests them)"
        return _no_triton()
    if device == "cpu":
        return _no_cpp_compiler(os.environ.get("CXX"))
    if device == "cuda":
        return _no_triton()
    return f"the ops are not compiled for {device}"


def mark_broken(backend: str, device: str, reason: str) -> None:
    """Record a failure of `backend` on `device`, to avoid trying it at every call."""
    _broken[backend, device] = reason


def is_broken(backend: str, device: str) -> bool:
    """Check whether `backend` has failed on `device`, as already reported by a warning."""
    return (backend, device) in _broken


def warn_once(message: str) -> None:
    """Issue a warning, once per process for each message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def forget() -> None:
    """Clear the cached availability and the warnings, for use after installing a compiler in a running session."""
    _broken.clear()
    _warned.clear()
    _no_cpp_compiler.cache_clear()
    _no_triton.cache_clear()


@functools.cache
def _no_cpp_compiler(chosen: str | None) -> str | None:
    candidates = (chosen,) if chosen else CPP_COMPILERS
    if any(shutil.which(name) for name in candidates):
        return None
    if chosen:
        return f"no C++ compiler at CXX={chosen}: correct CXX or unset it"
    return "no C++ compiler found: install g++ or clang++, or name one in the environment variable CXX"


@functools.cache
def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return None
