"""What adapting to a call must never do: a wrong answer, a change around the call, work without end."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import schedule
from schedule.runtime.scheduled import MAX_ADAPTATIONS, FallbackWarning, state_of
from tests.core.adapting.counting import X, adaptations
from tests.small import Mlp, bias_gelu, ids, small


class Kinds(Mlp):
    """Takes a flag of any value."""

    def forward(self, hidden: torch.Tensor, kind: Any = 0) -> torch.Tensor:
        return super().forward(hidden) if kind != "broken" else self.by_data(hidden)

    def by_data(self, hidden: torch.Tensor) -> torch.Tensor:
        """Cannot be traced."""
        return super().forward(hidden) * float(hidden.detach().numpy().shape[0])


def kinds() -> tuple[nn.Module, nn.Module, schedule.Report]:
    torch.manual_seed(0)
    model = Kinds(16)
    twin = copy.deepcopy(model)
    return model, twin, schedule.optimize(model, X, cost_guard=False)


def test_as_many_kinds_as_are_worth_it() -> None:
    model, twin, report = kinds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in range(MAX_ADAPTATIONS + 1):
            torch.testing.assert_close(model(X, kind), twin(X, kind))
    with pytest.warns(FallbackWarning, match="8 other kinds of calls have graphs, and no more are made"):
        torch.testing.assert_close(model(X, kind + 1), twin(X, kind + 1))
    torch.testing.assert_close(model(X, kind + 2), twin(X, kind + 2))
    assert adaptations(model) == MAX_ADAPTATIONS
    assert report.fallbacks == {"": 2}, "0 was recorded, 1 to 8 adapted to"


def test_what_cannot_be_traced_runs_the_original_and_is_tried_once() -> None:
    model, twin, report = kinds()
    with pytest.warns(FallbackWarning, match="No graph was made for it: "):
        got = model(X, "broken")
    assert torch.equal(got, twin(X, "broken")) and torch.equal(model(X, "broken"), twin(X, "broken"))
    assert report.fallbacks == {"": 2} and adaptations(model) == 1 and report.declined.keys() == {""}
    model(X)
    assert report.fallbacks == {"": 2}


@pytest.mark.unwritable("what is put in is defined inside the test")
def test_a_graph_that_is_wrong_is_not_used() -> None:
    """The replacement is right for the recorded dtype only."""

    def wrong(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return bias_gelu(x, bias) * (1 if x.dtype == torch.float32 else 2)

    model, twin = small(), small().double()
    sch = schedule.create_schedule(model, ids())
    sch["blocks.*.mlp"].replace(wrong, sch["blocks.*.mlp"].find(bias_gelu))
    model.eval().double()
    with pytest.warns(FallbackWarning, match="its graph differs from the original forward: it is off by"):
        torch.testing.assert_close(model(**ids()), twin.eval()(**ids()))


def test_arguments_that_do_not_fit_raise_what_they_raised() -> None:
    model, _, _ = kinds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError, match="nonsense"):
            model(X, nonsense=1)
    model(X, 1)
    assert [bool(each.specializations) for each in state_of(model).adaptations] == [False, True]  # type: ignore[union-attr]


def test_a_hook_on_a_submodule_is_not_run_beside_the_call() -> None:
    model, twin, report = kinds()
    seen: list[Any] = []
    model.fc10.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[union-attr]
    for calls in (1, 2):
        torch.testing.assert_close(model(X, 1), twin(X, 1))
        assert len(seen) == calls
    assert adaptations(model) == 1 and not report.declined


def test_graphs_made_while_verifying_are_not_counted() -> None:
    model, _, report = kinds()
    model(X, 1)
    assert report.verify(steps=1).equal
    assert adaptations(model) == 1


@pytest.mark.unreplayable("the test adds a buffer beside the schedule")
def test_nothing_around_the_call_changes() -> None:
    model, _, _ = kinds()
    model.register_buffer("steps", torch.zeros(1))
    model.train()
    model.fc1.eval()  # type: ignore[union-attr]
    state, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    inside = {name: id(value) for module in model.modules() for name, value in vars(module).items()}
    model(X, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == flags
    assert {name: id(value) for module in model.modules() for name, value in vars(module).items()} == inside


def test_gradient_checkpointing() -> None:
    for reentrant in (True, False):
        model, twin, report = kinds()
        x = X.double().requires_grad_()
        grads = []
        for each in (model.double(), twin.double()):
            checkpoint(each, x, use_reentrant=reentrant).square().sum().backward()
            grads.append([x.grad.clone(), *(p.grad for p in each.parameters())])  # type: ignore[union-attr]
            x.grad = None
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert report.fallbacks == {} and adaptations(model) == 1


def test_not_while_tracing() -> None:
    model, twin, report = kinds()
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        assert model(mode.from_tensor(X), 1).shape == X.shape
    torch.testing.assert_close(torch.func.vmap(lambda x: model(x, 1))(X), twin(X, 1))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X, 1), twin(X, 1))
    exported = torch.export.export(model, (X,), {"kind": 1}, strict=False)
    torch.testing.assert_close(exported.module()(X, kind=1), twin(X, 1))
    assert adaptations(model) == 0 and report.fallbacks == {}
    model(X, 1)
    assert adaptations(model) == 1


def test_threads_adapt_once() -> None:
    model, twin, report = kinds()
    found: list[torch.Tensor] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        for kind in range(4):
            found.append(model(X, kind))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and all(torch.allclose(one, twin(X), atol=1e-6) for one in found)
    assert adaptations(model) == 3 and report.fallbacks == {}
