"""What mkdocs calls while it builds the site: generated parts, pages from elsewhere in the repository, notebooks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.generate import filled  # noqa: E402 - it is found from the root
from docs.generate.notebooks import Page  # noqa: E402

FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
FROM_ROOT |= {"contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
"""Pages of the site that are files of the repository's root."""

TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.ipynb"))

_notebooks: dict[str, Page] = {}


def on_config(config: Any) -> Any:
    """The tutorials, in the navigation."""
    for entry in config.nav:
        if "Tutorials" in entry:
            entry["Tutorials"] = [f"tutorials/{notebook.stem}.md" for notebook in TUTORIALS]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages that are not in docs/."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=from_root((ROOT / source).read_text(encoding="utf-8"))))
    for notebook in TUTORIALS:
        page = f"tutorials/{notebook.stem}.md"
        _notebooks[page] = Page.of(notebook)
        files.append(File.generated(config, page, content=from_tutorials(_notebooks[page].text)))
    return files


def from_root(text: str) -> str:
    """A file of the root as a page: links to docs/ are links to pages, links to code are its path."""
    pages = {source: page for page, source in FROM_ROOT.items()}
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", text)
    text = re.sub(r"\]\(([A-Z]+\.md)\)", lambda link: f"]({pages[link[1]]})", text)
    text = re.sub(r"\]\(tutorials/([\w]+)\.ipynb\)", r"](tutorials/\1.md)", text)
    return re.sub(r"\[([^\]]+)\]\((?:LICENSE|benchmarks|tests|schedule|fused)\b[^)]*\)", r"\1", text)


def from_tutorials(text: str) -> str:
    """A notebook's text as a page: links to notebooks, to docs/ and to the root's files are links to pages."""
    there = "|".join(notebook.stem for notebook in TUTORIALS)
    text = re.sub(rf"\]\(({there})\.ipynb\)", r"](\1.md)", text)
    text = re.sub(r"\[([^\]]+)\]\([\w./]+\.py\)", r"\1", text)  # no page of the site
    text = re.sub(r"\]\(\.\./docs/([^)]+)\)", r"](../\1)", text)
    pages = {source: page for page, source in FROM_ROOT.items()}
    return re.sub(r"\]\(\.\./([A-Z]+\.md)\)", lambda link: f"](../{pages[link[1]]})", text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The parts that are written from the code, and links to notebooks as links to their pages."""
    return filled(re.sub(r"\]\(\.\./tutorials/(\w+)\.ipynb\)", r"](tutorials/\1.md)", markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The outputs of notebooks."""
    notebook = _notebooks.get(page.file.src_uri)
    return html if notebook is None else notebook.finished(html)
