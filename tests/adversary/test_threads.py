"""Threads that adapt, schedule and run models at once: each gets what it would get alone, and nothing stays patched."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import schedule
from schedule.runtime.classes import scheduled_class
from schedule.runtime.scheduled import state_of
from tests.small import Block, ids, small
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
TIMES = 10
HIDDEN = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
PATCHED = (
    (torch.autograd.Function, "apply"),
    (nn.Module, "__call__"),
    (nn.Module, "to"),
    (nn.functional, "scaled_dot_product_attention"),
    (torch.autocast, "__enter__"),
    (torch.autocast, "__exit__"),
    (torch.jit.ScriptFunction, "__call__"),
    (hf.DynamicCache, "__init__"),
)


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """Change threads often, and see that tracing leaves nothing patched."""
    interval = sys.getswitchinterval()
    before = [vars(owner)[name] for owner, name in PATCHED]
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
    left = [
        f"{owner.__name__}.{name}"
        for (owner, name), was in zip(PATCHED, before, strict=True)
        if vars(owner)[name] is not was
    ]
    assert not left, f"left patched: {left}"


def at_once(*runs: Callable[[], Any]) -> list[Any]:
    """What each gives, all begun at a barrier."""
    barrier, results, errors = threading.Barrier(len(runs)), [None] * len(runs), []

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = runs[index]()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert not errors, "\n".join(errors)
    return results


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block(16).eval()


def optimized(model: nn.Module) -> nn.Module:
    schedule.optimize(model, HIDDEN, cost_guard=False)
    return model


def scheduled() -> nn.Module:
    return optimized(block())


def autocast(model: nn.Module) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out: torch.Tensor = model(HIDDEN)
    return out


def masked(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(HIDDEN, mask=torch.zeros(5, 5))
    return out


def adapted(model: nn.Module) -> int:
    return sum(bool(each.specializations) for m in model.modules() if (s := state_of(m)) for each in s.adaptations)


@pytest.mark.parametrize("same", [True, False], ids=["one model", "two models"])
def test_first_calls_adapt_at_once(same: bool) -> None:
    alone = scheduled()
    expected = [autocast(alone), masked(alone)]
    for _ in range(TIMES):
        first = scheduled()
        second = first if same else scheduled()
        found = at_once(lambda one=first: autocast(one), lambda other=second: masked(other))
        assert all(map(torch.equal, found, expected))
        assert adapted(first) and adapted(second)


def test_one_adapts_while_others_are_scheduled() -> None:
    alone = scheduled()
    expected = [autocast(alone), alone(HIDDEN)]
    for _ in range(TIMES):
        model, *others = scheduled(), block(), block()
        runs = [lambda one=one: optimized(one)(HIDDEN) for one in others]
        found = at_once(lambda one=model: autocast(one), *runs)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[1])


def trained(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model(HIDDEN).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_one_is_traced_while_others_train() -> None:
    """Training sees nothing of a trace in another thread, untouched or scheduled: the same bits as alone."""
    expected = [trained(block()), trained(scheduled())]
    output = scheduled()(HIDDEN)
    for _ in range(5):
        untouched, model, other = block(), scheduled(), block()
        found = at_once(
            lambda one=untouched: trained(one),
            lambda one=model: trained(one),
            lambda one=other: optimized(one)(HIDDEN),
        )
        for run, alone in zip(found[:2], expected, strict=True):
            assert all(map(torch.equal, run, alone))
        assert torch.equal(found[2], output)


def test_models_are_scheduled_at_once() -> None:
    def made(model: nn.Module) -> tuple[int, list[str]]:
        report = schedule.optimize(model, ids(), cost_guard=False)
        return len(report.applied), [path for path, module in model.named_modules() if state_of(module) is not None]

    expected = made(small())
    for _ in range(5):
        assert at_once(*(lambda one=one: made(one) for one in (small(), small()))) == [expected, expected]


def test_there_is_one_generated_class() -> None:
    for _ in range(TIMES):
        made = type("Made", (nn.Linear,), {})
        first, second = at_once(lambda cls=made: scheduled_class(cls), lambda cls=made: scheduled_class(cls))
        assert first is second


def test_models_with_caches_are_scheduled_while_another_generates() -> None:
    inputs = batch("gpt2")
    prompt = inputs["input_ids"][:, :3]
    serving, twin = build("gpt2").eval(), build("gpt2").eval()
    schedule.optimize(serving, inputs, rules="all", cost_guard=False)

    def generated(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return out

    def optimized_model() -> int:
        return len(schedule.optimize(build("gpt2"), inputs, cost_guard=False).applied)

    expected, applied = generated(twin), optimized_model()
    for _ in range(2):
        found = at_once(lambda: generated(serving), optimized_model, optimized_model)
        assert torch.equal(found[0], expected)
        assert found[1:] == [applied, applied]
