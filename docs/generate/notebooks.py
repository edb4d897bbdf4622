"""Notebooks as pages: the text, the code, and the outputs that were committed with them; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NO_SHOW = re.compile(r"TqdmWarning|from \.autonotebook")


@dataclass
class Page:
    """A notebook as Markdown, with what Markdown would garble put in afterwards.

    Attributes:
        text: the Markdown, with a ``<div id="output-3"></div>`` for each output of HTML or of pixels.
        outputs: what goes in place of these, by id.
    """

    text: str = ""
    outputs: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(notebook: Path) -> Page:
        """The page of ``notebook``."""
        page = Page()
        cells = nbformat.read(notebook, as_version=4).cells
        page.text = "\n\n".join(part for cell in cells for part in page._cell(cell)) + "\n"
        return page

    def finished(self, html: str) -> str:
        """The rendered page with its outputs."""
        for name, output in self.outputs.items():
            html = html.replace(f'<div id="{name}"></div>', f'<div class="notebook-output" id="{name}">{output}</div>')
        return html

    def _cell(self, cell: Any) -> Iterator[str]:
        if cell.cell_type != "code":
            yield cell.source
            return
        yield _fence(cell.source, "py")
        for output in cell.get("outputs", ()):
            yield from self._output(output)

    def _output(self, output: Any) -> Iterator[str]:
        if output.output_type == "stream":
            shown = [line for line in output.text.splitlines() if not _NO_SHOW.search(line)]
            if any(shown):
                yield _fence("\n".join(shown), "text")
        elif output.output_type == "error":
            yield _fence("\n".join(output.traceback), "text")
        else:
            yield self._shown(output.data)

    def _shown(self, data: Any) -> str:
        if "text/html" in data:
            return self._placed(data["text/html"])
        if "image/svg+xml" in data:
            return self._placed(data["image/svg+xml"])
        if "image/png" in data:
            pixels = "".join(data["image/png"].split())
            about = data.get("text/plain", "").strip("<>")
            return self._placed(f'<img alt="{about}" src="data:image/png;base64,{pixels}">')
        return _fence(data.get("text/plain", ""), "text")

    def _placed(self, html: str) -> str:
        name = f"output-{len(self.outputs)}"
        self.outputs[name] = html
        return f'<div id="{name}"></div>'


def _fence(text: str, language: str) -> str:
    return f"```{language}\n{_ESCAPE.sub('', text).rstrip()}\n```"
