"""Nodes found only in patterns: inputs, constants, choices and module calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from schedule.capture import TensorSpec
from schedule.patterns.normalized_nodes import OpNode, is_number, operands

MISSING = inspect.Parameter.empty

Which = str | type[nn.Module] | Callable[[nn.Module], bool]
"""Argument of ``call_module``."""


class InputNode(OpNode):
    """Input of a pattern, bound to a value of the graph.

    It may bind a constant if it has a default. A setting, which the pattern uses only where torch takes no tensor (such
    as the size of a pool's window), binds numbers, lists of numbers, and sizes.
    """

    __slots__ = ("default", "dtype", "input_name", "is_setting", "ndim", "where")

    def __init__(self, name: str, default: Any = MISSING) -> None:
        super().__init__("input", {})
        self.input_name, self.default = name, default
        self.dtype: tuple[torch.dtype, ...] = ()
        self.ndim: int | None = None
        self.where: Callable[[TensorSpec], bool] | None = None
        self.is_setting = False

    @property
    def name(self) -> str:
        return self.input_name

    @property
    def is_free(self) -> bool:
        """Whether it has neither a default nor predicates."""
        return self.default is MISSING and not self.dtype and self.ndim is None and self.where is None

    def accepts(self, value: Any) -> str:
        """Return the unmet requirement if ``value`` cannot be this input, or "" if it can."""
        if self.is_setting:
            return "" if all(map(_is_scalar_node, operands(value))) else "a constant or a size"
        constant = f"a tensor (scalar({self.name!r}) binds constants)"
        if not isinstance(value, OpNode):
            return "" if self.default is not MISSING and not _holds_nodes(value) else constant
        spec = value.spec
        if is_number(spec) and self.default is MISSING:
            return constant
        if not self.dtype and self.ndim is None and self.where is None:
            return ""
        if not isinstance(spec, TensorSpec):
            return "a tensor with a known shape and dtype"
        if self.dtype and spec.dtype not in self.dtype:
            return "dtype " + " or ".join(map(str, self.dtype))
        if self.ndim is not None and spec.ndim != self.ndim:
            return f"{self.ndim} dimensions"
        if self.where is not None and not self.where(spec):
            return "what `where` asks for"
        return ""


class ScalarNode(OpNode):
    """Named constant of a pattern."""

    __slots__ = ("scalar_name", "where")

    def __init__(self, name: str, where: Callable[[Any], bool] | None) -> None:
        super().__init__("scalar", {})
        self.scalar_name, self.where = name, where

    @property
    def name(self) -> str:
        return self.scalar_name

    def accepts(self, value: Any) -> str:
        """Return the unmet requirement if ``value`` cannot be this constant, or "" if it can."""
        if any(not _is_scalar_node(n) for n in operands(value)):
            return "a constant or a size"
        if self.where is None:
            return ""
        if isinstance(value, OpNode):
            try:
                return "" if self.where(value.fx or value) else "what `where` asks for"
            except TypeError:  # a predicate on numbers, such as s > 0, says nothing about a size
                return "a constant"
        return "" if self.where(value) else "what `where` asks for"


class ChoiceNode(OpNode):
    """One of several values.

    ``optional`` is a choice between the computed and the plain value.
    """

    __slots__ = ("choice_name", "is_optional")

    def __init__(self, name: str, is_optional: bool, alternatives: tuple[Any, ...]) -> None:
        super().__init__("choice", {"alternatives": alternatives})
        self.choice_name, self.is_optional = name, is_optional

    @property
    def name(self) -> str:
        return self.choice_name

    def chosen(self, index: int) -> bool | int:
        """Return the record of a match: presence for ``optional``, the alternative's index for ``any_of``."""
        return index == 0 if self.is_optional else index


class CallNode(OpNode):
    """A call of a module given by its path (a regular expression), its type, or a predicate."""

    __slots__ = ("any_arguments", "what")

    def __init__(self, what: Which, args: dict[str, Any], any_arguments: bool = False) -> None:
        super().__init__("call_module", args)
        self.what, self.any_arguments = what, any_arguments

    def accepts(self, path: str, module: nn.Module | None) -> bool:
        """Check whether the module at ``path`` matches.

        A regular expression must match all of the path or its last parts.
        """
        if isinstance(self.what, str):
            return re.fullmatch(rf"(?:.*\.)?(?:{self.what})", path) is not None
        if isinstance(self.what, type):
            return isinstance(module, self.what)
        return module is not None and self.what(module)


def _holds_nodes(value: Any) -> bool:
    return next(operands(value), None) is not None


def _is_scalar_node(node: OpNode) -> bool:
    return (
        is_number(node.spec)
        or isinstance(node.spec, (torch.dtype, torch.device, torch.Size))
        or (node.definition is not None and node.definition.metadata)
    )
