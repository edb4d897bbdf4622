"""The page: what is on it, that it needs nothing from elsewhere, and that names cannot break out of it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fused
import schedule
from schedule.distributed.communication.groups import SimulatedRanks
from schedule.report.costs import TimeRatio
from schedule.report.pictures import page as pages
from schedule.report.pictures.grids import sharding
from schedule.report.pictures.page import Page
from schedule.report.report import Report
from schedule.runtime.scheduled import FallbackWarning
from tests.report.pictures.models import gpt2, hostile, mesh, planned_llama
from tests.report.test_report import Page as Read
from tests.small import bias_gelu, ids, small


@pytest.fixture(scope="module")
def report() -> Report:
    return gpt2()


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return report.to_html()


def words(text: str) -> str:
    return " ".join(" ".join(Read(text).texts).split())


def buttons(text: str) -> dict[str, str]:
    """Path → template of the module, for every module that can be clicked."""
    found = {}
    for tag, attributes in Read(text).tags:
        if tag == "button" and "data-paths" in attributes:
            found |= dict.fromkeys(json.loads(attributes["data-paths"] or ""), attributes["data-module"] or "")
    return found


def template(text: str, name: str) -> str:
    found = re.search(rf'<template id="{name}">(.*?)</template>', text, re.DOTALL)
    assert found is not None, name
    return found[1]


def picture_of(text: str, path: str) -> str:
    module = template(text, buttons(text)[path])
    number = re.search(r'data-picture="(picture-\d+)"', module)
    assert number is not None, f"{path} has no picture"
    return template(text, number[1])


def test_every_rewritten_module_has_its_graph_before_and_after(report: Report, text: str) -> None:
    for entry in report.select(status="applied"):
        picture = picture_of(text, entry.path)
        assert picture.count("<figcaption>") == 2 and ">before<" in picture and ">after<" in picture
        assert entry.rule in picture.partition("</ul>")[0], "the legend names the rule"


def test_matched_nodes_are_numbered_on_both_sides(text: str) -> None:
    before, after = picture_of(text, "transformer.h.0.mlp").split("<figure>")[1:]
    numbers = [re.findall(r'data-change="(\d+)"', side) for side in (before, after)]
    assert numbers[0].count("1") == 9 and numbers[1] == ["1", "2"], "GELU's formula with its bias is one call"
    assert "bias_activation gelu_tanh" in after and "tanh" in before


def test_hovering_tells_operation_shapes_bytes_and_source_line(text: str) -> None:
    title = re.search(r"<title>(bias_activation = .*?)</title>", picture_of(text, "transformer.h.0.mlp"), re.DOTALL)
    assert title is not None
    assert "float32 [2, 16, 256], 32.77 KB, cpu" in title[1]
    assert re.search(r"at transformers/activations\.py:\d+ in forward", title[1])
    assert "c_fc.bias: f32 256" in title[1] and "bias_gelu_tanh" in title[1]


def test_like_layers_share_one_row_and_one_picture(text: str) -> None:
    found = buttons(text)
    assert len({found[f"transformer.h.{i}.attn"] for i in range(3)}) == 1
    assert "0–2 GPT2Block ×3" in words(text)
    root = picture_of(text, "transformer")
    assert ">h.0–2<" in root and ">GPT2Block ×3<" in root


def test_saved_bytes_are_told_by_module(text: str) -> None:
    after = words(text).partition("Kept for backward, by module")[2]
    assert re.search(r"transformer\.h\.0–2\.mlp [\d.]+ KB → [\d.]+ KB 0\.\d\d ×", after)


def test_bytes_by_module_are_those_of_the_whole(report: Report, text: str) -> None:
    after = words(text).partition("Kept for backward, by module")[2]
    saved = next(figure for figure in report.figures() if figure.name == "kept for backward")
    assert f"the whole model {saved.value}" in after


def test_the_page_needs_nothing_from_elsewhere(text: str) -> None:
    read = Read(text)
    assert not any({"src", "href", "xlink:href", "srcset"} & attributes.keys() for _, attributes in read.tags)
    assert {tag for tag, _ in read.tags}.isdisjoint({"link", "img", "iframe", "object", "base", "form"})
    for word in ("http://", "https://", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in text


@pytest.mark.unwritable("what is looked for is defined inside the test")
def test_names_cannot_break_out() -> None:
    page = hostile().show_graph()
    tags = [tag for tag, _ in Read(page.html).tags]
    assert tags.count("script") == 1 and "img" not in tags and "b" in tags
    assert not any(name.startswith("on") for _, attributes in Read(page.html).tags for name in attributes)
    assert any("<img src=x onerror=alert(1)>" in path for path in buttons(page.html))
    inside = Read(page._repr_html_())
    assert [tag for tag, _ in inside.tags] == ["iframe"]
    assert (
        dict(inside.tags)["iframe"]["srcdoc"] == page.html and dict(inside.tags)["iframe"]["sandbox"] == "allow-scripts"
    )


def test_what_was_not_done_is_told_at_the_module_with_its_reason() -> None:
    report = schedule.optimize(small(), ids())
    entry = report.select(status="declined")[0]
    text = report.to_html()
    assert f"declined {entry.rule} : {entry.reason}" in words(template(text, buttons(text)[entry.path]))


def test_times_are_bars_once_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    report = schedule.optimize(small(), ids(), cost_guard=False)
    assert "Time of a training step" not in report.to_html()
    monkeypatch.setattr(report, "time_ratio", lambda rounds, advance: TimeRatio(0.5, 0.4, 0.6, rounds))
    report.timed(3)
    text = report.to_html()
    assert "scheduled 0.50 × [0.40, 0.60] in 3 rounds, faster" in words(text).partition("Time of a training step")[2]
    assert re.search(r'class="before" style="width: 100.0%".*?style="width: 50.0%"', text, re.DOTALL)


def test_optimize_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "section", lambda *_: pytest.fail("drawn without being asked for"))
    report = schedule.optimize(small(), ids(), cost_guard=False)
    assert str(report) and report.to_json()


# -- schedules by hand ----------------------------------------------------------------------------------------


def test_a_schedule_without_steps_shows_its_graphs_and_what_rules_leave_alone() -> None:
    page = schedule.create_schedule(small(), ids()).show_graph()
    text = words(page.html)
    assert "Nothing was done yet" in text and "too small: " in text and "declined" in text
    assert picture_of(page.html, "blocks.0.mlp").count("<figcaption>") == 1
    assert "it cannot be traced: " in text, "a module whose forward depends on data says so"


def test_a_fuse_is_named_and_undo_takes_it_off_the_page() -> None:
    sch = schedule.create_schedule(small(), ids())
    mlp = sch["blocks.1.mlp"]
    mlp.fuse(mlp.find(bias_gelu, expect=1))
    text = sch.show_graph().html
    assert "fuse(bias_gelu)" in picture_of(text, "blocks.1.mlp").partition("</ul>")[0]
    assert picture_of(text, "blocks.0.mlp").count("<figcaption>") == 1
    sch.undo()
    assert "fuse(bias_gelu)" not in sch.show_graph().html


@pytest.mark.unwritable("a lambda is looked for")
def test_a_rewrite_of_a_rewrite_is_one_change_from_the_original() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.silu(x))

    sch = schedule.create_schedule(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.ones(2, 8))
    sch.replace(functional.silu, sch.find(lambda x: torch.relu(x), expect=1))
    sch.fuse(sch.find(both, expect=1), compiler=None)
    legend, before, after = picture_of(sch.show_graph().html, "").split("<figure>")
    assert ">relu<" in before and ">tanh<" in before and "silu" not in before and ">tanh<" not in after
    assert re.findall(r'data-change="(\d)"', before) == ["1", "1"] and re.findall(r'data-change="(\d)"', after) == ["1"]
    assert "fuse(both" in legend and "replace" not in legend


def test_a_part_of_a_model_has_a_page_of_its_own() -> None:
    sch = schedule.create_schedule(small(), ids())["blocks.0"]
    page = sch.show_graph()
    assert page.title == "Block: blocks.0"
    assert all(path.startswith("blocks.0") for path in buttons(page.html))


def test_modules_under_a_primitive_are_colored_where_they_are_called() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.0"].checkpoint()
    picture = picture_of(sch.show_graph().html, "")
    assert "checkpoint" in picture.partition("</ul>")[0]
    assert re.search(r'class="node call marked c\d" data-path="blocks\.0"', picture)
    assert re.search(r'class="node call plain" data-path="blocks\.1"', picture)


def test_a_model_on_the_meta_device_is_drawn() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8)
    report = schedule.optimize(model, x, cost_guard=False)
    assert ">before<" in picture_of(report.to_html(), "")


def test_drawing_leaves_the_model_alone() -> None:
    model = small().eval()
    report = schedule.optimize(model, ids(), cost_guard=False)
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    steps, graphs = len(report.schedule.history), [str(report.schedule["blocks.0"].graph)]  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert report.to_html() == report.to_html()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not model.training
    assert all(p.grad is None for p in model.parameters()) and report.fallbacks == {}
    assert len(report.schedule.history) == steps  # type: ignore[union-attr]
    assert [str(report.schedule["blocks.0"].graph)] == graphs  # type: ignore[union-attr]


@pytest.mark.unreplayable("a hook is put on beside the schedule, from then on the original forward runs")
def test_our_own_runs_are_no_fallbacks() -> None:
    """What is traced later is compared by running the model: that counted as calls of the user's."""
    model = small()
    schedule.optimize(model, ids(), cost_guard=False)
    sch = schedule.create_schedule(model, ids())
    model.blocks[0].mlp.fc1.register_forward_hook(lambda *_: None)
    states = [s for m in model.modules() if (s := schedule.runtime.state_of(m)) is not None]
    with fused.backend("reference"), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        sch.tree.graphs.recording  # noqa: B018
        count = [state.fallbacks for state in states]
        _ = sch["blocks.1"].graph, sch.show_graph()
    assert [state.fallbacks for state in states] == count


# -- plans and pipelines --------------------------------------------------------------------------------------


def test_stages_have_their_modules() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.0"].cut_pipeline_stage()
    text = words(sch.show_graph().html)
    stages = text.partition("Pipeline: 2 stages")[2]
    assert re.search(
        r"stage 0 [\d.]+ KB of parameters embed blocks\.0 stage 1 [\d.]+ KB of parameters blocks\.1", stages
    )


def test_a_plan_is_a_grid_of_ranks() -> None:
    sch = planned_llama()
    page = sch.show_graph().html
    rows = {tuple(" ".join(cell.split()) for cell in row) for row in Read(page).cells if row}
    found = {row[0]: row[1:] for row in rows}
    assert found["model.layers.0–1.self_attn.q_proj"][:4] == ("weight 32×32", "column", "16×32", "16×32")
    assert found["model.layers.0–1.mlp.down_proj"] == ("weight 32×48", "row", "32×24", "32×24", "fwd_post: all_reduce")
    picture = picture_of(page, "model.layers.0.mlp")
    legend = picture.partition("</ul>")[0]
    assert "shard: column-parallel" in legend and "shard: row-parallel" in legend
    assert "would have to run together" in words(page)


def test_drawing_a_plan_communicates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SimulatedRanks, "exchange", lambda *_: pytest.fail("it communicates: other ranks would be needed")
    )
    planned_llama().show_graph()


def test_packed_parts_are_shared_out_one_by_one() -> None:
    sch = schedule.create_schedule(nn.Sequential(nn.Linear(8, 24)), torch.ones(2, 8), mesh(2, rank=1))
    sch["0"].shard("weight", axis=0, parts=3)
    sch["0"].shard("bias", axis=0, parts=3)
    found = sharding(sch)
    assert found is not None and found.ranks == 2
    weight, bias = (row.shares for row in found.rows)
    assert weight[1].shape == "12×8" and bias[0].shape == "12"
    expected = [(1 / 6, 1 / 3), (1 / 2, 2 / 3), (5 / 6, 1.0)]
    assert [end for span in weight[1].spans for end in span] == pytest.approx(
        [end for span in expected for end in span]
    )


def test_what_is_common_is_drawn_on_every_rank() -> None:
    sch = schedule.create_schedule(nn.Sequential(nn.Linear(8, 24)), torch.ones(2, 8), mesh(2, rank=1))
    sch["0"].shard("weight", axis=0, common=8)
    found = sharding(sch)
    assert found is not None
    first, second = found.rows[0].shares
    assert (first.shape, second.shape) == ("16×8", "16×8")
    ends = [end for share in (first, second) for span in share.spans for end in span]
    assert ends == pytest.approx([0, 1 / 3, 2 / 3, 1, 1 / 3, 2 / 3, 2 / 3, 1])


def test_a_mesh_without_shards_is_drawn_like_any_model() -> None:
    sch = schedule.create_schedule(small(), ids(), mesh(2))
    assert "Sharded over" not in sch.show_graph().html


# -- files ----------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = schedule.optimize(small(), ids())
    monkeypatch.setattr("schedule.report.report.section", lambda *_: pytest.fail("it was drawn"))
    for path in (tmp_path / "none" / "out.html", tmp_path):
        for write in (report.to_html, report.schedule.show_graph):  # type: ignore[union-attr]
            with pytest.raises(schedule.NotApplicable, match=r"cannot be written|is a folder") as caught:
                write(path)
            assert caught.value.fix


def test_the_page_is_written(tmp_path: Path) -> None:
    page = schedule.create_schedule(small(), ids()).show_graph(tmp_path / "out.html")
    assert isinstance(page, Page) and (tmp_path / "out.html").read_text(encoding="utf-8") == page.html
    assert list(tmp_path.iterdir()) == [tmp_path / "out.html"] and "kB of HTML" in repr(page)


def test_what_it_takes_is_packaged() -> None:
    import tomllib

    root = Path(schedule.__file__).parents[1]
    patterns: Any = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "schedule"
    ]
    packaged = {path for pattern in patterns for path in (root / "schedule").glob(pattern)}
    assert set((root / "schedule" / "util" / "templates").iterdir()) <= packaged
