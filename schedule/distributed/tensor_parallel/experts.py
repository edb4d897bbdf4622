"""Forward of experts spread over ranks: tokens are sent to the ranks of their experts and back, by all-to-all.

Each (token, expert) pair is computed alone by the rank that holds the expert, with a weight of one. The rank that holds
the token multiplies the results by the weights of the router, and sums them. How many tokens an expert gets depends on
the data: the ranks exchange these numbers first.

Source: Lepikhin et al., GShard, 2021; without a capacity, so no token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedule.distributed.communication import collectives
from schedule.distributed.communication.groups import exchanged, group_size

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Experts:
    """Experts of a module called with tokens, the indices of their experts, and the weights of these.

    Attributes:
        count: number of experts, the leading dimension of every parameter of the module.
        tokens: name of the input ``[tokens, hidden]``.
        index: name of the integer input ``[tokens, k]``. Indices of ``count`` or more select no expert.
        weights: name of the floating-point input ``[tokens, k]``.
        counters: attributes of the module that hold the number of experts.
        replicas: name of the process group whose ranks have the same tokens.
        batches: number of groups of ranks with tokens of their own. The gradients are averaged over them.
    """

    count: int
    tokens: str
    index: str
    weights: str
    counters: tuple[str, ...] = ()
    replicas: str = ""
    batches: int = 1

    @contextmanager
    def counted(self, module: nn.Module, count: int) -> Iterator[None]:
        """Temporarily set the attributes of ``module`` holding the number of experts."""
        before = {name: vars(module)[name] for name in self.counters}
        vars(module).update(dict.fromkeys(self.counters, count))
        try:
            yield
        finally:
            vars(module).update(before)

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of the tokens, the index and the weights."""
        return self.tokens, self.index, self.weights

    def averaged(self, parameter: Tensor) -> Tensor:
        """Return ``parameter`` with its gradient, a sum over the batches, averaged as data parallelism does."""
        if self.batches == 1:
            return parameter
        return collectives.on_gradient(parameter, lambda gradient: gradient / self.batches)


def dispatched(run: Run, experts: Experts, group: str, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the output ``[tokens, hidden]`` of experts spread over the ranks of ``group``.

    Args:
        run: computes this rank's experts for ``[rows, hidden]``, indices ``[rows, 1]`` and weights ``[rows, 1]``.
        experts: the description of the experts.
        group: name of the process group over which they are spread.
        tokens: ``[tokens, hidden]``.
        index: ``[tokens, k]``.
        weights: ``[tokens, k]``.
    """
    count, ranks = tokens.shape[0], group_size(group)
    replicated = group_size(experts.replicas) > 1
    if replicated:
        tokens, index, weights = (
            collectives.scatter_to_tensor_parallel(each, experts.replicas, 0) for each in (tokens, index, weights)
        )
    chosen = index.flatten()
    per_expert = torch.bincount(chosen, minlength=experts.count)[: experts.count]
    theirs = exchanged(per_expert, group).view(ranks, -1)
    sent, received = torch.stack((per_expert.view(ranks, -1).sum(1), theirs.sum(1))).tolist()
    order = chosen.argsort(stable=True)[: sum(sent)]
    rows = collectives.exchange_rows(tokens[order // index.shape[1]], group, sent, received)
    own = torch.arange(theirs.shape[1], device=index.device).repeat(ranks)
    results = alone(run, rows, own.repeat_interleave(theirs.flatten()).to(index.dtype), weights)
    output = combined(collectives.exchange_rows(results, group, received, sent), order, weights).to(tokens.dtype)
    return collectives.gather_from_tensor_parallel(output, experts.replicas, 0, count) if replicated else output


def alone(run: Run, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute each row with its expert, with a weight of one.

    A rank without rows computes a row of zeros and drops the result, since its backward pass is waited for.

    Args:
        run: computes the experts.
        rows: ``[rows, hidden]``.
        index: ``[rows]``.
        weights: a tensor of the dtype of the weights.
    """
    count = rows.shape[0]
    if not count:
        rows, index = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))), index.new_zeros(1)
    return run(rows, index[:, None], weights.new_ones(rows.shape[0], 1))[:count]


def combined(results: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums ``[tokens, hidden]`` of the results of the pairs.

    Args:
        results: ``[pairs, hidden]``.
        order: ``[pairs]``, the position of each pair in ``weights``, flattened. Those left out count as zero.
        weights: ``[tokens, k]``.
    """
    spread = results.new_zeros(weights.numel(), *results.shape[1:]).index_copy(0, order, results)
    return (spread.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)
