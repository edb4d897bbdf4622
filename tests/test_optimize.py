"""``optimize`` and its report: what it does, what it leaves alone, and what it says about either."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fused
import schedule
from schedule.rules import Rule, list_rules, register_rule, unregister_rule
from schedule.runtime.scheduled import state_of
from tests.zoo import batch, build


class MLP(nn.Module):
    """A Linear with bias, an activation, a Linear."""

    def __init__(self, activation: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = activation or nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Two(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def targets(sch: Any) -> list[Any]:
    """What the graph calls."""
    return [node.target for node in sch.graph.nodes if node.op == "call_function"]


X = torch.linspace(-2, 2, 24).reshape(3, 8)


def test_replaces_and_says_where() -> None:
    model = Two()
    expected = model(X)
    report = schedule.optimize(model, X, cost_guard=False)
    assert report.applied == {"bias_gelu": 2}
    assert [(e.path, e.status) for e in report.entries] == [("a", "applied"), ("b", "applied")]
    torch.testing.assert_close(model(X), expected)
    graph = state_of(model.a).specializations[0].graph  # type: ignore[union-attr]
    assert fused.bias_activation in [node.target for node in graph.nodes]


def test_a_second_run_changes_nothing() -> None:
    model = Two()
    schedule.optimize(model, X, cost_guard=False)
    states = [state_of(module) for module in model.modules()]
    again = schedule.optimize(model, X, cost_guard=False)
    assert again.applied == {} and [state_of(module) for module in model.modules()] == states


def test_one_step_a_rule() -> None:
    model = nn.Sequential(MLP(), MLP(nn.ReLU()))
    sch = schedule.create_schedule(model, X)
    schedule.optimize(sch, cost_guard=False)
    assert [step.arguments["rules"] for step in sch.history] == [["bias_gelu"], ["bias_relu"]]
    sch.undo()
    assert state_of(model[1]) is None and state_of(model[0]) is not None
    sch.undo()
    assert type(model[0]) is MLP and state_of(model[0]) is None


def test_parts_of_a_model() -> None:
    sch = schedule.create_schedule(Two(), X)
    assert sch["a"].optimize(cost_guard=False).applied == {"bias_gelu": 1}
    assert state_of(sch["b"].module) is None
    assert schedule.optimize(sch["*"], cost_guard=False).applied == {"bias_gelu": 1}
    assert schedule.optimize(sch["*"], cost_guard=False).applied == {}


def test_rules_by_name_family_and_object() -> None:
    relu = next(rule for rule in list_rules() if rule.name == "bias_relu")
    for rules, expected in [
        ("bias_activation", {"bias_gelu": 1, "bias_relu": 1}),
        ("bias_relu", {"bias_relu": 1}),
        ([relu], {"bias_relu": 1}),
        (["attention_softmax"], {}),
    ]:
        model = nn.Sequential(MLP(), MLP(nn.ReLU()))
        assert schedule.optimize(model, X, rules=rules, cost_guard=False).applied == expected


def test_the_cost_guard_declines_what_is_tiny_or_saves_nothing() -> None:
    report = schedule.optimize(nn.Sequential(MLP(), MLP(nn.ReLU())), X)
    assert report.applied == {}
    tiny, relu = report.select(status="declined")
    assert tiny.rule == "bias_gelu" and tiny.reason.startswith("too small: 48 elements")
    assert relu.rule == "bias_relu" and "saves only the output" in relu.reason


def test_the_cost_guard_lets_large_ones_through() -> None:
    class NewGELU(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))

    report = schedule.optimize(MLP(NewGELU(), width=64), torch.randn(2**12, 64))
    assert report.applied == {"bias_gelu_tanh": 1}


def test_a_model_without_a_construct_is_left_alone_and_says_so() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    report = schedule.optimize(model, X)
    assert report.entries == [] and "nothing was changed" in str(report)
    assert type(model) is nn.Sequential


def test_an_activation_without_bias_is_explained() -> None:
    model = MLP()
    model.fc1 = nn.Linear(8, 16, bias=False)
    (entry,) = schedule.optimize(model, X, cost_guard=False).entries
    assert entry.status == "declined" and "without a bias is one operation already" in entry.reason


class Branching(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.fc(x))
        return y * float(y.detach().numpy().mean())


def test_an_untraceable_module_is_skipped_with_the_reason() -> None:
    model = nn.Sequential(Branching(), MLP())
    report = schedule.optimize(model, X, cost_guard=False)
    assert report.applied == {"bias_gelu": 1}
    skipped = report.select(status="skipped")
    assert {(entry.path, entry.rule) for entry in skipped} == {("0", "bias_activation"), ("0", "gated_mlp")}
    assert all(entry.reason for entry in skipped)
    assert state_of(model[0]) is None


def test_strict_refuses_and_changes_nothing() -> None:
    model = nn.Sequential(Branching(), MLP())
    with pytest.raises(schedule.MatchError, match=r"nothing was changed[\s\S]*0: bias_activation"):
        schedule.optimize(model, X, strict=True, cost_guard=False)
    assert all(state_of(module) is None for module in model.modules())


def test_a_value_used_elsewhere_is_not_fused_away() -> None:
    class Residual(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc1(x)
            return self.fc2(self.act(y) + y)

    model = Residual()
    expected = model(X)
    report = schedule.optimize(model, X, cost_guard=False)
    assert report.applied == {}
    assert torch.equal(model(X), expected)


@pytest.mark.unreplayable("hooks are put on after the schedule is made")
def test_hooks_are_never_swallowed() -> None:
    model, seen = MLP(), []
    model.act.register_forward_hook(lambda module, args, output: seen.append(output))
    schedule.optimize(model, X, cost_guard=False)
    model(X)
    assert len(seen) >= 1
    late = MLP()
    schedule.optimize(late, X, cost_guard=False)
    late.fc1.register_forward_hook(lambda module, args, output: output * 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(late(X), late.fc2.bias.expand(3, 8))


@pytest.mark.unreplayable("an adapter is put on after the schedule is made")
def test_an_adapter_put_on_afterwards_counts() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base, nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.down(x)

    model = MLP()
    report = schedule.optimize(model, X, cost_guard=False)
    model.fc1 = Adapter(model.fc1)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = model(X)
    torch.testing.assert_close(got, model.fc2(F.gelu(model.fc1(X))))
    assert report.fallbacks == {"": 1}
    assert report.to_dict()["fallbacks"] == {"": 1}


@pytest.mark.parametrize("inplace", [True, False])
def test_in_place_activations(inplace: bool) -> None:
    model = MLP(nn.ReLU(inplace=inplace))
    expected = model(X)
    assert schedule.optimize(model, X, cost_guard=False).applied == {"bias_relu": 1}
    torch.testing.assert_close(model(X), expected)


def test_what_is_changed_in_place_and_seen_outside_stays() -> None:
    class Leaking(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.fc1(x)
            return F.relu(y, inplace=True), y

    model = Leaking()
    expected = model(X)
    schedule.optimize(model, X, cost_guard=False)
    for ours, theirs in zip(model(X), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_no_bias_is_not_taken_for_one() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x + self.shift)

    sch = schedule.create_schedule(Shifted(), X)
    report = schedule.optimize(sch, cost_guard=False)
    assert report.applied == {} and "not a bias of 8 features" in report.select("bias_gelu", "skipped")[0].reason
    assert sch.find("bias_gelu") == []


def test_train_and_eval_and_switching() -> None:
    model = build("bert")
    report = schedule.optimize(model, batch("bert"), cost_guard=False)
    twin, inputs = build("bert"), batch("bert", 3, 5)
    with fused.backend("reference"):
        for training in (True, False, True):
            model.train(training), twin.train(training)
            torch.manual_seed(3)
            ours = model(**inputs).loss
            torch.manual_seed(3)
            torch.testing.assert_close(ours, twin(**inputs).loss, rtol=1e-5, atol=1e-6)
    assert report.count("attention_softmax") == 2


# -- a user's own rule ----------------------------------------------------------------------------------------


@pytest.mark.unreplayable("the rule is registered while the test runs only")
def test_a_users_rule_behaves_like_a_built_in_one() -> None:
    @register_rule(name="log_cosh", family="powers", patterns=[lambda x: torch.log(torch.cosh(x))])
    def build_log_cosh(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        return graph.call_function(torch.add, (graph.call_function(F.softplus, (inputs["x"], -2)), inputs["x"]))

    try:
        assert isinstance(build_log_cosh, Rule) and build_log_cosh in schedule.list_rules()

        class LogCosh(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.log(torch.cosh(x))

        sch = schedule.create_schedule(MLP(LogCosh()), X)
        assert len(sch.find("log_cosh", expect=1)) == 1
        assert schedule.optimize(sch, rules="powers").applied == {"log_cosh": 1}
        assert F.softplus in targets(sch)
        with pytest.raises(schedule.VerificationError, match="log_cosh"):  # it is wrong, and that is found
            schedule.verify(sch, X, steps=0)
        with pytest.raises(schedule.MatchError, match="there is a rule 'log_cosh' already"):
            register_rule(build_log_cosh)
    finally:
        unregister_rule("log_cosh")
    with pytest.raises(schedule.MatchError, match="no rule 'log_cosh'"):
        unregister_rule("log_cosh")


# -- bad input ------------------------------------------------------------------------------------------------


def test_no_batch() -> None:
    with pytest.raises(schedule.NotApplicable, match=r"(?s)what is MLP called with.*batch=dict\(x=…\)"):
        schedule.optimize(MLP())


def test_a_batch_that_the_model_refuses() -> None:
    model = MLP()
    with pytest.raises(schedule.NotApplicable, match="refused the example inputs"):
        schedule.optimize(model, torch.ones(2, 3))
    assert type(model) is MLP


def test_an_unknown_rule() -> None:
    with pytest.raises(schedule.MatchError, match=r"no rule or family 'gelu'[\s\S]*bias_gelu"):
        schedule.optimize(MLP(), X, rules="gelu")


def test_not_a_module() -> None:
    with pytest.raises(schedule.ScheduleError, match=r"made of an nn\.Module"):
        schedule.optimize("gpt2", X)  # type: ignore[arg-type]


# -- the report -----------------------------------------------------------------------------------------------


def test_the_report_as_data_and_as_a_table() -> None:
    model = build("gpt2")
    report = schedule.optimize(model, batch("gpt2"), cost_guard=False, measure=True)
    data = json.loads(report.to_json())
    expected = {"attention_softmax": 2, "bias_gelu_tanh": 2, "add_layer_norm": 2, "bias_dropout": 4, "cross_entropy": 1}
    assert data["applied"] == expected
    assert {entry["path"] for entry in data["entries"] if entry["status"] == "applied"} == {
        "",
        *(f"transformer.h.{i}{part}" for i in (0, 1) for part in ("", ".attn", ".mlp")),
    }
    text = str(report)
    assert "transformer.h.*.mlp (2)" in text and "kept for backward" in text


def test_costs_are_counted_and_leave_the_model_alone() -> None:
    model = build("gpt2")
    report = schedule.optimize(model, batch("gpt2"), cost_guard=False)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with fused.backend("reference"):
        before, after = report.measure().values()
    assert 0 < after.saved_bytes < 0.75 * before.saved_bytes
    assert before.dispatched > 100 and after.dispatched > 100
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert state_of(model.transformer.h[0].mlp) is not None


def test_saved_bytes_of_one_activation_by_hand() -> None:
    from schedule.report.costs import measure

    saved = measure(MLP(nn.ReLU()), X).saved_bytes
    x, relu = X.nbytes, 3 * 16 * 4
    # fc1 keeps x, ReLU and fc2 share its output; the loss keeps the model's output, squared or weighted.
    assert x + relu <= saved <= x + relu + 3 * X.nbytes


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = Two(), torch.ones(4, 8)
    report = schedule.optimize(model, x, cost_guard=False)
    assert report.applied == {"bias_gelu": 2}
    with pytest.raises(schedule.NotApplicable, match="meta device"):
        report.measure()
