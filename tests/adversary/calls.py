"""Ways to call a model: sizes, strides, modes, transforms, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.adversary.cases import Batch, Call, World


def gradients(model: nn.Module, output: Any, batch: Batch) -> dict[str, Any]:
    """Backward from all of ``output``; the gradients of parameters and inputs, which are cleared."""
    total: Any = 0.0
    for index, tensor in enumerate(_float_tensors(output)):
        if tensor.requires_grad:
            total = total + (tensor.double() * (1 + index)).square().mean()
    if isinstance(total, torch.Tensor):
        total.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = {name: tensor.grad for name, tensor in {**named, **inputs}.items()}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


def _float_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _float_tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _float_tensors(each)


def clear(model: nn.Module, batch: Batch) -> None:
    """Remove all gradients."""
    for tensor in [*model.parameters(), *(each for each in batch.values() if isinstance(each, torch.Tensor))]:
        if tensor.is_leaf:
            tensor.grad = None


def step(model: nn.Module, batch: Batch, world: World) -> Any:
    """Forward and backward."""
    clear(model, batch)
    output = model(**batch)
    found = gradients(model, output, batch)
    clear(model, batch)
    return output, found


def trained(model: nn.Module, batch: Batch, world: World) -> Any:
    """Two steps of SGD, then a forward without gradients."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    seen = []
    if parameters:
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        for _ in range(2):
            seen.append(step_of(model, batch))
            optimizer.step()
    clear(model, batch)
    with torch.no_grad():
        return seen, model(**batch)


def step_of(model: nn.Module, batch: Batch) -> Any:
    """Backward of one forward, leaving the gradients of parameters in place."""
    clear(model, batch)
    output = model(**batch)
    return output, gradients(model, output, batch)


STEP = Call("step", step)
TRAINED = Call("trained", trained)
USUAL: Sequence[Call] = (STEP, TRAINED)


# -- modes ----------------------------------------------------------------------------------------------------------


def _within(
    name: str, mode: Callable[[], AbstractContextManager[Any]], backward: bool = True, tolerance: float = 0.0
) -> Call:
    def run(model: nn.Module, batch: Batch, world: World) -> Any:
        clear(model, batch)
        with mode():
            output = model(**batch)
        if not backward:
            return output
        found = gradients(model, output, batch)
        clear(model, batch)
        return output, found

    return Call(name, run, tolerance=tolerance)


class _Idle(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Doubling(TorchFunctionMode):
    """A mode that changes what GELU computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.gelu else result


def _eval(model: nn.Module, batch: Batch, world: World) -> Any:
    model.eval()
    return step(model, batch, world)


def _eval_train(model: nn.Module, batch: Batch, world: World) -> Any:
    first = _eval(model, batch, world)
    model.train()
    return first, step(model, batch, world)


def _anomaly() -> AbstractContextManager[Any]:
    return torch.autograd.detect_anomaly(check_nan=False)


def _saved_hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


# -- inputs ---------------------------------------------------------------------------------------------------------

Change = Callable[[torch.Tensor], torch.Tensor]


def _given(name: str, change: Change, grad: bool = True, sizes: tuple[int, ...] = ()) -> Call:
    """A call with every floating tensor of the batch changed."""

    def run(model: nn.Module, batch: Batch, world: World) -> Any:
        given: Batch = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value = change(value.detach()).requires_grad_(grad)
            given[key] = value
        return step(model, given, world)

    return Call(name, run, sizes)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1).detach()


def _twice(model: nn.Module, batch: Batch, world: World) -> Any:
    """Backward twice through one graph, and of the gradients."""
    clear(model, batch)
    output = next(_float_tensors(model(**batch)))
    wanted = [
        each for each in [*model.parameters(), *batch.values()] if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    first = torch.autograd.grad(output.square().mean(), wanted, create_graph=True, allow_unused=True)
    total = sum((each.square().sum() for each in first if each is not None), torch.zeros(()))
    second = torch.autograd.grad(total, wanted, allow_unused=True)
    return output, first, second


def _retained(model: nn.Module, batch: Batch, world: World) -> Any:
    clear(model, batch)
    output = next(_float_tensors(model(**batch)))
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    return output, {name: each.grad for name, each in model.named_parameters()}


def _jvp(model: nn.Module, batch: Batch, world: World) -> Any:
    name, x = next((name, value) for name, value in batch.items() if isinstance(value, torch.Tensor))
    rest = {key: value for key, value in batch.items() if key != name}
    x = x.detach()
    return torch.func.jvp(
        lambda given: next(_float_tensors(model(**{name: given}, **rest))), (x,), (torch.ones_like(x),)
    )


def _grad_by_func(model: nn.Module, batch: Batch, world: World) -> Any:
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(given: Any) -> torch.Tensor:
        return next(_float_tensors(torch.func.functional_call(model, given, (), batch))).square().mean()

    return torch.func.grad(loss)(parameters)


def _functional(model: nn.Module, batch: Batch, world: World) -> Any:
    other = {name: each.detach() * 1.5 for name, each in model.named_parameters()}
    return torch.func.functional_call(model, other, (), batch)


def _vmapped(model: nn.Module, batch: Batch, world: World) -> Any:
    x = batch["x"].detach()
    model.eval()
    return torch.func.vmap(lambda each: model(x=each))(torch.stack([x, x * 2]))


def _checkpointed(reentrant: bool) -> Any:
    def run(model: nn.Module, batch: Batch, world: World) -> Any:
        clear(model, batch)
        names = list(batch)

        def forward(*values: Any) -> Any:
            return next(_float_tensors(model(**dict(zip(names, values, strict=True)))))

        output = checkpoint(forward, *batch.values(), use_reentrant=reentrant)
        found = gradients(model, output, batch)
        clear(model, batch)
        return output, found

    return run


def _threads(model: nn.Module, batch: Batch, world: World) -> Any:
    """Two threads call at once; in evaluation, since random numbers would come in any order."""
    model.eval()
    results: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        try:
            barrier.wait()
            results[index] = model(**batch)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _positional(model: nn.Module, batch: Batch, world: World) -> Any:
    return model(*batch.values())


def _surplus(model: nn.Module, batch: Batch, world: World) -> Any:
    return model(**batch, surplus=1)


def _nothing(model: nn.Module, batch: Batch, world: World) -> Any:
    return model()


def _none(model: nn.Module, batch: Batch, world: World) -> Any:
    return model(**dict.fromkeys(batch))


def _output_changed(model: nn.Module, batch: Batch, world: World) -> Any:
    """Write into the output, and call again."""
    with torch.no_grad():
        output = next(_float_tensors(model(**batch)))
        output.add_(1.0)
        return output, model(**batch)


def _accumulated(model: nn.Module, batch: Batch, world: World) -> Any:
    clear(model, batch)
    for _ in range(2):
        next(_float_tensors(model(**batch))).sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def _part_of_graph(model: nn.Module, batch: Batch, world: World) -> Any:
    """Inputs that are no leaves, and outputs that are used twice."""
    clear(model, batch)
    given = {k: v * 2 if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    output = model(**given)
    found = gradients(model, [output, output], batch)
    clear(model, batch)
    return output, found


class _Wrapped(torch.Tensor):
    """A subclass that does nothing."""


def _subclass(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(_Wrapped)


ANY: tuple[Call, ...] = (
    Call("eval", _eval),
    Call("eval then train", _eval_train),
    _within("no_grad", torch.no_grad, backward=False),
    _within("inference_mode", torch.inference_mode, backward=False),
    _within("autocast bf16", lambda: torch.autocast("cpu", torch.bfloat16), tolerance=0.15),
    _within("autocast off", lambda: torch.autocast("cpu", enabled=False)),
    _within("anomaly", _anomaly),
    _within("saved tensors hooks", _saved_hooks),
    _within("idle function mode", _Idle),
    Call("one row", step, (1, 5)),
    Call("length one", step, (2, 1)),
    Call("one by one", step, (1, 1)),
    Call("square", step, (5, 5)),
    Call("as wide", step, (8, 8)),
    Call("other sizes", step, (3, 6)),
    Call("backward twice", _retained),
    Call("double backward", _twice),
    Call("accumulated", _accumulated),
    Call("functional_call", _functional),
    Call("grad by torch.func", _grad_by_func),
    Call("checkpoint", _checkpointed(False)),
    Call("threads", _threads),
    Call("positional", _positional),
    Call("surplus argument", _surplus),
    Call("no argument", _nothing),
    Call("None for all", _none),
    Call("output changed in place", _output_changed),
    Call("part of a graph", _part_of_graph),
)
"""Calls for any model."""

FLOATING: tuple[Call, ...] = (
    _within("doubling function mode", _Doubling),
    Call("jvp", _jvp),
    Call("vmap", _vmapped),
    Call("checkpoint, reentrant", _checkpointed(True)),
    _given("strided", _strided),
    _given("expanded", lambda x: x[:1].expand(3, -1, -1)),
    _given("sliced", lambda x: torch.cat([x, x], -1)[..., :8]),
    _given("no gradient", lambda x: x, grad=False),
    _given("double", lambda x: x.double()),
    _given("bfloat16", lambda x: x.bfloat16()),
    _given("two dimensions", lambda x: x[0]),
    _given("four dimensions", lambda x: x[None]),
    _given("no rows", lambda x: x[:0]),
    _given("too wide", lambda x: torch.cat([x, x], -1)),
    _given("a parameter", lambda x: nn.Parameter(x)),
    _given("a subclass", _subclass),
    _given("nan", lambda x: x * float("nan")),
    _given("huge", lambda x: x * 1e30),
    _given("zeros", lambda x: x * 0),
    _given("integers", lambda x: x.long(), grad=False),
    _given("complex", lambda x: x.to(torch.complex64)),
)
"""Calls for models of one floating input ``x``: [rows, length, 8]."""
