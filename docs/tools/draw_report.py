"""Draws ``docs/report.png``: the page that ``schedule.optimize(…).to_html()`` makes of a small GPT-2, in Chromium.

Run it as ``python docs/tools/draw_report.py``; it needs ``chromium`` and the packages of the ``dev`` extra.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from PIL import Image
from playwright.sync_api import sync_playwright

import schedule

PICTURE = Path(__file__).parents[1] / "report.png"
MODULE = 'nav button.name[data-paths*="transformer.h.0.mlp\\""]'


def main() -> None:
    """Optimize, click the MLP of a layer, point at the fused op."""
    config = transformers.GPT2Config(
        n_layer=12, n_embd=384, n_head=6, vocab_size=4096, bos_token_id=0, eos_token_id=0, attn_implementation="eager"
    )
    ids = torch.arange(1024).reshape(4, 256)
    model, batch = transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        report = schedule.optimize(model, batch)
        report.timed()
        report.verify(steps=1)
        report.to_html(page)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 960})
        tab.goto(page.as_uri())
        tab.locator(MODULE).click()
        tab.locator(".sides figure").nth(1).locator(".node[data-change='1']").hover()
        tab.evaluate("scrollTo(0, 0)")
        picture = Image.open(io.BytesIO(tab.screenshot()))
        browser.close()
    picture.convert("RGB").quantize(128).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
