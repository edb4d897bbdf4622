"""Headless Chromium, for tests of what a browser shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_OFF = ("gpu", "quic", "background-networking", "component-update", "sync")
_ARGUMENTS = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in _OFF)]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_HOW = "install one with `apt-get install chromium`; CI sets SCHEDULE_NEEDS_BROWSER=1, with which this is a failure"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all of these tests."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        told = f"no Chromium here: {_HOW}"
        pytest.fail(told) if os.environ.get("SCHEDULE_NEEDS_BROWSER") else pytest.skip(told)
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright; no browser is downloaded")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield started
        started.close()
