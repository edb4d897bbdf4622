"""The report of ``optimize`` in its forms: printed, as a page, in a notebook, with times."""

from __future__ import annotations

import json
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import fused
import schedule
from schedule.report.comparing import costs_since
from schedule.report.costs import Cost, TimeRatio
from schedule.report.entries import Entry
from schedule.report.report import Report
from tests.report.pictures.models import mesh

_VOID = {"meta", "br"}
X = torch.linspace(-2, 2, 24).reshape(3, 8)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        y = self.fc2(self.act(self.fc1(x)))
        return y * 2 if double else y


class Page(HTMLParser):
    """Reads a page, and refuses one whose tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag == "td":
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "td" in self.open:
            self.cells[-1][-1] += data


def rewritten(model: nn.Module | None = None) -> Report:
    return schedule.optimize(model or nn.Sequential(MLP(), MLP()), X, cost_guard=False)


def made_up(*entries: Entry) -> Report:
    return Report(list(entries), nn.Linear(1, 1))


ENTRIES = [
    Entry("bias_gelu", "h.0.mlp", "applied", 2, "", "model.py:3"),
    Entry("bias_gelu", "h.1.mlp", "applied", 1, "", "model.py:3"),
    Entry("gated_mlp", "head", "near miss", 1, "expected a chunk"),
    Entry("bias_gelu", "head", "declined", 1, "tiny"),
    Entry("rms_norm", "", "skipped", 1, "a branch depends on the data"),
]


def test_the_page_has_every_rule_module_status_and_reason() -> None:
    read = Page(made_up(*ENTRIES).to_html())
    rows = [[" ".join(cell.split()) for cell in row] for row in read.cells if row]
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        ("bias_gelu", "applied", "3", ""),
        ("rms_norm", "skipped", "1", "a branch depends on the data"),
        ("bias_gelu", "declined", "1", "tiny"),
        ("gated_mlp", "near miss", "1", "expected a chunk"),
    ]
    assert rows[0][3] == "h.*.mlp (2) h.0.mlp ×2 model.py:3 h.1.mlp model.py:3"
    assert rows[1][3] == "the root the root"
    text = " ".join(" ".join(read.texts).split())
    assert "3 matches in 2 modules were rewritten" in text


def test_a_column_without_a_word_is_left_out() -> None:
    report = made_up(*ENTRIES[:2])
    read = Page(report.to_html())
    assert [len(row) for row in read.cells if row] == [4] and "why" not in read.texts
    assert " why " not in str(report) and " why " in str(made_up(*ENTRIES))


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = rewritten().to_html()
    read = Page(text)
    names = {name for name, _ in read.tags}
    assert names.isdisjoint({"link", "img", "iframe", "object"}) and "url(" not in text and "@import" not in text
    assert not any({"src", "href"} & attributes.keys() for _, attributes in read.tags)
    assert ("meta", {"charset": "utf-8"}) in read.tags and text.startswith("<!doctype html>")


def test_a_notebook_gets_a_part_of_a_page() -> None:
    text = rewritten()._repr_html_()
    assert {"html", "body", "head", "title"}.isdisjoint(name for name, _ in Page(text).tags)
    assert "bias_gelu" in text and "2 matches in 2 modules" in text


@pytest.mark.parametrize("where", ["rule", "path", "reason", "source"])
def test_everything_is_escaped(where: str) -> None:
    evil = "<script>alert('&')</script>[/b][red]"
    entry = Entry(**{"rule": "r", "path": "p", "status": "skipped", where: evil})  # type: ignore[arg-type]
    report = made_up(entry)
    read = Page(report.to_html())
    assert "script" not in {name for name, _ in read.tags}
    assert evil in "".join(read.texts)
    if where != "source":  # which is not printed
        console = Console(width=200)
        with console.capture() as capture:
            console.print(report)
        assert evil in capture.get()


def test_the_name_of_the_model_is_escaped() -> None:
    report = Report([], type("<b>&", (nn.Module,), {})())
    read = Page(report.to_html())
    assert "b" not in {name for name, _ in read.tags} and any("<b>&" in text for text in read.texts)


def test_the_page_is_written_as_utf8(tmp_path: Path) -> None:
    report = made_up(Entry("r", "p", "skipped", 1, "größer → 1"))
    for path in (tmp_path / "a.html", str(tmp_path / "b.html")):
        text = report.to_html(path)
        assert Path(path).read_bytes().decode("utf-8") == text and "größer → 1" in text


def test_a_page_about_nothing() -> None:
    text = schedule.optimize(nn.Sequential(nn.Linear(8, 8)), X).to_html()
    assert "nothing was changed" in text and not Page(text).cells


@pytest.mark.unreplayable("a hook is put on beside the schedule, from then on the original forward runs")
def test_costs_and_later_calls_are_on_the_page() -> None:
    model = nn.Sequential(MLP(), MLP())
    report = rewritten(model)
    with fused.backend("reference"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0](X, double=True)
        model[1].fc1.register_forward_hook(lambda *_: None)
        model(X)
        text = report.to_html()
    assert "kept for backward" in text and "dispatched operations" in text
    assert report.adapted.keys() == {"0"} and report.fallbacks == {"1": 1}
    read = "".join(Page(text).texts)
    assert f"{report.adapted['0'][0]} in 0" in read and "1 of 1" in read


@pytest.mark.unreplayable("a hook is put on beside the schedule, from then on the original forward runs")
def test_what_is_in_effect_now_is_told() -> None:
    model = nn.Sequential(MLP(), MLP())
    report = rewritten(model)
    matches = report.count()
    with fused.backend("reference"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        model(X)
        assert report.active == matches and report.falling_back == [] and "not in effect" not in str(report)
        hooks = [each.fc1.register_forward_hook(lambda *_: None) for each in model]
        model(X)
        assert report.active == 0 and report.falling_back == ["0", "1"] and report.to_dict()["active"] == 0
        assert report.sentence.endswith(
            f"{matches} of {matches} not in effect: the last calls ran the original forward, see below."
        )
        assert report.figures()[0].tone == "bad" and "not in effect" in report.to_html()
        hooks[0].remove()
        model(X)
        assert report.active == matches // 2 and report.falling_back == ["1"]
        hooks[1].remove()
        model(X)
        assert report.active == matches and "not in effect" not in report.sentence
    assert len([each for each in told if each.category is schedule.FallbackWarning]) == 1, "one for like layers"


def test_only_measuring_runs_the_model() -> None:
    report = rewritten(nn.Sequential(MLP(), MLP()))
    calls: list[nn.Module] = []
    with nn.modules.module.register_module_forward_pre_hook(lambda module, _: calls.append(module)):
        texts = [str(report), repr(report), report.to_json(), report._repr_html_()]
        assert not calls and "not measured report.measure() runs a training step" in " ".join(texts[0].split())
        assert json.loads(texts[2])["costs"] == {}
        assert report.measure().keys() == {"before", "after"} and calls
    assert "kept for backward" in str(report) and json.loads(report.to_json())["costs"]["after"]


# -- times ----------------------------------------------------------------------------------------------------


def test_times_are_shown_once_asked_for() -> None:
    model = nn.Sequential(MLP(), MLP())
    report = rewritten(model)
    with fused.backend("reference"):
        assert "not timed" in str(report) and report.to_dict()["time"] is None
        ratio = report.timed(rounds=3)
        assert ratio.rounds == 3 and 0 < ratio.low <= ratio.median <= ratio.high
        assert f"s {ratio}" in " ".join(str(report).split()) and "a training step takes" in report.sentence
        assert f"{ratio}" in report.to_html()
        assert json.loads(report.to_json())["time"]["median"] == ratio.median


def test_the_scheduled_and_the_original_model_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def seconds(model: Any, batch: Any) -> float:
        scheduled = schedule.runtime.state_of(model[0]) is not None
        seen.append(scheduled)
        return 1.0 if scheduled else 2.0

    monkeypatch.setattr("schedule.report.comparing.step_seconds", seconds)
    model = nn.Sequential(MLP())
    assert rewritten(model).timed(2) == TimeRatio(0.5, 0.5, 0.5, 2, (2.0, 1.0))
    assert seen == [True, False, True, False]
    assert schedule.runtime.state_of(model[0]) is not None


def test_timing_leaves_the_model_alone() -> None:
    model = nn.Sequential(MLP(), nn.Dropout(0.5)).eval()
    report = rewritten(model)
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with fused.backend("reference"):
        report.timed(1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not model.training
    assert all(p.grad is None for p in model.parameters()) and report.fallbacks == {}


def test_the_ratio_is_the_median_with_quartiles() -> None:
    assert TimeRatio.of([5.0, 1.0, 2.0, 4.0, 3.0], [1.0] * 5) == TimeRatio(3.0, 2.0, 4.0, 5, (1.0, 3.0))
    assert str(TimeRatio.of([1.0], [2.0])) == "0.50 × [0.50, 0.50] in 1 round, faster"
    assert TimeRatio.of([2.0], [1.0]).verdict == "slower"
    assert TimeRatio.of([1.0, 3.0], [2.0] * 2).verdict == "no clear difference"


class NeedsLabels(MLP):
    """As detectors have it: labels are asked for in training alone."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and labels is None:
            raise AssertionError("labels are needed\nin training")
        return super().forward(x)


def test_a_model_that_does_not_train_on_the_batch_is_reported_all_the_same() -> None:
    model = NeedsLabels().eval()
    expected = model(X)
    report = schedule.optimize(model, X, rules="bias_activation", cost_guard=False, measure=True)
    why = "the model does not train on its example inputs: AssertionError: labels are needed"
    assert f"kept for backward not measured {why}" in " ".join(str(report).split())
    assert report.measured == {} and report.to_dict()["unmeasured"] == f"{why}\nin training"
    assert why in report.to_html()
    for run in (report.measure, report.timed):  # evaluation alone can still be verified
        with pytest.raises(schedule.NotApplicable, match=why):
            run()
    assert report.applied == {"bias_gelu": 1} and not model.training
    torch.testing.assert_close(model(X), expected)
    assert len(report.schedule.history) == 1 and report.fallbacks == {}


def test_a_model_made_for_inference_is_reported_all_the_same() -> None:
    with torch.inference_mode():
        model = MLP()
        report = schedule.optimize(model, X, rules="bias_activation", cost_guard=False, measure=True)
        assert report.applied == {"bias_gelu": 1} and "not measured" in str(report)


def test_a_report_on_one_rank_waits_for_no_other() -> None:
    sch = schedule.create_schedule(MLP(), X, mesh(2))
    sch["fc1"].shard("weight", axis=0)
    with pytest.raises(schedule.NotApplicable, match="sharded over ranks"):
        costs_since(sch, X, 0)


def test_what_cannot_be_timed_says_so() -> None:
    for rounds in (0, {"ids": 1}):
        with pytest.raises(schedule.NotApplicable, match=r"rounds is a number from 1, not (0|a dict)"):
            rewritten().timed(rounds)  # type: ignore[arg-type]
    for run in (made_up().timed, made_up().verify):
        with pytest.raises(schedule.NotApplicable, match=r"not made by schedule\.optimize"):
            run()
    with torch.device("meta"):
        model, x = MLP(), torch.ones(4, 8)
    with pytest.raises(schedule.NotApplicable, match="meta device"):
        schedule.optimize(model, x, cost_guard=False).timed()


# -- the sentence and the four figures --------------------------------------------------------------------------------


def costs(before: int, after: int) -> dict[str, Cost]:
    return {"before": Cost(before, 10), "after": Cost(after, 5)}


def tones(report: Report) -> list[str]:
    return [figure.tone for figure in report.figures()]


def test_improvements_are_said_in_one_sentence() -> None:
    report = made_up(*ENTRIES)
    assert report.sentence == "3 matches in 2 modules were rewritten."
    assert tones(report) == ["good", "neutral", "neutral", "neutral"]
    report.measured, report.timing = costs(1000, 570), TimeRatio(0.61, 0.6, 0.62, 5, (0.0121, 0.0074))
    effects = "keeps 43 % less memory for the backward pass and takes 39 % less time"
    assert report.sentence == f"3 matches in 2 modules were rewritten; a training step {effects}."
    assert tones(report) == ["good", "good", "good", "neutral"]
    assert [figure.value for figure in report.figures()[:3]] == ["3", "1 KB → 570 B", "12.1 ms → 7.4 ms"]


def test_a_regression_is_one() -> None:
    report = made_up(*ENTRIES)
    report.measured, report.timing = costs(1000, 1200), TimeRatio(1.3, 1.2, 1.4, 5, (0.5, 1.5))
    assert tones(report) == ["good", "bad", "bad", "neutral"]
    assert "keeps 20 % more memory for the backward pass and takes 30 % more time" in report.sentence
    assert report.figures()[2].value == "500.0 ms → 1.50 s"
    read = Page(report.to_html())
    assert [attrs.get("class") for tag, attrs in read.tags if tag == "li"][:4] == ["good", "bad", "bad", "neutral"]


def test_no_difference_is_none() -> None:
    report = made_up(*ENTRIES)
    report.measured, report.timing = costs(1000, 1000), TimeRatio(1.01, 0.99, 1.02, 5)
    assert tones(report)[1:3] == ["neutral", "neutral"]
    assert "keeps as much memory for the backward pass and takes 1 % more time" in report.sentence


def test_nothing_rewritten_is_not_good() -> None:
    report = made_up(*ENTRIES[2:])
    assert report.sentence == "Nothing was rewritten, so nothing was changed: 1 skipped, 1 declined, 1 near miss."
    assert tones(report) == ["neutral"] * 4 and report.figures()[0].note == "nothing was changed"


def test_a_verification_is_shown() -> None:
    report = rewritten(nn.Sequential(MLP(), MLP()))
    with fused.backend("reference"):
        assert report.verify(steps=1) and tones(report)[3] == "good"
    assert report.verified is not None and report.to_dict()["verified"] is True and report.fallbacks == {}
    figure = report.figures()[3]
    cases = len(report.verified.cases)
    assert (figure.value, figure.note.partition(" at ")[0]) == ("equal", f"in {cases} cases")


def test_a_failed_verification_is_shown() -> None:
    model = nn.Sequential(MLP(), MLP())
    report = rewritten(model)
    report.schedule["0"].replace(nn.Tanh())
    with pytest.raises(schedule.VerificationError):
        report.verify(steps=1)
    assert tones(report)[3] == "bad" and report.figures()[3].value == "DIFFERENT"
    assert report.to_dict()["verified"] is False


def test_the_facts_are_those_of_the_model() -> None:
    facts = dict(rewritten(nn.Sequential(MLP(), MLP())).facts())
    assert facts["model"] == "Sequential, 560 parameters, float32 on cpu"
    assert facts["batch"] == "float32 [3, 8]" and facts["versions"].startswith(f"torch {torch.__version__}, ")
    assert facts["weights"] == "not loaded from a checkpoint by transformers"


def test_eighty_columns_are_enough() -> None:
    report = made_up(*ENTRIES)
    report.measured, report.timing = costs(1000, 570), TimeRatio(0.61, 0.6, 0.62, 5, (0.0121, 0.0074))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    for text in ("bias_gelu", "near miss", "12.1 ms → 7.4 ms", "0.61 × [0.60, 0.62] in 5 rounds"):
        assert any(text in line for line in lines), text
