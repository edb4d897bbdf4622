"""The page as a browser shows it, in headless Chromium: modules are clicked, graphs drawn, nothing fetched, no errors.

Screenshots go where ``SCHEDULE_SCREENSHOTS`` says, else into the test's own folder. Those in the documentation:
``SCHEDULE_SCREENSHOTS=docs/screenshots pytest -m 'slow or not slow' tests/report/pictures/test_browser.py``.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.browser import browser as browser
from tests.needs import IS_OLD
from tests.report.pictures.models import gpt2, hostile, llama, planned_llama, slower_bert, unchanged, verified


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = os.environ.get("SCHEDULE_SCREENSHOTS")
    return Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name → the file of a page; made when first asked for."""
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "gpt2": lambda path: gpt2().to_html(path),
        "llama_2_layers": lambda path: verified(llama(2)).to_html(path),
        "llama_48_layers": lambda path: llama(48).to_html(path),
        "bert_slower": lambda path: slower_bert().to_html(path),
        "unchanged": lambda path: unchanged().to_html(path),
        "llama": lambda path: planned_llama().show_graph(path),
        "hostile": lambda path: hostile().show_graph(path),
        "notebook": lambda path: path.write_text(f"<!doctype html><body>{hostile().show_graph()._repr_html_()}"),
    }

    def page(name: str) -> Path:
        path = folder / f"{name}.html"
        if name in made:
            made.pop(name)(path)
        return path

    return page


class Opened:
    """A page in a tab, with what it said and asked for."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(path.as_uri())

    def click(self, path: str) -> None:
        """Click a module in the tree."""
        wanted = self.tab.locator("nav button.name").all()
        next(each for each in wanted if path in json.loads(each.get_attribute("data-paths"))).click()

    def nodes(self) -> Any:
        """The boxes of the graphs that are shown."""
        return self.tab.locator(".module svg .node")

    def fine(self, path: Path) -> bool:
        """Whether there was no error, and nothing but the file was asked for."""
        return (self.said, self.asked) == ([], [path.as_uri()])

    def overflow(self) -> int:
        """By how much the page is wider than the window."""
        return self.tab.evaluate("document.documentElement.scrollWidth - innerWidth")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(
    "name, module, drawn", [("gpt2", "transformer.h.1.mlp", 21), ("llama", "model.layers.0.mlp", 7)]
)
def test_a_module_is_clicked_and_its_graphs_are_seen(
    browser: Any, pages: Callable[[str], Path], name: str, module: str, drawn: int, width: int
) -> None:
    path = pages(name)
    opened = Opened(browser, path, width)
    opened.click(module)
    assert opened.nodes().count() == drawn and opened.nodes().first.is_visible()
    assert opened.tab.locator(".module h2").inner_text().startswith(module.partition("1.")[0].partition("0.")[0])
    assert opened.tab.evaluate("document.querySelectorAll('*').length") < 2500
    assert opened.overflow() <= 0 and opened.fine(path)
    opened.tab.context.close()


_CHANGED = """() => [...document.querySelectorAll(".sides .view")].map((view) => {
  const node = view.querySelector("[data-change]").getBoundingClientRect(), frame = view.getBoundingClientRect();
  const inside = node.top >= frame.top && node.bottom <= frame.bottom;
  return inside && node.left >= frame.left - 1 && node.right <= frame.right + 1;
})"""
"""Whether the first changed node is seen without scrolling, for each graph."""

_CUT = """() => [...document.querySelectorAll(".figures *, dl *, .rules *, h1, p, .module h2")]
  .filter((each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1).map((each) => each.outerHTML)
  .concat([...document.querySelectorAll("svg .node")].filter((node) => {
    const frame = node.querySelector("rect").getBoundingClientRect();
    return [...node.querySelectorAll("text:not(.number)")].some((text) => {
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
    });
  }).map((node) => node.getAttribute("aria-label")))"""
"""Texts that do not fit where they are."""

_FAINT = """() => {
  const parse = (text) => {
    const found = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color(srgb") ? 255 : 1;
    return [...found.slice(0, 3).map((c) => scale * c), found[3] ?? 1];
  };
  const over = (top, alpha, below) => top.slice(0, 3).map((c, i) => alpha * c + (1 - alpha) * below[i]);
  const ground = (each) => {
    if (!each) return parse(getComputedStyle(document.body).backgroundColor);
    const own = parse(getComputedStyle(each).backgroundColor);
    return own[3] === 1 ? own : over(own, own[3], ground(each.parentElement));
  };
  const light = (color) => color.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const faint = [];
  for (const each of document.querySelectorAll(".schedule-report *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || each.closest("svg, template, script, style, noscript") || !each.getClientRects().length) continue;
    let alpha = 1;
    for (let at = each; at; at = at.parentElement) alpha *= Number(getComputedStyle(at).opacity);
    const below = ground(each), color = parse(getComputedStyle(each).color);
    const [a, b] = [light(over(color, alpha * color[3], below)), light(below)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) faint.push(`${each.outerHTML.slice(0, 90)} ${contrast.toFixed(2)}`);
  }
  return faint;
}"""
"""Texts with a contrast below 4.5, which WCAG asks for at level AA."""

_TONES = """() => [...document.querySelectorAll(".figures li")].map(
  (each) => [each.className, getComputedStyle(each).borderLeftColor])"""
_COLORS = {"good": "rgb(26, 127, 55)", "bad": "rgb(207, 34, 46)"}
_FIGURES = {
    "gpt2": ["good", "good", "neutral", "neutral"],
    "llama_2_layers": ["good", "good", "neutral", "good"],
    "llama_48_layers": ["good", "good", "neutral", "neutral"],
    "bert_slower": ["good", "good", "bad", "neutral"],
    "unchanged": ["neutral", "neutral", "neutral", "neutral"],
}


_slow = pytest.mark.slow


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "width, scheme",
    [(1280, "light"), (400, "dark"), pytest.param(1280, "dark", marks=_slow), pytest.param(400, "light", marks=_slow)],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_slow) if name == "llama_48_layers" else name for name in _FIGURES]
)
def test_the_first_screen_tells_the_result(
    browser: Any, pages: Callable[[str], Path], folder: Path, name: str, width: int, scheme: str
) -> None:
    path = pages(name)
    opened = Opened(browser, path, width, scheme)
    tab = opened.tab
    assert opened.overflow() <= 0 and opened.fine(path)
    assert tab.locator(".figures").bounding_box()["y"] < 300, "on the first screen"
    tones = tab.evaluate(_TONES)
    assert [tone for tone, _ in tones] == _FIGURES[name]
    assert all(color == _COLORS[tone] for tone, color in tones if tone in _COLORS)
    assert tab.evaluate(_CUT) == [] and tab.evaluate(_FAINT) == []
    if name != "unchanged":
        assert tab.evaluate(_CHANGED) == [True, True]
    picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(64)
    picture.save(folder / f"{name}_{width}_{scheme}.png", optimize=True)
    tab.context.close()


def test_all_nodes_are_shown_on_request_and_folded_again(browser: Any, pages: Callable[[str], Path]) -> None:
    opened = Opened(browser, pages("gpt2"), 1280)
    opened.click("transformer.h.0.attn")
    button = opened.tab.locator("[data-whole]").first
    folded = opened.nodes().count()
    button.click()
    whole = opened.nodes().count()
    assert whole > folded and button.get_attribute("aria-pressed") == "true"
    button.click()
    assert opened.nodes().count() == folded and button.get_attribute("aria-pressed") == "false"
    assert opened.said == []


def test_graphs_are_side_by_side_where_there_is_room(browser: Any, pages: Callable[[str], Path]) -> None:
    enough = 2560 if IS_OLD else 1280  # the graph of transformers 5.0, which masks attention itself, is wider
    for width, beside in ((enough, True), (400, False)):
        opened = Opened(browser, pages("gpt2"), width)
        before, after = (opened.tab.locator(".sides figure").nth(i).bounding_box() for i in (0, 1))
        assert (before["y"] == after["y"]) is beside
        opened.tab.context.close()


def test_the_keyboard_is_enough(browser: Any, pages: Callable[[str], Path]) -> None:
    opened = Opened(browser, pages("gpt2"), 1280)
    tab = opened.tab
    tab.locator("nav button.name").first.focus()
    tab.keyboard.press("Enter")
    assert tab.locator(".module h2").inner_text() == "the whole model"
    tab.locator("nav button.toggle").first.focus()
    tab.keyboard.press("Enter")
    assert not tab.locator("nav ul ul").first.is_visible()
    tab.keyboard.press("Enter")
    assert tab.locator("nav ul ul").first.is_visible()
    tab.locator(".module svg").first.focus()
    for _ in range(3):
        tab.keyboard.press("ArrowDown")
    assert "transformer" in tab.locator(".about").inner_text(), "the third node calls the transformer"
    tab.locator(".about button").focus()
    tab.keyboard.press("Enter")
    assert tab.locator(".module h2").inner_text() == "transformer"
    assert opened.said == []


def test_pointing_at_a_node_tells_of_it_and_shows_its_change_on_both_sides(
    browser: Any, pages: Callable[[str], Path]
) -> None:
    opened = Opened(browser, pages("gpt2"), 1280)
    opened.click("transformer.h.0.mlp")
    opened.tab.locator(".sides figure").nth(1).locator(".node[data-change='1']").hover()
    told = opened.tab.locator(".about").inner_text()
    assert "32.77 KB" in told and "activations.py" in told
    assert [opened.tab.locator(".sides figure").nth(i).locator(".node.near").count() for i in (0, 1)] == [9, 1]
    wide = opened.tab.locator(".sides svg").first.bounding_box()["width"]
    opened.tab.locator("[data-zoom='1.25']").first.click()
    assert opened.tab.locator(".sides svg").first.bounding_box()["width"] == pytest.approx(1.25 * wide, rel=0.01)
    assert opened.said == []


def test_dark_is_dark(browser: Any, pages: Callable[[str], Path]) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, pages("llama"), 1280, scheme)
        for what, color in (("body", "backgroundColor"), (".graph text", "fill")):
            found = opened.tab.evaluate(f"getComputedStyle(document.querySelector('{what}')).{color}")
            brightness[scheme, what] = sum(map(int, found.removeprefix("rgb(").rstrip(")").split(",")))
        opened.tab.context.close()
    assert brightness["light", "body"] > 700 > 100 > brightness["dark", "body"]
    assert brightness["light", ".graph text"] < 200 < 600 < brightness["dark", ".graph text"]


@pytest.mark.unwritable("what is looked for is defined inside the test")
@pytest.mark.parametrize("name", ["hostile", "notebook"])
def test_names_that_are_markup_do_nothing(browser: Any, pages: Callable[[str], Path], name: str) -> None:
    path = pages(name)
    opened = Opened(browser, path, 1280)
    frame = opened.tab.frames[-1]
    frame.wait_for_selector(".module svg .node")
    assert frame.locator(".explorer img, .explorer b b, .module script").count() == 0
    for button in frame.locator("nav button.name").all():
        button.click()
        assert frame.locator(".module svg .node").count() > 0
    assert opened.said == [] and {url for url in opened.asked if not url.startswith("about:")} == {path.as_uri()}
