"""Recognition of experts by their parameters, inputs and results, not by their class or names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from schedule.capture import Call, TensorSpec, leaves, original_class
from schedule.distributed.tensor_parallel.experts import Experts, alone, combined
from schedule.distributed.tensor_parallel.sharded_modules import is_torch_layer
from schedule.util.errors import ShardError
from schedule.util.generators import generators_restored
from schedule.util.user_code import UserCodeError, user_code

_NOT_EXPERTS = "the module that takes [tokens, hidden], and the indices and weights of their experts, [tokens, k]"


def experts_of(module: nn.Module, calls: Sequence[Call], ranks: int) -> Experts:
    """Return the description of ``module`` as experts to be shared by ``ranks`` ranks.

    The class's forward is run on a few random tokens, with all experts together and with each rank's apart. Experts on
    the meta device get random weights for it, two experts on each of two ranks.

    Args:
        module: the module, with whole parameters.
        calls: its calls in the recorded run.
        ranks: the number of ranks.

    Raises:
        ShardError: it is not a module of experts, or their number is not divisible by ``ranks``.
    """
    count = _count(module)
    trial = _trial(module, calls)
    if count % ranks:
        raise ShardError(
            f"{count} experts cannot be shared evenly by {ranks} ranks",
            fix=f'a mesh with "ep" times "tp" a divisor of {count}',
        )
    parameters = {name: each.detach() for name, each in module._parameters.items() if each is not None}
    counters = [name for name, value in vars(module).items() if type(value) is int and value == count]
    experts = Experts(count, *trial.names)
    if any(each.is_meta for each in parameters.values()):
        ranks, few = 2, 4
        parameters = {name: torch.randn(few, *each.shape[1:], dtype=each.dtype) for name, each in parameters.items()}
    with torch.no_grad(), generators_restored(module):
        for some in _subsets(counters):
            found = replace(experts, counters=some)
            if _computed_alike(trial, found, parameters, ranks):
                return found
    raise ShardError(
        f"a {original_class(module).__name__} does not return the weighted sum of what each expert computes alone",
        fix="leave it whole, or shard its parameters along their width",
    )


def has_experts(module: nn.Module) -> bool:
    """Return whether ``module`` is no layer of torch's and all its parameters have one leading size in common."""
    own = [each for each in module._parameters.values() if each is not None]
    sizes = {each.shape[:1] for each in own}
    return len(sizes) == 1 and max(each.ndim for each in own) >= 3 and not is_torch_layer(module)


def _count(module: nn.Module) -> int:
    """Return the number of experts."""
    if not has_experts(module):
        raise ShardError(
            f"a {original_class(module).__name__} has no parameters with one leading dimension of experts, such as "
            "[experts, out, in]",
            fix=f"name {_NOT_EXPERTS}",
        )
    below = [name for name, _ in module.named_parameters() if name not in module._parameters]
    if below:
        raise ShardError(f"{below[0]} is used by the tokens of all experts", fix="leave these experts whole")
    return next(each.shape[0] for each in module._parameters.values() if each is not None)


@dataclass(frozen=True)
class _Trial:
    """A recorded call of experts.

    Attributes:
        module: the module of experts.
        arguments: the arguments of the call, by name.
        names: the names of the tokens, the indices and the weights.
    """

    module: nn.Module
    arguments: inspect.BoundArguments
    names: tuple[str, str, str]

    def specs(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        tokens, index, weights = (self.arguments.arguments[name] for name in self.names)
        return tokens, index, weights

    def run(self, experts: Experts, parameters: Mapping[str, Tensor], *given: Tensor) -> Tensor:
        """Run the class's forward with these parameters, and as many experts as these have."""
        module, before = self.module, dict(self.module._parameters)
        bound = inspect.BoundArguments(self.arguments.signature, self.arguments.arguments.copy())
        bound.arguments.update(zip(self.names, given, strict=True))
        module._parameters.update(parameters)  # type: ignore[arg-type]
        try:
            with experts.counted(module, next(iter(parameters.values())).shape[0]):
                result: Tensor = original_class(module).forward(*bound.args, **bound.kwargs)
                return result
        finally:
            module._parameters.update(before)


def _trial(module: nn.Module, calls: Sequence[Call]) -> _Trial:
    if not calls:
        raise ShardError(
            "the example inputs do not reach it, so its inputs are not known",
            fix="create_schedule(model, batch=batch, mesh=mesh), with a batch that reaches it",
        )
    call = calls[0]
    bound = inspect.signature(original_class(module).forward).bind(module, *call.args, **call.kwargs)
    given = {name: value for name, value in bound.arguments.items() if isinstance(value, TensorSpec)}
    inner = [leaf for _, leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, TensorSpec)]
    floating = [name for name, spec in given.items() if spec.dtype.is_floating_point and spec.ndim == 2]
    indices = [name for name, spec in given.items() if spec.dtype == torch.int64 and spec.ndim == 2]
    if len(inner) != 3 or len(floating) != 2 or len(indices) != 1:
        raise ShardError(
            f"a {original_class(module).__name__} takes {', '.join(str(list(one.shape)) for one in inner)}",
            fix=f"name {_NOT_EXPERTS}",
        )
    (index,) = indices
    alike = [name for name in floating if given[name].shape == given[index].shape]
    if not alike or len({spec.shape[0] for spec in given.values()}) != 1:
        raise ShardError("none of its inputs has the shape of the indices", fix=f"name {_NOT_EXPERTS}")
    weights = alike[-1]
    (tokens,) = (name for name in floating if name != weights)
    return _Trial(module, bound, (tokens, index, weights))


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names), -1, -1):
        yield from itertools.combinations(names, size)


def _computed_alike(trial: _Trial, experts: Experts, parameters: Mapping[str, Tensor], ranks: int) -> bool:
    """Check whether all experts together compute the weighted sums of the results of each."""
    count, device = next((each.shape[0], each.device) for each in parameters.values())
    tokens, index, weights = trial.specs()
    k, own = index.shape[1], count // ranks
    rows = -(-2 * count // k)  # each expert gets two
    chosen = torch.arange(rows * k, device=device) % count
    x = torch.randn(rows, *tokens.shape[1:], dtype=tokens.dtype, device=device)
    w = torch.rand(rows, k, dtype=weights.dtype, device=device)

    def part(rank: int) -> tuple[Tensor, Tensor]:
        order = (chosen // own == rank).nonzero().flatten()
        shares = {name: each.narrow(0, rank * own, own) for name, each in parameters.items()}

        def run(*given: Tensor) -> Tensor:
            return trial.run(experts, shares, *given)

        return alone(run, x[order // k], chosen[order] % own, w), order

    try:
        with user_code():
            together = trial.run(experts, parameters, x, chosen.view(rows, k), w)
            results, orders = zip(*map(part, range(ranks)), strict=True)
            apart = combined(torch.cat(results), torch.cat(orders), w).to(tokens.dtype)
    except UserCodeError:  # not with this number of experts in these attributes
        return False
    rounding = torch.finfo(tokens.dtype).eps ** 0.5
    if together.shape != apart.shape:
        return False
    size, distance = together.norm(), (together - apart).norm()
    return bool(size > 0) and bool(distance <= rounding * size)
