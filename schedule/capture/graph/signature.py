"""Signature of the calls accepted by a graph: conditions on arguments and environment, locations of inputs."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fused.backends.tracing import PLAIN
from fused.torch_internals.modes import is_any_autocast_enabled, keeps_operations
from schedule.capture.graph.escaped_containers import CONTAINER
from schedule.capture.guards.plain_values import is_atom, same
from schedule.capture.recording.recording import Call, Opaque
from schedule.capture.recording.structure import (
    TensorSpec,
    attributes_beside,
    is_plain_dataclass,
    is_plain_mapping,
    leaves,
    literal,
    rebuilt_mapping,
    rebuilt_sequence,
)
from schedule.util.errors import TraceError
from schedule.util.internal_errors import raise_if_own

# -- Signature of the calls accepted by a graph -------------------------------------------------------------


_IDENTITY = (bool, type(None))
_GLOBALS = {"self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"}


def _is_taken(name: str) -> bool:
    """Check whether generated code may use ``name`` for something else than a parameter of the forward."""
    return name.startswith("_") or name in _GLOBALS or (hasattr(builtins, name) and name != "input")


def local(name: str) -> str:
    """Return the name that a parameter of the forward has in generated code."""
    return f"__{name}" if _is_taken(name) else name


class Parameters:
    """Parameters of a forward, as declared by the dispatcher.

    Names and defaults are read through wrappers (``functools.wraps``). A forward without ``**kwargs`` still
    accepts any keyword here, since a wrapper may consume some; a really unexpected keyword reaches the original
    forward, which raises the error.

    Attributes:
        named: the parameters but the first one, and without those below.
        var_positional: the name of ``*args`` in generated code, or None.
        var_keyword: the name of ``**kwargs`` in generated code.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.var_positional = next((local(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._others = "_unexpected" + "_" * sum(p.name.startswith("_unexpected") for p in parameters)
        self.var_keyword = next((local(p.name) for p in parameters if p.kind is p.VAR_KEYWORD), local(self._others))
        others = [inspect.Parameter(self._others, inspect.Parameter.VAR_KEYWORD)]
        self._signature = inspect.Signature([p for p in parameters if p.kind is not p.VAR_KEYWORD] + others)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the value of every parameter by its name in generated code, with defaults filled in."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        others = bound.arguments.pop(self._others)
        return {**{local(name): value for name, value in bound.arguments.items()}, self.var_keyword: others}

    @property
    def names(self) -> list[str]:
        """The names of all parameters but the first in generated code."""
        return [*(local(p.name) for p in self.named), *self._variable]

    def sources(self, count: int, keywords: Sequence[str]) -> dict[str, str]:
        """Return for each of :attr:`names` a Python expression for its value, if arguments are passed in this way.

        Args:
            count: number of positional arguments, in ``_args``.
            keywords: names of keyword arguments, in ``_kwargs``.
        """
        positional = [p.name for p in self.named if p.kind is not p.KEYWORD_ONLY]
        found = {local(name): f"_args[{index}]" for index, name in enumerate(positional[:count])}
        for parameter in self.named:
            if parameter.kind is not parameter.POSITIONAL_ONLY and parameter.name in keywords:
                found[local(parameter.name)] = f"_kwargs[{parameter.name!r}]"
            else:
                found.setdefault(local(parameter.name), f"_default_{parameter.name}")
        if self.var_positional is not None:
            found[self.var_positional] = f"_args[{len(positional)}:]"
        others = ", ".join(f"{name!r}: _kwargs[{name!r}]" for name in self.others(keywords))
        return {**found, self.var_keyword: f"{{{others}}}"}

    def others(self, keywords: Iterable[str]) -> tuple[str, ...]:
        """Return those names of keyword arguments that are no parameters."""
        taken = {p.name for p in self.named if p.kind is not p.POSITIONAL_ONLY}
        return tuple(name for name in keywords if name not in taken)

    @property
    def _variable(self) -> list[str]:
        return [self.var_keyword] if self.var_positional is None else [self.var_positional, self.var_keyword]

    def binder(self, defaults: dict[str, Any]) -> str:
        """Return ``lambda x, mask=_default_mask, **kwargs: (x, mask, kwargs)``, and add the values to ``defaults``."""
        values = ", ".join([*(p.name for p in self.named), *self._variable])
        return f"lambda {self._declaration(defaults)}: ({values},)"

    def _declaration(self, defaults: dict[str, Any]) -> str:
        parts, kinds = list[str](), inspect.Parameter
        keyword_only = self.var_positional is not None
        for parameter in self.named:
            if parameter.kind is kinds.KEYWORD_ONLY and not keyword_only:
                parts.append("*")
                keyword_only = True
            text = parameter.name
            if parameter.default is not kinds.empty:
                defaults[f"_default_{text}"] = parameter.default
                text = f"{text}=_default_{text}"
            parts.append(text)
            following = self.named[self.named.index(parameter) + 1 :]
            if parameter.kind is kinds.POSITIONAL_ONLY and (
                not following or following[0].kind is not kinds.POSITIONAL_ONLY
            ):
                parts.append("/")
        if self.var_positional is not None:
            first_keyword = next(
                (i for i, part in enumerate(parts) if self._is_keyword_only(part.split("=")[0])), len(parts)
            )
            parts.insert(first_keyword, f"*{self.var_positional}")
        return ", ".join([*parts, f"**{self.var_keyword}"])

    def _is_keyword_only(self, name: str) -> bool:
        return any(p.name == name and p.kind is p.KEYWORD_ONLY for p in self.named)


@dataclass
class Signature:
    """Inputs and argument conditions of one specialization.

    Attributes:
        inputs: placeholder name → Python expression for it in terms of the bound parameters.
        tensors: expression of each tensor input → its recorded spec.
        others: names of the keyword arguments that are no parameters, in order; None if any are accepted.
        conditions: further Python conditions, all true for calls accepted by the graph.
        kinds: expression of each tensor input that is used → condition on its dtype and rank, to check last.
        globals: name → object, for names used in the expressions.
    """

    inputs: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    others: tuple[str, ...] | None = None
    conditions: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=dict)

    def name(self, value: Any, hint: str) -> str:
        """Return a global name for ``value``."""
        for name, known in self.globals.items():
            if known is value:
                return name
        name = f"_{hint}_{len(self.globals)}"
        self.globals[name] = value
        return name


class SignatureBuilder:
    """Builder of a signature from one call: a placeholder for each input and conditions for the rest.

    Args:
        placeholder: makes the tracked input from its name and description.
    """

    def __init__(self, placeholder: Callable[[str, Any], Any]) -> None:
        self.signature = Signature()
        self._placeholder = placeholder
        self._names: dict[str, str] = {}
        self._leaves: dict[str, Any] = {}
        self._containers: dict[int, tuple[Any, str]] = {}
        self._constants: dict[int, tuple[Any, str]] = {}

    def build(self, parameters: Parameters, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tracked ``(args, kwargs)`` of ``call``, and complete :attr:`signature`."""
        bound = parameters.bind(call.args, call.kwargs)
        others = bound.pop(parameters.var_keyword)
        self.signature.others = tuple(others)
        for name, value in bound.items():
            self._walk(value, name)
        for name, value in others.items():
            self._walk(value, f"{parameters.var_keyword}[{name!r}]")
        args = tuple(self._tracked(value, text) for value, text in self._given(parameters, call))
        kwargs = {
            key: self._tracked(value, f"{parameters.var_keyword}[{key!r}]" if key in others else local(key))
            for key, value in call.kwargs.items()
        }
        return args, kwargs

    def _given(self, parameters: Parameters, call: Call) -> list[tuple[Any, str]]:
        positional = [local(p.name) for p in parameters.named if p.kind is not p.KEYWORD_ONLY]
        extra = [f"{parameters.var_positional}[{i}]" for i in range(len(call.args) - len(positional))]
        return list(zip(call.args, [*positional, *extra], strict=False))

    def _walk(self, value: Any, text: str) -> None:
        """Add conditions and placeholders for ``value`` at the expression ``text``."""
        add = self.signature.conditions.append
        if isinstance(value, TensorSpec):
            plain, is_kept = self.signature.name(PLAIN, "plain"), self.signature.name(keeps_operations, "keeps")
            dtype = self.signature.name(value.dtype, "dtype")
            add(f"(type({text}) in {plain} or {is_kept}({text}))")
            kind = f"{text}.dtype is {dtype} and {text}.dim() == {value.ndim} and not {text}.is_nested"
            self.signature.kinds[text] = kind
            self.signature.tensors[text] = value
            self._input(value, text)
        elif isinstance(value, Opaque):
            add(f"type({text}) is {self.signature.name(type(value.snapshot), type(value.snapshot).__name__)}")
            self._input(value, text)
        elif isinstance(value, (list, tuple)):
            add(f"{self._of_class(value, text)} and len({text}) == {len(value)}")
            for index, item in enumerate(value):
                self._walk(item, f"{text}[{index}]")
        elif is_plain_mapping(value):
            keys = self.signature.name(tuple(value), "keys")
            add(f"{self._of_class(value, text)} and " + (f"(*{text},) == {keys}" if value else f"not {text}"))
            for key, item in value.items():
                self._walk(item, f"{text}[{key!r}]")
            for name, each in attributes_beside(value).items():
                self._walk(each, f"{text}.{name}")
        elif is_plain_dataclass(value):
            add(f"type({text}) is {self.signature.name(type(value), type(value).__name__)}")
            for name in value.__dataclass_fields__:
                self._walk(getattr(value, name), f"{text}.{name}")
        else:
            self._constant(value, text)

    def _of_class(self, value: Any, text: str) -> str:
        """Return the condition for the class of ``value``."""
        cls, known = type(value), (list, tuple, dict)
        return f"type({text}) is {cls.__name__ if cls in known else self.signature.name(cls, cls.__name__)}"

    def _constant(self, value: Any, text: str) -> None:
        if isinstance(value, _IDENTITY):
            condition = f"{text} is {value!r}"
        elif type(value) is float and value == 0:  # 0.0 is not -0.0
            condition = f"{self.signature.name(same, 'same')}({text}, {value!r})"
        elif type(value) in (int, float, str):
            condition = f"type({text}) is {type(value).__name__} and {text} == {literal(value)}"
        elif isinstance(value, torch.dtype):
            condition = f"{text} is {value}"
        elif is_atom(value) and not hasattr(value, "__dict__"):
            condition = f"{self.signature.name(same, 'same')}({text}, {self.signature.name(value, 'value')})"
        else:
            condition = f"{text} is {self.signature.name(value, 'object')}"
        self.signature.conditions.append(condition)

    def _input(self, described: Any, text: str) -> None:
        name = self._placeholder_name(text)
        self.signature.inputs[name] = text
        self._leaves[text] = self._placeholder(name, described)

    def container_input(self, value: Any, graph: fx.Graph) -> fx.Node | None:
        """Return a placeholder of ``graph`` for a container that was passed, or None for any other value."""
        if id(value) not in self._containers:
            return None
        text = self._containers[id(value)][1]
        name, given = self._placeholder_name(text), [node for node in graph.nodes if node.op == "placeholder"]
        for node in given:
            if node.target == name:
                return node
        self.signature.inputs[name] = text
        first = next(iter(graph.nodes))
        with graph.inserting_after(given[-1]) if given else graph.inserting_before(first):
            node = graph.placeholder(name)
        node.meta["object"] = node.meta[CONTAINER] = True
        return node

    def lacks(self, value: Any, name: str) -> None:
        """Add a condition that a dataclass that was passed has no attribute ``name``; nothing for other values."""
        if id(value) in self._containers:
            self.signature.conditions.append(f"not hasattr({self._containers[id(value)][1]}, {name!r})")

    def constants(self) -> list[Any]:
        """Return the arguments that are no inputs of the graph: plain values, functions and modules."""
        return [value for value, _ in self._constants.values()]

    def is_given(self, value: Any) -> bool:
        """Check whether ``value`` is a constant among the arguments, such as a function."""
        return id(value) in self._constants

    def _tracked(self, value: Any, text: str) -> Any:
        """Return ``value`` with its inputs replaced by the tracked ones."""
        tracked = self._copied(value, text)
        if text not in self._leaves and not isinstance(value, torch.Size):
            kept = self._containers if tracked is not value else self._constants
            kept[id(tracked)] = (tracked, text)
        return tracked

    def _copied(self, value: Any, text: str) -> Any:
        if text in self._leaves:
            return self._leaves[text]
        if isinstance(value, (list, tuple)):
            items = [self._tracked(item, f"{text}[{index}]") for index, item in enumerate(value)]
            return rebuilt_sequence(value, items)
        if is_plain_mapping(value):
            mapped = {key: self._tracked(item, f"{text}[{key!r}]") for key, item in value.items()}
            beside = attributes_beside(value)
            tracked = {name: self._tracked(each, f"{text}.{name}") for name, each in beside.items()}
            return rebuilt_mapping(type(value), mapped, tracked)
        if is_plain_dataclass(value):
            names = value.__dataclass_fields__
            return type(value)(**{name: self._tracked(getattr(value, name), f"{text}.{name}") for name in names})
        return value

    def _placeholder_name(self, text: str) -> str:
        """Return the name of the placeholder for the argument at ``text``, another one for each."""
        if text not in self._names:
            name = "".join(c if c.isalnum() else "_" for c in text).strip("_").replace("__", "_")
            name = f"{name}_given" if _is_taken(name) or not name.isidentifier() else name
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            candidates = itertools.chain([name], numbered)
            self._names[text] = next(each for each in candidates if each not in self._names.values())
        return self._names[text]


def bound_or_refused(parameters: Parameters, call: Call, forward: Callable[..., Any]) -> None:
    """Raise a :class:`TraceError` if ``call`` does not fit ``forward``."""
    try:
        parameters.bind(call.args, call.kwargs)
    except TypeError as error:
        raise_if_own(error)
        raise TraceError(
            f"the recorded call does not fit {forward.__qualname__}: {error}",
            fix="pass a batch that the model accepts",
        ) from error


# -- Environment of a call besides its arguments ------------------------------------------------------------


FAST_PATH = "not torch.is_grad_enabled() and not _own['training'] and torch.backends.mha.get_fastpath_enabled()"

_QUICKLY_ASKED = ("cpu", "cuda")
"""Device types among those that one quick question covers: is autocast enabled for any of them?"""


def quiet_autocast(device_type: str, dtype: torch.dtype | None) -> torch.autocast:
    """Return an autocast block without caching, so casts of parameters made inside do not stay in autocast's cache."""
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def parameter_conditions(module: nn.Module, signature: Signature) -> list[str]:
    """Return a condition on the dtype of the first floating-point parameter, if no tensor argument is floating point.

    For example, a module called with token ids: its arguments do not determine the dtype it computes in.
    """
    if any(spec.dtype.is_floating_point for spec in signature.tensors.values()):
        return []
    floating = ((path, p) for path, p in module.named_parameters() if p.is_floating_point())
    for path, parameter in floating:
        *holders, name = path.split(".")
        holder = "self" + "".join(f"._modules[{part!r}]" for part in holders)
        return [f"{holder}._parameters[{name!r}].dtype is {parameter.dtype}"]
    return []


def _has_fast_path(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Check whether torch may run ``module`` as one fused kernel. Under a tracer it does not."""
    if not isinstance(module, nn.TransformerEncoderLayer) or forward is not nn.TransformerEncoderLayer.forward:
        return False
    return bool(module.activation_relu_or_gelu)


def on_fast_path(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Check whether a call of ``module`` now may take torch's fused kernel, see :data:`FAST_PATH`."""
    enabled = not torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()
    return enabled and not module.training and _has_fast_path(module, forward)


def fast_path_conditions(module: nn.Module, forward: Callable[..., Any]) -> list[str]:
    """Return a condition to exclude torch's fused kernel, if ``module`` has one."""
    return [f"not ({FAST_PATH})"] if _has_fast_path(module, forward) else []


def autocast_dtype(call: Call) -> torch.dtype | None:
    """Return the current autocast dtype for the device of ``call``, or None while autocast is off."""
    environment = Environment.of(call, None)
    kind = str(environment.device_type)
    if not environment.can_autocast or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class Environment:
    """Environment of a call. Constants of its graph depend on it.

    Attributes:
        device_type: device type of the first tensor of the call; None for a call without tensors.
        autocast: autocast dtype for this device type; None while autocast is off.
    """

    device_type: str | None
    autocast: torch.dtype | None

    @classmethod
    def of(cls, call: Call, autocast: torch.dtype | None) -> Environment:
        """Return the environment of a recorded call."""
        specs = (leaf for _, leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, TensorSpec))
        first = next(specs, None)
        return cls(None if first is None else first.device.type, autocast)

    @property
    def can_autocast(self) -> bool:
        """Whether autocast is available for the device type."""
        return self.device_type is not None and torch.amp.is_autocast_available(self.device_type)

    def inlined(self) -> AbstractContextManager[Any]:
        """Return the autocast block to trace under. It also overrides an enclosing autocast block."""
        if not self.can_autocast:
            return contextlib.nullcontext()
        return quiet_autocast(str(self.device_type), self.autocast)

    def conditions(self, signature: Signature) -> list[str]:
        """Return Python conditions for a call to be made in this environment."""
        first = next((text for text, spec in signature.tensors.items()), None)
        if first is None:
            return []
        found = [device_condition(first, str(self.device_type))]
        if self.can_autocast:
            enabled = f"{signature.name(torch.is_autocast_enabled, 'enabled')}({self.device_type!r})"
            wanted = f"torch.get_autocast_dtype({self.device_type!r}) is {self.autocast}"
            condition = f"{enabled} and {wanted}" if self.autocast is not None else f"not {enabled}"
            if self.autocast is None and self.device_type in _QUICKLY_ASKED:
                condition = f"(not {signature.name(is_any_autocast_enabled, 'some_enabled')}() or {condition})"
            found.append(condition)
        return found


def device_condition(tensor: str, device_type: str) -> str:
    """Return a Python condition for a tensor, given as source, to be on a device type."""
    flag = f"is_{device_type}"  # of those that have one: a sixth of the time
    is_fast = isinstance(getattr(torch.Tensor, flag, None), types.GetSetDescriptorType)
    return f"{tensor}.{flag}" if is_fast else f"{tensor}.device.type == {device_type!r}"
