"""Kernels on the CPU: which one fits, what is kept on disk, and that what is loaded from there is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import fused
from fused.backends import kernel_compiler, kernel_store, kernels
from fused.backends.backend_registry import OPS
from fused.backends.compiled import bias_activation
from fused.backends.reference import norms
from fused.backends.reference.numbers import rounded_to
from fused.backends.tracing import for_the_compiler, is_compiled

pytestmark = pytest.mark.usefixtures("warm_inductor")

STATICS = {"activation": "gelu_tanh"}


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has just begun."""
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_by_sizes", {})


def computed(formula, *inputs, **statics):
    return kernels.kernel_for(formula, inputs, statics)(inputs)


@pytest.fixture
def folders(monkeypatch):
    """The folders that were asked for, in order."""
    asked, folder = [], kernel_store.folder

    def remembering(formula, kind):
        asked.append(folder(formula, kind))
        return asked[-1]

    monkeypatch.setattr(kernel_store, "folder", remembering)
    return asked


def test_a_second_process_needs_no_compiler():
    x = torch.randn(6, 33, requires_grad=True)
    with fused.backend("inductor"):
        fused.bias_gelu(x, torch.ones(33)).sum().backward()
    code = """
        import sys, torch, fused
        torch.set_num_threads(1)
        x = torch.randn(6, 33, requires_grad=True)
        with fused.backend("inductor"):
            y = fused.bias_gelu(x, torch.ones(33))
        y.sum().backward()
        gradient, x.grad = x.grad, None
        z = torch.nn.functional.gelu(x + 1, approximate="tanh")
        z.sum().backward()
        torch.testing.assert_close((y, gradient), (z, x.grad))
        assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was imported"
    """
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the message is that of Linux")
def test_what_a_killed_process_left_unfinished_is_compiled_anew(tmp_path):
    code = """
        import torch, fused
        with fused.backend("inductor"):
            y = fused.bias_gelu(torch.ones(6, 33), torch.ones(33))
        torch.testing.assert_close(y, torch.nn.functional.gelu(torch.full((6, 33), 2.0), approximate="tanh"))
    """
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run(command, env=environment, check=True, timeout=240)
    libraries = list(tmp_path.rglob("*.main.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(b"")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(library.stat().st_size for library in libraries)


def test_the_formulas_of_every_op_are_kept():
    formulas = [part for op in OPS.values() for part in (op.forward, op.backward)]
    formulas += [part for op in OPS.values() for part in op.implementations.get("inductor", {}).values()]
    ours = [formula for formula in formulas if formula.__module__.startswith("fused.")]
    assert len(ours) >= 16
    assert all(kernel_store.folder(formula, ()) is not None for formula in ours)


def test_nothing_is_kept_where_caches_are_forbidden(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    assert kernel_store.folder(bias_activation, ()) is None


def test_other_formulas_are_not_kept(fresh):
    def twice(x):
        return x * 2

    x = torch.randn(4, 8)
    assert kernel_store.folder(twice, ()) is None and kernel_store.folder(torch.neg, ()) is None
    assert kernel_store.folder(bias_activation, (object(),)) is None
    assert torch.equal(computed(twice, x), x * 2)


def test_a_size_that_a_formula_asks_for_is_guarded(fresh):
    def asking(x):
        return x + 1 if x.shape[0] == 16 else x - 1 if x.shape[1] % 4 == 0 else x * 3

    for shape, expected in (((16, 5), 1), ((17, 8), -1), ((17, 9), None), ((16, 8), 1), ((18, 12), -1), ((3, 7), None)):
        x = torch.randn(shape)
        assert torch.equal(computed(asking, x), x * 3 if expected is None else x + expected)
    assert [len(known) for known in kernels._kernels.values()] == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_for_one_block_of_rows_serves_no_more_of_them(fresh, dtype):
    """Inductor's own cache takes the code for one block for the same graph of many."""
    given = {"casting": "torch", "needs": (True, True)}
    for rows in (15, 44, 8, 276, 24):
        g, x = torch.randn(2, rows, 49).to(dtype)
        rstd = x.float().square().mean(-1, keepdim=True).rsqrt()
        _, total = computed(norms.rms_norm_backward, g, None, x, torch.ones(49), rstd, **given)
        torch.testing.assert_close(total, (g.float() * x.float() * rstd).sum(0), msg=f"{rows} rows")


def test_sizes_that_happen_to_be_equal_are_guarded(fresh, monkeypatch):
    monkeypatch.setattr(kernel_store, "load", lambda folder, sizes: None)
    for shape in ((7, 7), (7, 9), (1, 7), (9, 7)):
        x, bias = torch.randn(shape), torch.randn(shape[-1])
        expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
        torch.testing.assert_close(computed(bias_activation, x, bias, **STATICS), expected)
    assert sorted(len(known) for known in kernels._kernels.values()) == [1, 2]


def test_sizes_are_remembered_up_to_a_limit(fresh, monkeypatch):
    monkeypatch.setattr(kernels, "_MAX_SIZES", 2)
    for rows in (5, 6, 7, 9, 10):
        x = torch.randn(rows, 3)
        assert torch.equal(computed(torch.neg, x), -x)
        assert len(kernels._by_sizes) <= 2


def test_an_input_that_is_written_to_is_the_result():
    logits, labels = torch.randn(6, 40, requires_grad=True), torch.randint(0, 40, (6,))
    with fused.backend("inductor"):
        given = logits.detach().clone().requires_grad_()
        fused.cross_entropy(given * 1, labels, inplace_backward=True).backward()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    torch.testing.assert_close(given.grad, logits.grad)


def test_numbers_of_any_kind_and_tensors_whose_negation_is_put_off(fresh):
    x = torch.randn(6, 40)
    with fused.backend("inductor"):
        for scale in (2, 2.0, True):
            torch.testing.assert_close(fused.scaled_masked_softmax(x, None, scale), torch.softmax(x * scale, -1))
        torch.testing.assert_close(fused.quick_gelu(torch._neg_view(x)), -x * torch.sigmoid(-1.702 * x))


def test_what_is_not_whole_is_compiled_anew(fresh, folders, monkeypatch, tmp_path):
    x, bias = torch.randn(6, 35), torch.randn(35)
    monkeypatch.setattr(kernel_store, "machine", lambda: tmp_path.name)  # a folder of its own
    computed(bias_activation, x, bias, **STATICS)
    (folder,) = folders
    (file,) = folder.glob("*.json")
    whole = file.read_text()
    values = json.loads(whole)
    gone = {**values, "libraries": {name: "no/such/library.so" for name in values["libraries"]}}
    strange = {**values, "source": "call = ("}
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    for text in ("", "{", "[]", json.dumps(gone), json.dumps(strange)):
        file.write_text(text)
        kernels._kernels.clear(), kernels._by_sizes.clear()
        assert kernel_store.load(folder, (6, 35, 35)) is None
        torch.testing.assert_close(computed(bias_activation, x, bias, **STATICS), expected)
        assert file.read_text() == whole
    shutil.rmtree(folder.parent)


def test_what_gives_other_bits_is_not_kept(fresh, monkeypatch):
    parts = kernel_compiler._parts

    def wrong(made):
        source, libraries = parts(made)
        return source + "\nright = call\ncall = lambda tensors: [right(tensors)[0] + 1e-7]\n", libraries

    monkeypatch.setattr(kernel_compiler, "_parts", wrong)
    saved = []
    monkeypatch.setattr(kernel_store, "save", lambda folder, stored: saved.append(stored))
    monkeypatch.setattr(kernel_store, "load", lambda folder, sizes: None)
    x, bias = torch.randn(6, 37), torch.randn(37)
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    torch.testing.assert_close(computed(bias_activation, x, bias, **STATICS), expected, rtol=0, atol=0.0 + 2e-6)
    assert not saved
    monkeypatch.setattr(kernel_compiler, "_parts", parts)
    kernels._kernels.clear(), kernels._by_sizes.clear()
    computed(bias_activation, x, bias, **STATICS)
    assert len(saved) == 1


def test_a_folder_is_of_one_kind_and_order_of_magnitude(fresh, folders):
    def folder(x, bias, activation="gelu_tanh"):
        kernels._kernels.clear(), kernels._by_sizes.clear()
        computed(bias_activation, x, bias, activation=activation)
        return folders[-1]

    x, bias = torch.ones(40, 33), torch.ones(33)
    usual = folder(x, bias)
    assert usual == folder(torch.ones(63, 50), torch.ones(50)) == folder(torch.ones(2, 33), bias)
    others = {
        folder(x, None),
        folder(torch.ones(1000, 33), bias),
        folder(torch.ones(1, 33), bias),
        folder(x.bfloat16(), bias),
        folder(x, bias, activation="gelu"),
    }
    torch.set_default_dtype(torch.float64)
    try:
        others.add(folder(x, bias))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(others) == 6 and usual not in others


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    stored = kernel_store.Stored("call = list", {}, "True", (0,), True)
    kernel_store.save(tmp_path / "file" / "folder", stored)
    kernel_store.save(tmp_path / "folder", stored)
    kernel = kernel_store.load(tmp_path / "folder", (1,))
    assert kernel([torch.ones(1)]) == torch.ones(1)


def test_formulas_know_that_they_are_compiled_in_this_thread_alone():
    seen = []
    with for_the_compiler():
        assert is_compiled()
        other = threading.Thread(target=lambda: seen.append(is_compiled()))
        other.start()
        other.join()
    assert seen == [False] and not is_compiled()
    p = torch.rand(1000)
    assert torch.equal(computed(rounded_to, p, dtype=torch.bfloat16), rounded_to(p, torch.bfloat16))


def test_code_of_another_form_runs_as_the_compiler_made_it(fresh, monkeypatch):
    def unknown(made):
        raise AttributeError("source_code")

    monkeypatch.setattr(kernel_compiler, "_parts", unknown)
    monkeypatch.setattr(kernel_store, "load", lambda folder, sizes: None)
    monkeypatch.setattr(kernel_store, "save", lambda folder, stored: pytest.fail("nothing can be kept"))
    x, bias = torch.randn(6, 39), torch.randn(39)
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    torch.testing.assert_close(computed(bias_activation, x, bias, **STATICS), expected)
