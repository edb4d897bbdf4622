"""Layers that read torch's modes and the process: loaded twice, once a world."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Stack(nn.Module):
    """Two layers of one class."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([cls() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class Asking(nn.Module):
    """An MLP that doubles where :meth:`asked` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def asked(self, x: torch.Tensor) -> Any:
        """What is read."""
        return False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Double, or not."""
        hidden = F.gelu(self.fc1(x))
        if self.asked(x):
            hidden = hidden * 2.0
        return x + self.fc2(hidden)


class GradEnabled(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.is_grad_enabled()


class Inference(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.is_inference_mode_enabled()


class Autocast(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.is_autocast_enabled("cpu")


class AutocastDtype(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.get_autocast_dtype("cpu") is torch.float16


class Distributed(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return dist.is_available() and dist.is_initialized()


class DefaultDtype(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.get_default_dtype() is torch.float64


class Deterministic(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.are_deterministic_algorithms_enabled()


class Anomaly(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.is_anomaly_enabled()


class Environ(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return os.environ.get("ADVERSARY_FLAG") == "1"


class Getenv(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return os.getenv("ADVERSARY_FLAG") is not None


class Threads(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.get_num_threads() == 2


class Mkldnn(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.backends.mkldnn.deterministic


class RecursionLimit(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return sys.getrecursionlimit() == 12345


class MatmulPrecision(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return torch.get_float32_matmul_precision() == "medium"


class RequiresGrad(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return x.requires_grad


class Contiguous(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return x.is_contiguous()


class Strides(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return x.stride(0) == 0


class HalfInput(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return x.dtype is torch.float64


class DefaultMade(Asking):
    """Makes tensors of the default dtype."""

    def asked(self, x: torch.Tensor) -> Any:
        return torch.zeros(1).dtype is torch.float64


class Drawing(Asking):
    """Draws numbers by Python's generator."""

    def asked(self, x: torch.Tensor) -> Any:
        return random.random() < 0.5


class Clock(Asking):
    """Asks for the time, which a test sets."""

    def asked(self, x: torch.Tensor) -> Any:
        return time.time() == 0.0


class Leaf(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return x.is_leaf


class FunctionModes(Asking):
    def asked(self, x: torch.Tensor) -> Any:
        return isinstance(x, nn.Parameter)


class SizeAsked(Asking):
    """Branches on sizes that may be equal by accident."""

    def asked(self, x: torch.Tensor) -> Any:
        return x.shape[0] == x.shape[1] or x.shape[0] == 1
