"""Compilation of a formula to a CPU kernel: traced by `make_fx`, compiled by inductor, split up for saving on disk."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fused.backends import kernel_store
from fused.backends.kernel_store import Kernel, Stored, fitting
from fused.backends.tracing import for_the_compiler
from fused.torch_internals.compiler import INDUCTOR, compile_fx, compile_fx_inner, without_graph_cache
from fused.torch_internals.tensor_kinds import FakeTensor, FakeTensorMode

Tensor = torch.Tensor

_UNFINISHED = re.compile(r"(?P<library>/.*\.so): (file too short|invalid ELF header)")
"""What the loader of Linux says of a library that is not whole."""


class _NotStorable(Exception):
    """Raised if inductor's output is more than libraries and a few lines of Python."""


def compiled(
    formula: Callable[..., Any], inputs: Sequence[Any], statics: Mapping[str, Hashable], folder: Path | None
) -> Kernel:
    """Compile a kernel for ``formula(*inputs, **statics)``, and save it in ``folder`` if possible.

    A kernel is saved if its stored form gives the same bits as inductor's own callable.

    Raises:
        Exception: any error of tracing or compiling.
    """
    kernel_store.cache()  # the compiler loads what it finds there
    tensors = [arg for arg in inputs if arg is not None]
    with torch.inference_mode(False), torch.no_grad():
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)
        fakes = [_symbolic(tensor, mode) for tensor in tensors]
        graph, results, single = _traced(formula, inputs, statics, fakes)
        made: list[Any] = []

        def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            made.append(compile_fx_inner(graph, inputs, **options))
            return made[-1]

        with without_graph_cache():
            run: Any = _with_whole_libraries(lambda: compile_fx(graph, fakes, inner_compile=inner))
    guard = _guard(shapes, fakes)

    theirs = Kernel(lambda tensors: run(*tensors), fitting(guard), results, single)
    if folder is None or len(made) != 1:
        return theirs
    try:
        source, libraries = _parts(made[0])
        stored = Stored(source, libraries, guard, results, single)
        ours = stored.kernel()
        written = {index for index, fake in enumerate(fakes) if fake._version}
        if not _same(ours, theirs, tensors, written):
            return theirs
    except Exception:  # another version of torch writes other code: then run inductor's own callable
        return theirs
    kernel_store.save(folder, stored)
    return ours


def _with_whole_libraries(compiling: Callable[[], Any]) -> Any:
    """Call ``compiling``, and once more without what a killed process left unfinished in torch's cache."""
    try:
        return compiling()
    except (ImportError, OSError, RuntimeError) as error:
        found = _UNFINISHED.search(str(error))
        if found is None:
            raise
        Path(found["library"]).unlink(missing_ok=True)
        return compiling()


def _symbolic(tensor: Tensor, mode: FakeTensorMode) -> FakeTensor:
    """Return a fake contiguous tensor with symbols for sizes from 2 on, the same symbol for equal sizes."""
    sizes = [DimDynamic.DUCK if size > 1 else DimDynamic.STATIC for size in tensor.shape]
    blank = torch.empty(tensor.shape, dtype=tensor.dtype)
    return mode.from_tensor(blank, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _traced(
    formula: Callable[..., Any], inputs: Sequence[Any], statics: Mapping[str, Hashable], fakes: Sequence[FakeTensor]
) -> tuple[fx.GraphModule, tuple[int | None, ...], bool]:
    """Trace the formula, and return the graph, the index of each result, and whether it returns one tensor."""
    results: list[int | None] = []
    single = False

    def computing(*tensors: Tensor) -> list[Tensor]:
        nonlocal single
        given = iter(tensors)
        output = formula(*(None if arg is None else next(given) for arg in inputs), **statics)
        single = isinstance(output, torch.Tensor)
        computed: list[Tensor] = []
        results.clear()
        for result in (output,) if single else output:
            same = [index for index, tensor in enumerate(tensors) if tensor is result]
            if result is None or same:
                results.append(-1 - same[0] if same else None)
            else:
                results.append(len(computed))
                computed.append(result)
        return computed

    with for_the_compiler():
        graph = make_fx(computing, tracing_mode="symbolic")(*fakes)
    return graph, tuple(results), single


def _guard(shapes: ShapeEnv, fakes: Sequence[FakeTensor]) -> str:
    """Return the guard expression on the flat list of the sizes of all tensors."""
    sizes = [size for fake in fakes for size in fake.shape]
    symbols = [index for index, size in enumerate(sizes) if isinstance(size, torch.SymInt)]
    guard = shapes.produce_guards_expression([sizes[index] for index in symbols], ignore_static=False) or "True"  # type: ignore[misc]
    positions = {f"L['t{position}']": f"t[{index}]" for position, index in enumerate(symbols)}
    for old in sorted(positions, key=len, reverse=True):
        guard = guard.replace(old, positions[old])
    return guard


_IN_MODULE = (ast.Import, ast.ImportFrom, ast.Assign, ast.ClassDef, ast.FunctionDef)
_NOT_NEEDED = ("get_args", "benchmark_compiled_module")


def _parts(made: Any) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return inductor's Python source without imports of inductor, and the libraries called by it with digests.

    Raises:
        _Unkept: if the output is not of this form.
    """
    call = getattr(made, "current_callable", None)
    names = getattr(getattr(call, "__func__", call), "__globals__", None)
    if names is None or getattr(made, "constants", None):
        raise _NotStorable
    statements: list[ast.stmt] = []
    libraries: dict[str, tuple[str, str]] = {}
    for statement in ast.parse(made.source_code).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(INDUCTOR):
            continue
        if "async_compile" in {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}:
            if isinstance(statement, ast.Assign) and statement.targets[0].id != "async_compile":  # type: ignore[attr-defined]
                name: str = statement.targets[0].id  # type: ignore[attr-defined]
                libraries[name] = _library(names[name])
            continue
        if isinstance(statement, _IN_MODULE) and getattr(statement, "name", "") not in _NOT_NEEDED:
            statements.append(statement)
    return ast.unparse(ast.Module(statements, [])), libraries


def _library(kernel: Any) -> tuple[str, str]:
    """Return the path of a kernel's library, relative to the cache, and its digest."""
    path = Path(getattr(getattr(kernel, "__self__", None), "__file__", None) or "").resolve()
    try:
        return str(path.relative_to(kernel_store.cache().resolve())), kernel_store.digest(path.read_bytes())
    except ValueError:
        raise _NotStorable from None


def _same(ours: Kernel, theirs: Kernel, tensors: Sequence[Tensor], written: set[int]) -> bool:
    """Check whether both kernels give the same bits and strides, and write the same into their inputs."""
    outputs = []
    for kernel in (ours, theirs):
        given = [tensor.clone() if index in written else tensor for index, tensor in enumerate(tensors)]
        results = kernel(given)
        outputs.append([*((results,) if kernel.single else results), *(given[index] for index in sorted(written))])
    return all(
        a is b if a is None or b is None else a.stride() == b.stride() and torch.equal(_bits(a), _bits(b))
        for a, b in zip(*outputs, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
