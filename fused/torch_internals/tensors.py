"""Kinds of tensors without data, and parts of tensors without a public name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "TENSOR_MODULE",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "failures_unlogged",
    "make_wrapper_subclass",
    "neural_functions",
    "parse_to",
    "set_version",
]

TENSOR_MODULE = "torch._tensor"
"""Module of the methods of tensors that are written in Python."""

neural_functions: ModuleType = torch._C._nn
"""Functions that :mod:`torch.nn.functional` hands on as they are."""


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Suppress torch's log of failing operations on fake tensors, in this thread only.

    Their exceptions are raised as usual.
    """
    logger, own = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger.addFilter(is_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_elsewhere)


make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype of ``module.to(*args, **kwargs)``."""
    device, dtype, *_ = neural_functions._parse_to(*args, **kwargs)
    return device, dtype


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set autograd's count of in-place changes of ``tensor``."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
