"""Docstrings as Markdown, and what the tests of pages take for code."""

from __future__ import annotations

import pytest

from docs.generate.docstrings import markdown, signature
from docs.generate.sources import listing
from tests.code_blocks import blocks, commands

DOCSTRING = """Cut a tensor as :func:`torch.chunk` does.

::

    before:  y = x
    after:   a, b = x.chunk(2)

Used so::

    halves = cut(x)

=====  =========
mode   meaning
=====  =========
even   ``n / 2``
=====  =========

Args:
    x: ``[rows, columns]``, of any
        dtype.
    *rest, more: nothing.

Raises:
    ValueError: it cannot be cut.
"""


def test_a_docstring_becomes_markdown() -> None:
    text = markdown(DOCSTRING)
    assert "`torch.chunk`" in text and ":func:" not in text and "``[" not in text
    assert "| mode | meaning |\n|---|---|\n| even | `n / 2` |" in text
    assert "**Args:**\n\n- `x`: `[rows, columns]`, of any\n    dtype.\n- `*rest`, `more`: nothing." in text
    assert "Used so:" in text and "::" not in text


def test_what_draws_a_graph_is_shown_and_the_rest_is_code() -> None:
    assert [(block.language, block.text) for block in blocks(markdown(DOCSTRING))] == [
        ("text", "before:  y = x\nafter:   a, b = x.chunk(2)"),
        ("python", "halves = cut(x)"),
    ]


def test_a_signature_leaves_out_what_the_caller_does_not_give() -> None:
    def fuse(sch: object, compiler: str | None = "auto") -> list[int]: ...

    assert signature("sch.fuse", fuse, leave_out=["sch"]) == (
        "`#!python sch.fuse(compiler: str | None = 'auto') -> list[int]`\n"
    )


def test_lambdas_of_one_line_are_told_apart_and_show_what_they_were_made_with() -> None:
    def times(number: int):
        return lambda x: x * number

    assert listing([lambda x: x + 1, lambda x: x - 1]) == ["lambda x: x + 1", "lambda x: x - 1"]
    assert listing([times(3)]) == ["lambda x: x * number  # number = 3"]


def test_setups_come_where_they_are_wanted_and_reasons_stay_with_their_block() -> None:
    page = (
        "<!-- setup b\nx = 2\n-->\n## a\n```python\n1\n```\n## b\n<!-- not run: no card here -->\n```python\nx\n```\n"
    )
    found = [(block.text, block.line, block.not_run) for block in blocks(page)]
    assert found == [("1", 6, ""), ("x = 2", 2, ""), ("x", 11, "no card here")]


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("```bash\nls\n```", "a block is python or console"),
        ("```python\n1", "does not end"),
        ("<!-- setup later\n1\n-->", "headings that there are not: later"),
        ("As so:\n\n    make test\n", "code is put between"),
    ],
)
def test_no_code_is_passed_over(page: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(blocks(page))


def test_commands_are_joined_and_their_comments_left_out() -> None:
    (block,) = blocks("```console\n$ make demo    # minutes\nits output\n$ fxschedule \\\n    doctor\n```")
    assert commands(block) == ["make demo", "fxschedule doctor"]
