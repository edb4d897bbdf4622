"""What holds for every test: offline, seeded, one thread, and nothing in the process is left patched."""

from __future__ import annotations

import os

# Before torch and transformers are imported: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# An error of our own code fails the test that meets it, wherever it would be contained.
os.environ["FXSCHEDULE_INTERNAL_ERRORS"] = "raise"
# Which library multiplies faster differs between machines, and what is tested is not to; tests of it set it to 1.
os.environ["FUSED_ONEDNN"] = "0"
# What is printed is as wide as if there were no terminal; pytest-xdist tells its workers the width of its own.
os.environ.pop("COLUMNS", None)

import builtins
import itertools
import math
import operator
import random
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)

# The same examples at every run, so that a change is judged by itself; the long tests draw new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Triton reads this when it is imported: without CUDA its kernels run on CPU tensors, as Python.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Every schedule that a test makes is taken around; imported once the above is set.
pytest_plugins = ["tests.recipes.watching", "pytester"]

# Where a tracer is tempted to patch. A patch left behind changes every other model in the process.
_PATCHABLE: tuple[Any, ...] = (builtins, math, operator, torch, torch.Tensor, functional, nn.Module)

# torch.compile itself wraps these, for good, when it is first used; the latter two of nn.Module.
_BY_TORCH = {"manual_seed", "__init__", "__setstate__"}


_OF_A_QUICK_RUN = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one case in five of each test: a tier for daily work")
    parser.addoption("--card", default="cuda", help="device of the tests marked cuda; cpu to try what runs without one")


@pytest.hookimpl(tryfirst=True)  # before the slow ones are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each family, mark what is left for the sweep; tests marked `cuda` are collected everywhere, and skipped."""
    fewer = _OF_A_QUICK_RUN if config.getoption("--quick") else 1
    often = [item for item in items if item.get_closest_marker("slow") is None]
    for _, family in itertools.groupby(often, lambda item: item.nodeid.partition("[")[0]):
        cases = sorted(family, key=lambda item: zlib.crc32(item.name.encode()))
        one_in = cases[0].get_closest_marker("one_in")
        for item in cases[math.ceil(len(cases) / ((one_in.args[0] if one_in else 1) * fewer)) :]:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--card") == "cuda" and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def card(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; the CPU with ``--card cpu``, which tries the tests without a card."""
    return torch.device(request.config.getoption("--card"))


@pytest.fixture
def real_card(card: torch.device) -> torch.device:
    """A card, for what the CPU does not have: graphs, streams, its allocator."""
    if card.type != "cuda":
        pytest.skip("needs a CUDA device")
    return card


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _globals() -> list[dict[str, Any]]:
    """What each namespace holds that can be called; lazily imported submodules may come and go."""
    return [{name: value for name, value in vars(owner).items() if callable(value)} for owner in _PATCHABLE]


def _modes() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _no_global_patches() -> Iterator[None]:
    """Fail a test that leaves a torch, operator, math or builtin function replaced, or a mode switched."""
    before, modes = _globals(), _modes()
    yield
    for owner, old, new in zip(_PATCHABLE, before, _globals(), strict=True):
        changed = [n for n, value in old.items() if new.get(n) is not value and n not in _BY_TORCH]
        assert not changed, f"left patched in {owner.__name__}: {', '.join(changed)}"
    assert _modes() == modes, "left switched"
