"""Random generators by name, for parts of a model that draw numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from schedule.util.errors import NotApplicable, did_you_mean


class RNGStatesTracker:
    """Random generators by name, each with a seed, for parts of a model that draw numbers of their own.

    ::

        rng = schedule.RNGStatesTracker()
        rng.add("tensor-parallel", 2718 + rank)

        with rng.fork("tensor-parallel"):      # in a forward
            x = F.dropout(x, 0.1)

    In the block, torch's default generators of the CPU and of the current CUDA device draw numbers that follow from the
    seed and from the state outside. The state outside advances by one draw, however many are drawn in the block. So
    ranks that were seeded alike draw the same numbers outside, and different ones under seeds of their own.

    The state of a name is its seed. Whatever restores torch's default generators restores the numbers in the blocks:
    a recomputation by :meth:`Schedule.checkpoint`, ``torch.utils.checkpoint`` or transformers draws them again. A
    training run resumes with torch's states and those of ``get_states()``.

    A forward with such a block is not traced, and runs as it is written. To draw different numbers on each rank in a
    whole module that may be traced, use :meth:`Schedule.fork_rng`.

    Source: Megatron-LM's and Slapo's ``CudaRNGStatesTracker``, whose states are those of generators that advance in the
    blocks, so that a recomputation has to save and restore them.
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def add(self, name: str, seed: int) -> None:
        """Add a generator.

        Args:
            name: a name that is not in use.
            seed: a seed that no other name has.

        Raises:
            NotApplicable: the name or the seed is in use, or one of them has another type.
        """
        if name in self._seeds:
            raise NotApplicable(f"there is a generator {name!r} already", fix="give another name, or reset() first")
        self.set_states({**self._seeds, name: seed})

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw the numbers of ``name`` in the block.

        Raises:
            NotApplicable: there is no generator of this name.
        """
        from schedule.distributed.communication.rng import forked  # torch.compiler.disable loads dynamo

        if name not in self._seeds:
            fix = did_you_mean(name, self._seeds) or "add(name, seed) first"
            raise NotApplicable(f"there is no generator {name!r}", fix=fix)
        with forked(self._seeds[name]):
            yield

    def get_states(self) -> dict[str, int]:
        """Return the seed of each name."""
        return dict(self._seeds)

    def set_states(self, states: Mapping[str, int]) -> None:
        """Replace all generators by those of ``states``, as returned by :meth:`get_states`.

        Raises:
            NotApplicable: two names have one seed, so they would draw the same numbers; a name is no string, or a seed
                no integer.
        """
        names: dict[int, str] = {}
        for name, seed in states.items():
            if not isinstance(name, str) or not isinstance(seed, int) or isinstance(seed, bool):
                raise NotApplicable(f"{name!r} has the seed {seed!r}", fix="give a string and an integer")
            if seed in names:
                raise NotApplicable(
                    f"{name!r} and {names[seed]!r} would draw the same numbers, by the seed {seed}",
                    fix="give each name a seed of its own",
                )
            names[seed] = name
        self._seeds = dict(states)

    def reset(self) -> None:
        """Remove all generators."""
        self._seeds = {}
