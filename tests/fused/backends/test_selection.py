"""Asking for a backend: contexts, the process default, the environment, and what is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fused
from fused.backends import OPS, Op, availability, backend_registry, requested, selection

PACKAGE = Path(fused.__file__).parent


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    """Undo the fixture that asks for the reference everywhere, and what a test leaves behind."""
    monkeypatch.delenv("FUSED_BACKEND", raising=False)
    monkeypatch.setattr(selection, "_defaults", [])
    token = selection._in_context.set(None)
    availability.forget()
    yield
    availability.forget()
    selection._in_context.reset(token)


@pytest.fixture
def op():
    """An op that tells which backend ran it."""
    calls = []

    def forward(x):
        calls.append("reference")
        return x + 1

    yield Op("test_op", forward=forward, backward=forward), calls
    del OPS["test_op"]


def test_contexts_nest_and_restore():
    assert requested() is None
    with fused.backend("inductor"):
        with fused.backend("reference"):
            assert requested() == "reference"
        assert requested() == "inductor"
        with fused.backend("auto"):
            assert requested() is None
    assert requested() is None


def test_a_plain_call_sets_the_process_default():
    fused.backend("reference")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(requested()))
    thread.start()
    thread.join()
    assert requested() == "reference" and seen == ["reference"]
    with fused.backend("inductor"):
        assert requested() == "inductor"
    assert requested() == "reference"
    fused.backend("auto")
    assert requested() is None


def test_a_context_stays_in_its_thread():
    inlined, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with fused.backend("inductor"):
            inlined.set()
            leave.wait(10)
            seen.append(requested())

    thread = threading.Thread(target=other)
    thread.start()
    inlined.wait(10)
    with fused.backend("reference"):
        leave.set()
        thread.join()
        assert requested() == "reference"
    assert seen == ["inductor"] and requested() is None


def test_a_context_restores_after_an_error():
    with pytest.raises(KeyError), fused.backend("reference"):
        raise KeyError
    assert requested() is None


def test_the_environment_comes_last(monkeypatch):
    monkeypatch.setenv("FUSED_BACKEND", "reference")
    assert requested() == "reference"
    with fused.backend("inductor"):
        assert requested() == "inductor"
    monkeypatch.setenv("FUSED_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"FUSED_BACKEND: .*'cuda'.*reference, inductor, triton"):
        requested()


def test_unknown_backend():
    with pytest.raises(ValueError, match="no backend 'numpy'; the backends are reference"):
        fused.backend("numpy")
    assert requested() is None


def test_the_backward_pass_runs_where_the_forward_pass_was_asked_to(op, monkeypatch):
    from fused.activations import BIAS_ACTIVATION

    asked = []
    run = BIAS_ACTIVATION.run
    monkeypatch.setattr(
        BIAS_ACTIVATION,
        "run",
        lambda part, args, request, **statics: asked.append((part, request)) or run(part, args, None, **statics),
    )
    x = torch.randn(2, 3, requires_grad=True)
    with fused.backend("triton"):
        out = fused.new_gelu(x)
    out.sum().backward()
    assert asked == [("forward", "triton"), ("backward", "triton")]


def test_backends_tells_what_would_run_and_why(monkeypatch, op):
    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: None)
    report = fused.backends("cpu")
    assert set(report) >= {"bias_activation", "masked_softmax", "weighted_squared_relu"}
    assert str(report["masked_softmax"]) == "masked_softmax on cpu: inductor (the default on cpu)"
    with fused.backend("reference"):
        assert fused.backends("cpu")["masked_softmax"].reason == "reference was asked for"
    with fused.backend("triton"):
        choice = fused.backends("cpu")["test_op"]
        assert (choice.backend, choice.reason) == (
            "inductor",
            "not triton: this op has no Triton kernels yet",
        )


def test_without_a_compiler_the_reference_runs_with_one_warning(monkeypatch, op):
    test_op, calls = op
    monkeypatch.setattr(availability.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert "install g++ or clang++" in fused.backends("cpu")["test_op"].reason
    x = torch.ones(2**16)
    with pytest.warns(RuntimeWarning, match=r"not running on inductor: no C\+\+ compiler.*install g\+\+") as seen:
        for _ in range(3):
            assert torch.equal(test_op.run("forward", (x,)), x + 1)
    assert len(seen) == 1 and calls == ["reference"] * 3
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "CXX=/no/such/compiler" in fused.backends("cpu")["test_op"].reason


def test_small_tensors_and_float64_run_uncompiled(monkeypatch, op):
    from fused.backends import inductor

    test_op, calls = op
    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: None)
    monkeypatch.setattr(inductor, "run", lambda formula, args, statics, device: calls.append("inductor") or args[0])
    for x, request, expected in (
        (torch.ones(8), None, "reference"),
        (torch.ones(2**16), None, "inductor"),
        (torch.ones(8), "inductor", "inductor"),
        (torch.ones(2**16, dtype=torch.float64), None, "reference"),
        (torch.ones(2**16), "reference", "reference"),
        (torch.ones(0), "inductor", "reference"),
    ):
        test_op.run("forward", (x,), request)
        assert calls.pop() == expected


def test_each_op_says_what_is_small(monkeypatch, op):
    from fused.activations import BIAS_ACTIVATION
    from fused.backends import inductor

    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: None)
    calls = []
    monkeypatch.setattr(inductor, "run", lambda formula, args, *_: calls.append("inductor") or args[0])
    x = torch.ones(2**9, 2**9)
    for activation, compiled in (("sigmoid", 1), ("gelu_tanh", 1), ("tanh", 0)):
        calls.clear()
        BIAS_ACTIVATION.run("forward", (x, None), None, activation=activation)
        assert len(calls) == compiled
    calls.clear()
    BIAS_ACTIVATION.run("forward", (x[: 2**7], None), None, activation="sigmoid")
    BIAS_ACTIVATION.run("forward", (x[: 2**7], None), None, activation="gelu_tanh")
    assert len(calls) == 1


def test_one_pass_of_torch_is_not_compiled(monkeypatch):
    from fused.backends import inductor

    calls = []
    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: None)
    monkeypatch.setattr(inductor, "run", lambda formula, args, *_: calls.append("inductor") or args[0])
    x = torch.ones(2**10, 2**10)
    for activation, compiled in (("relu", 0), ("silu", 0), ("sigmoid", 0), ("gelu", 1), ("tanh", 1), ("relu2", 1)):
        calls.clear()
        fused.bias_activation(x, None, activation)
        assert len(calls) == compiled
        fused.bias_activation(x, torch.ones(2**10), activation)
        assert len(calls) == compiled + 1


def test_what_compiled_code_leaves_to_plain_torch(op, monkeypatch):
    test_op, _ = op
    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: None)
    monkeypatch.setattr("fused.backends.inductor.run", lambda formula, args, statics, device: formula(*args))
    test_op.register(
        "inductor", forward=torch.neg, backward=torch.neg, finish_forward=lambda results, args: results.sum()
    )
    assert test_op.run("forward", (torch.ones(3),), "inductor") == -3
    assert torch.equal(test_op.run("backward", (torch.ones(3),), "inductor"), -torch.ones(3))


def test_registered_kernels_run_and_may_decline(monkeypatch, op):
    test_op, calls = op
    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: None)

    def kernel(x):
        calls.append("triton")
        return NotImplemented if x.ndim == 1 else x + 1

    test_op.register("triton", forward=kernel, backward=kernel)
    monkeypatch.setattr("fused.backends.inductor.run", lambda formula, args, statics, device: formula(*args))
    test_op.run("forward", (torch.ones(2, 2),), "triton")
    assert calls == ["triton"]
    test_op.run("forward", (torch.ones(2),), "triton")
    assert calls == ["triton", "triton", "reference"]


def test_two_ops_of_one_name(op):
    with pytest.raises(ValueError, match="'test_op' already"):
        Op("test_op", forward=torch.neg, backward=torch.neg)


def test_missing_triton_is_said_once(monkeypatch, op):
    test_op, calls = op
    monkeypatch.setitem(backend_registry.PREFERENCE, "cpu", ("reference",))
    with pytest.warns(RuntimeWarning, match="not running on triton: this op") as seen:
        test_op.run("forward", (torch.ones(2),), "triton")
        test_op.run("forward", (torch.ones(2),), "triton")
    assert len(seen) == 1 and calls == ["reference", "reference"]


def test_fused_stands_alone():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "schedule" for name in names), path
    code = "import sys, fused; assert 'schedule' not in sys.modules and 'torch._inductor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_every_public_name_is_there_and_documented():
    for name in fused.__all__:
        assert getattr(fused, name).__doc__, name
