"""Factors of parameters that may be sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedule.distributed.planning.factored_values import Propagated
from schedule.distributed.planning.factors import Factor, factors, size_of

INNER = "it is not the outermost factor, and the outer ones are not picked from"


@dataclass
class Candidate:
    """A factor considered for sharding.

    Attributes:
        factor: the factor to shard.
        axes: (path of a parameter, axis) → the number of packed parts in which the factor appears.
        replicas: (path, axis) → the number of ranks that compute with the same shard.
        common: (path, axis) → the number of last elements that are replicated on every rank.
        refused: the reason why it cannot be sharded; "" if it can.
    """

    factor: Factor
    axes: dict[tuple[str, int], int] = field(default_factory=dict)
    replicas: dict[tuple[str, int], int] = field(default_factory=dict)
    common: dict[tuple[str, int], int] = field(default_factory=dict)
    refused: str = ""


def candidates_of(found: Propagated) -> list[Candidate]:
    """Return the unblocked factors of parameters with all axes of each."""
    made: dict[Factor, Candidate] = {}
    for path, dims in found.tensors.items():
        for axis, dim in enumerate(dims):
            outer, picked, own = 1, True, factors(dim)
            if own and own[0].leading is not None:
                first = factors([own[0].leading])[0]
                if not first.blocked:
                    candidate = made.setdefault(first, Candidate(first))
                    candidate.axes[path, axis] = 1
                    beside = own[0].size - own[0].leading.size
                    candidate.common[path, axis] = beside * size_of(own[1:])
            for factor in own:
                if not factor.blocked:
                    candidate = made.setdefault(factor, Candidate(factor))
                    candidate.axes[path, axis] = outer
                    if not picked:
                        candidate.refused = INNER
                picked = picked and factor.picked
                outer *= factor.size
    return list(made.values())
