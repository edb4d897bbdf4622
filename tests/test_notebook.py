"""Schedules and matches as a notebook shows them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import schedule
from tests.report.test_report import Page
from tests.small import bias_gelu, ids, small


def shown(page: Page) -> str:
    return " ".join(" ".join(page.texts).split())


def test_a_schedule_is_a_tree_that_is_open_where_something_was_done() -> None:
    sch = schedule.create_schedule(small(), ids())
    mlp = sch["blocks.1.mlp"]
    mlp.fuse(mlp.find(bias_gelu, expect=1))
    page = Page(sch._repr_html_())
    assert "the root Small" in shown(page) and "mlp Mlp fuse(bias_gelu)" in shown(page)
    opened = ["open" in attributes for tag, attributes in page.tags if tag == "details"]
    paths = ["the root", "blocks", "0", "0.attn", "0.mlp", "1", "1.attn", "1.mlp"]
    assert dict(zip(paths, opened, strict=True)) == {
        path: path in ("the root", "blocks", "1", "1.mlp") for path in paths
    }
    assert Page(sch["blocks.1.mlp.fc1"]._repr_html_()).texts  # a module without any below


def test_a_match_shows_its_nodes_and_what_it_reads() -> None:
    sch = schedule.create_schedule(small(), ids())["blocks.0.mlp"]
    (match,) = sch.find(bias_gelu, expect=1)
    text = shown(Page(match._repr_html_()))
    assert "bias_gelu in blocks.0.mlp at" in text
    assert "act__gelu = gelu(fc1__add, approximate=tanh)" in text and "bias = self.fc1.bias" in text


def test_names_are_escaped() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    Odd.__name__ = "<script>"
    text = schedule.create_schedule(Odd(), torch.ones(1))._repr_html_()
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_a_report_is_short_where_it_is_only_named_and_has_its_steps() -> None:
    model = small()
    report = schedule.optimize(model, ids(), rules="bias_gelu_tanh")
    assert repr(report) == "Report(Small: 2 declined)"
    report = schedule.optimize(model, ids(), rules="bias_gelu_tanh", cost_guard=False)
    assert repr(report) == "Report(Small: 2 applied)" and report.schedule is not None
    report.schedule.undo()
    assert not report.schedule.history


def test_printed_text_stays_text_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There rich would show a table of its own beside what is printed, or in place of it."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    sch = schedule.create_schedule(small(), ids())
    report = schedule.optimize(sch, cost_guard=False)
    assert "\x1b" not in str(report) and "bias_gelu_tanh" in str(report)
    checked = schedule.verify(sch, ids(), steps=1)
    assert repr(checked) == str(checked) and "equal in eval mode" in str(checked)
    sch["blocks.1.mlp"].show()
    assert capsys.readouterr().out.startswith("blocks.1.mlp: Mlp")
