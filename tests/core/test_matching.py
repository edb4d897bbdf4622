"""Finding on schedules: what may be given, what comes back, and matches that have become old."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import Schedule, call_module, optional, scalar
from tests import zoo
from tests.fingerprint import fingerprint
from tests.small import bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


class BiasGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias, approximate="tanh")


def test_what_find_takes(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    assert len(mlp.find(bias_gelu)) == 1
    assert len(mlp.find(BiasGelu())) == 1
    assert [m.nodes[0].target for m in mlp.find(nn.Linear)] == ["fc1", "fc10"]
    assert [m.nodes[0].target for m in mlp.find("fc1")] == ["fc1"]  # and not fc10
    assert [m.nodes[0].target for m in mlp.find(r"fc\d+")] == ["fc1", "fc10"]
    assert len(mlp.find(call_module(nn.GELU))) == 1
    assert len(mlp.find(lambda x: F.gelu(call_module("fc1")(x), approximate="tanh"))) == 1
    compiled = schedule.patterns.compile_pattern(bias_gelu)
    assert mlp.find(compiled)[0].pattern is compiled


def test_a_rule_by_name_and_as_object(sch: Schedule) -> None:
    beyond_products = [rule for rule in schedule.list_rules() if rule.family not in ("linear", "recomputed_input")]
    named = [rule for rule in beyond_products if sch["blocks.0.mlp"].find(rule.name)]
    assert len(named) == 1
    (match,) = sch["blocks.0.mlp"].find(named[0])
    assert match.rule is named[0] and match.name == named[0].name


def test_lookalikes_are_not_found(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    assert mlp.find(lambda x, b: F.gelu(x + b)) == []
    assert mlp.find(lambda x, b: F.silu(x + b)) == []
    assert sch["blocks.0.attn"].find(lambda s: F.softmax(s, dim=0)) == []


def test_a_match_says_what_it_is(sch: Schedule, capsys: pytest.CaptureFixture[str]) -> None:
    def scaled_softmax(scores: torch.Tensor) -> torch.Tensor:
        return F.softmax(scores * scalar("scale"), dim=-1)

    (match,) = sch["blocks.0.attn"].find(scaled_softmax, expect=1)
    assert match.path == "blocks.0.attn"
    assert match.scalars == {"scale": 0.25}
    assert list(match.inputs) == ["scores"] and match.inputs["scores"].target is not None
    assert [n.target for n in match.nodes][-1] is F.softmax
    assert "tests/small.py" in match.source.replace("\\", "/")
    match.show()
    text = capsys.readouterr().out
    assert "scaled_softmax in blocks.0.attn" in text and "scale = 0.25" in text and "float32[2, 5, 5]" in text
    assert repr(match).startswith("Match(scaled_softmax in blocks.0.attn: ")


def test_one_match_holds_every_specialization(sch: Schedule) -> None:
    (match,) = sch["blocks.0.mlp"].find(bias_gelu)
    assert [site.found_in.training for site in match.sites] == [True, False]
    outputs = {site.graph_match.outputs[0].name for site in match.sites}
    assert len(outputs) == 1


@pytest.mark.unwritable("what is looked for is defined inside the test")
def test_what_is_in_training_only(sch: Schedule) -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=scalar("p"), training=scalar("t", where=lambda t: t is True))

    (match,) = sch["blocks.0.attn"].find(dropped)
    assert [site.found_in.training for site in match.sites] == [True]
    sch["blocks.0.attn"].replace(lambda x: F.dropout(x, 0.1), [match])
    assert schedule.verify(sch, ids(), steps=1)


def test_several_signatures_are_one_place() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"block": small().blocks[0]})["block"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x), torch.zeros(x.shape[1], x.shape[1]))

    sch = schedule.create_schedule(Twice(), batch=(torch.randn(2, 5, 16),))

    def softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.softmax(optional(lambda s: s + mask, name="mask")(scores), dim=-1)

    (match,) = sch["inner.attn"].find(softmax)
    assert len(match.sites) == 4
    assert {site.graph_match.choices["mask"] for site in match.sites} == {True, False}


def test_expect_explains_the_near_miss(sch: Schedule) -> None:
    with pytest.raises(schedule.MatchError) as caught:
        sch["blocks.*.mlp"].find(lambda x, b: F.gelu(x + b, approximate="none"), expect=12)
    text = str(caught.value)
    assert re.search(r"found 0 times in 2 modules, expected 12", text)
    assert "'tanh'" in text and "'none'" in text and "fix:" in text
    with pytest.raises(schedule.MatchError, match=r"found 2 times(?s:.*)expected 1(?s:.*)blocks.1.mlp"):
        sch["blocks.*.mlp"].find(bias_gelu, expect=1)
    assert len(sch["blocks.*.mlp"].find(bias_gelu, expect=2)) == 2


def test_untraceable_is_an_error_not_an_empty_list(sch: Schedule) -> None:
    for again in range(2):  # remembered, and said again
        with pytest.raises(schedule.TraceError, match="numpy") as caught:
            sch["branching"].find(bias_gelu)
        assert "tests/small.py" in str(caught.value) and "branching" in str(caught.value), again
    with pytest.raises(schedule.TraceError, match="not called in the recorded run"):
        sch["unused"].find(bias_gelu)


def test_a_module_with_a_forward_of_its_own(sch: Schedule) -> None:
    mlp = sch.module.blocks[0].mlp
    mlp.forward = lambda hidden: hidden
    with pytest.raises(schedule.TraceError, match="forward of its own"):
        sch["blocks.0.mlp"].find(bias_gelu)


def test_finding_changes_nothing(sch: Schedule) -> None:
    before = fingerprint(sch)
    sch["blocks.*"].find(bias_gelu)
    sch["blocks.*.mlp"].find(bias_gelu)
    assert fingerprint(sch) == before


@pytest.mark.unwritable("a lambda is looked for")
def test_an_old_match_still_holds_after_another_rewrite(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    (softmax,) = attn.find(lambda s: F.softmax(s, dim=-1))
    (scaled,) = attn.find(lambda s: s * scalar("scale", where=lambda v: v == 0.25))
    attn.replace(quarter, [scaled])
    attn.fuse([softmax], compiler=None)
    targets = [getattr(n.target, "__name__", "") for n in attn.graph.nodes]
    assert "quarter" in targets and "lambda" in targets
    assert schedule.verify(sch, ids(), steps=1)


def quarter(s: torch.Tensor, scale: float) -> torch.Tensor:
    return s * scale


@pytest.mark.unwritable("a lambda takes the place of a match")
def test_a_consumed_match_says_by_which_primitive(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    matches = mlp.find(bias_gelu)
    mlp.fuse(matches)
    before = fingerprint(sch)
    with pytest.raises(schedule.MatchError, match=r"consumed by fuse\(bias_gelu\) on blocks.0.mlp"):
        mlp.replace(lambda x, bias: x, matches)
    assert fingerprint(sch) == before
    sch.undo()
    mlp.replace(lambda x, bias: bias_gelu(x, bias), matches)  # undone: the match is good again


def test_a_match_is_refused_elsewhere(sch: Schedule) -> None:
    (match,) = sch["blocks.0.mlp"].find(bias_gelu)
    other = schedule.create_schedule(small(), batch=ids())
    with pytest.raises(schedule.MatchError, match=r"bias_gelu in blocks.0.mlp is from another model \(a Small\)"):
        other["blocks.0.mlp"].fuse([match])
    with pytest.raises(schedule.MatchError, match=r"is in blocks.0.mlp, not in blocks.1.mlp"):
        sch["blocks.1.mlp"].fuse([match])
    with pytest.raises(schedule.MatchError, match=r"in blocks.0.mlp is in none of these modules"):
        sch["blocks.*.attn"].fuse([match])
    sch.fuse([match])  # from above is fine


def test_a_hook_put_on_since_is_not_swallowed(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    matches = mlp.find(bias_gelu)
    sch.module.blocks[0].mlp.act.register_forward_hook(lambda *_: None)
    with pytest.raises(schedule.MatchError, match="act can no longer be inlined"):
        mlp.fuse(matches)


def test_parallel_matches(sch: Schedule) -> None:
    def projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    (group,) = sch["blocks.0.attn"].find_parallel(projection, expect=1)
    assert [m.inputs["weight"].target for m in group] == ["q.weight", "k.weight", "v.weight"]
    with pytest.raises(schedule.MatchError, match="1 group of parallel matches found, expected 2"):
        sch["blocks.0.attn"].find_parallel(projection, expect=2)


def test_gpt2_and_bert() -> None:
    for name, path, pattern in [
        ("gpt2", "transformer.h.*.attn", lambda s: F.softmax(s, dim=-1)),
        ("bert", "bert.encoder.layer.*.attention.self", lambda s: F.softmax(s, dim=-1)),
        ("bert", "bert.encoder.layer.*.intermediate", lambda x, b: F.gelu(x + b)),
    ]:
        sch = schedule.create_schedule(zoo.build(name), batch=zoo.batch(name))
        assert len(sch[path].find(pattern, expect=2)) == 2


def test_misspelt_rules() -> None:
    sch = schedule.create_schedule(small(), ids())
    for where in (sch, sch["blocks.*.mlp"]):
        with pytest.raises(schedule.MatchError, match=r"no rule 'bias_gelu_tahn', and no (?s:.*)'bias_gelu_tanh'"):
            where.find("bias_gelu_tahn")
    with pytest.raises(schedule.MatchError, match=r"it is a family: find each of its rules, bias_gelu_tanh"):
        sch.find("bias_activation")
    with pytest.raises(schedule.MatchError, match=r"not a regular expression for the path(?s:.*)missing \)"):
        sch.find("fc(")
    assert sch["blocks.0.attn"].find("fc1") == [], "a module of the model, though not of this one"
    with pytest.raises(schedule.MatchError, match=r"no rule or family 'rms_nrom'(?s:.*)did you mean 'rms_norm'"):
        schedule.optimize(sch, rules=["rms_nrom"])


def diamond(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    tip = x + y
    return tip * 2 + tip * 3


class Diamonds(nn.Module):
    """One whose tip is used elsewhere, and one that stands alone."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tip = x + y
        return diamond(x, tip * 5 + (tip * 2 + tip * 3))


@pytest.mark.parametrize("primitive", ["replace", "fuse", "checkpoint"])
@pytest.mark.unwritable("a match found with closed=False")
def test_a_match_with_other_uses_inside_is_found_when_asked_for_and_not_replaced(primitive: str) -> None:
    model, inputs = Diamonds(), (torch.ones(2), torch.ones(2))
    expected = model(*inputs)
    sch = schedule.create_schedule(model, inputs)
    sch.find(diamond, expect=1)
    opened, alone = sch.find(diamond, expect=2, closed=False)
    do = {
        "replace": lambda match: sch.replace(diamond, [match]),
        "fuse": lambda match: sch.fuse([match], compiler=None),
        "checkpoint": lambda match: sch.checkpoint([match]),
    }[primitive]
    before = fingerprint(sch)
    with pytest.raises(schedule.MatchError, match=r"add, an interior value of the match, is used outside by mul"):
        do(opened)
    assert fingerprint(sch) == before
    do(alone)
    assert torch.equal(model(*inputs), expected)
    with pytest.raises(schedule.RecipeError, match=r"find\(closed=False\)"):
        sch.recipe()
