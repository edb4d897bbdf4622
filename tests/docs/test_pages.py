"""The notebooks as a browser shows them, on the site and by nbconvert: no column is too narrow, no picture missing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbconvert
import pytest
from PIL import Image

from tests.browser import browser as browser

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "tutorials").glob("[0-9]*.ipynb"))
WIDTHS = (1280, 400)
NARROW, LONG = 60, 20
"""Pixels below which a cell with more characters than these is unreadable."""

_CELLS = """() => [...document.querySelectorAll("td, th, dd, dt")]
    .map((cell) => [cell.getBoundingClientRect().width, cell.innerText.trim()])
    .filter(([width, text]) => width > 0)"""
_PICTURES = """() => [...document.querySelectorAll("img")]
    .filter((img) => !img.complete || !img.naturalWidth).map((img) => img.src.slice(0, 100))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def pages(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(notebook, way of showing it) → the file of its page."""
    folder = tmp_path_factory.mktemp("nbconvert")

    def page(notebook: str, way: str) -> Path:
        if way == "site":
            return site / "tutorials" / f"{notebook}.html"
        text, _ = nbconvert.HTMLExporter().from_filename(str(ROOT / "tutorials" / f"{notebook}.ipynb"))
        path = folder / f"{notebook}.html"
        path.write_text(text, encoding="utf-8")
        return path

    return page


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS)
@pytest.mark.parametrize("way", ["site", "nbconvert"])
def test_cells_are_wide_enough_and_pictures_are_there(
    browser: Any, pages: Callable[[str, str], Path], notebook: str, way: str
) -> None:
    for width in WIDTHS:
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        tab = context.new_page()
        tab.goto(pages(notebook, way).as_uri(), wait_until="load")
        cells = tab.evaluate(_CELLS)
        assert not [(at, text) for at, text in cells if at < NARROW and len(text) > LONG], f"at {width} px"
        assert tab.evaluate(_PICTURES) == []
        context.close()


@pytest.mark.slow
def test_a_narrow_cell_is_found(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "narrow.html"
    path.write_text("<table><td style='width: 9px; overflow-wrap: anywhere'>a text of many letters<td>x</table>")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    assert [text for at, text in tab.evaluate(_CELLS) if at < NARROW and len(text) > LONG]


@pytest.mark.slow
def test_all_pages_of_the_site_show_their_pictures(browser: Any, site: Path) -> None:
    tab = browser.new_page()
    for page in sorted(site.rglob("*.html")):
        tab.goto(page.as_uri(), wait_until="load")
        assert tab.evaluate(_PICTURES) == [], page.name


_TOPS = """() => Object.fromEntries([["name", "h1"], ["gain", "table"], ["chart", "img"], ["install", "#install"],
    ["code", "code.language-python, .language-python, .highlight"]].map(([what, selector]) =>
        [what, document.querySelector(`article ${selector}`).getBoundingClientRect().top]))"""


@pytest.mark.slow
def test_the_front_page_comes_to_the_point(browser: Any, site: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 1800})
    tab = context.new_page()
    tab.goto((site / "index.html").as_uri(), wait_until="load")
    tops = tab.evaluate(_TOPS)
    assert max(tops.values()) < 1800 and tops["name"] < tops["gain"] < tops["install"], tops
    audience = tab.locator("article p").first.inner_text()
    assert "for those who train or tune" in audience
    if folder := os.environ.get("SCHEDULE_SCREENSHOTS"):
        picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(64)
        picture.save(Path(folder) / "front_page_1280.png", optimize=True)
    context.close()
