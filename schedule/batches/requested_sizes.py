"""Sizes and reproducible numbers for example inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from schedule.batches.config_values import Configs

Layouts = list[torch.Tensor]
Makers = Mapping[str, Callable[["Sizes"], Layouts]]


@dataclass
class Sizes:
    """Requested sizes, with makers of tensors.

    Attributes:
        configs: configs of the model.
        rows: batch size.
        length: tokens of a sequence.
        names: arguments of the forward.
        device: device of the model.
        further: makers of arguments that are not known by name.
    """

    configs: Configs
    rows: int
    length: int
    names: Sequence[str]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    further: Makers = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(97 * self.rows + self.length)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return floating-point numbers, the same ones each time."""
        return torch.randn(*shape, generator=self._generator).to(self.device)

    def whole(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        """Return integers from ``low`` to below ``high``."""
        return torch.randint(low, max(high, low + 1), shape, generator=self._generator).to(self.device)

    def ones(self, *shape: int) -> torch.Tensor:
        """Return a mask of ones, hiding no position."""
        return torch.ones(*shape, dtype=torch.long, device=self.device)

    def repeated(self, *values: int) -> torch.Tensor:
        """Return ``values`` repeated for every row."""
        return torch.tensor([values] * self.rows, device=self.device)

    def tokens(self, vocabulary: int, length: int) -> torch.Tensor:
        """Return ids ``[rows, length]`` of ordinary tokens."""
        special = self.configs.special_ids
        ordinary = [token for token in range(min(vocabulary, 4096)) if token not in special] or [0]
        return torch.tensor(ordinary, device=self.device)[self.whole(len(ordinary), self.rows, length)]
