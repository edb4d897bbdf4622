"""One vocabulary for every way to call an operation.

``F.softmax``, ``torch.softmax``, ``Tensor.softmax`` and ``nn.Softmax`` are *forms* of one :class:`OpDef`. A
form maps its arguments to the definition's: by name, with defaults filled in and nothing dropped. The
table of torch's operations is data, in :mod:`schedule.patterns.optable`; :func:`register_op` adds to it.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from fused.torch_internals.tensor_kinds import neural_functions
from schedule.capture import functions_called, has_own_forward, is_shipped

REQUIRED = inspect.Parameter.empty
ALIASES = {"axis": "dim", "self": "input", "x": "input", "keepdims": "keepdim"}
"""Keyword names torch accepts in place of the canonical one."""


class CannotBind(Exception):
    """The arguments do not fit the form.

    The call is then normalized under its own name, with its arguments by position.
    """


@dataclass(frozen=True, eq=False)
class OpDef:
    """A canonical operation.

    Attributes:
        name: canonical name, such as ``"softmax"``.
        params: parameter name → default (``REQUIRED`` if there is none), in canonical order.
        variadic: parameter that also takes its elements as separate arguments (``view(2, 3)``).
        commutative: the two parameters that may be swapped, or ().
        dims: parameters that are dimension numbers, equal modulo the rank; a list of one is the same as the number.
        per_dim: parameters with a number for each dimension of a window → how many dimensions it has. A single
            number stands for all of them.
        view: the result may share memory with the first argument.
        rng: draws random numbers.
        metadata: reads sizes, dtype or device, never data.
    """

    name: str
    params: Mapping[str, Any]
    variadic: str = ""
    commutative: tuple[str, ...] = ()
    dims: frozenset[str] = frozenset()
    per_dim: Mapping[str, int] = field(default_factory=dict)
    view: bool = False
    rng: bool = False
    metadata: bool = False

    def spell_out(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Write numbers in ``arguments`` as this definition has them, in place: see ``dims`` and ``per_dim``."""
        for name in self.dims:
            value = arguments.get(name)
            if name != self.variadic and isinstance(value, (tuple, list)) and len(value) == 1:
                arguments[name] = value[0]
        for name, count in self.per_dim.items():
            value = arguments.get(name)
            each = (value,) if type(value) is int else value
            if isinstance(each, (tuple, list)):
                arguments[name] = tuple(each) * count if len(each) == 1 else tuple(each)
        return arguments


@dataclass(frozen=True, eq=False)
class Form:
    """One way to call an :class:`OpDef`: its parameter order, its implied constants, and whether it mutates."""

    definition: OpDef
    names: tuple[str, ...]
    variadic: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    swap: bool = False
    mutates: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the definition's arguments by name, and whether the first argument is mutated.

        Raises:
            CannotBind: an argument is missing, or there are too many.
        """
        names = self.names
        before = names.index(self.variadic) if self.variadic in names else len(names)
        bound: dict[str, Any] = dict(zip(names[:before], args, strict=False))
        if self.variadic:
            rest = args[before:]
            if rest:
                bound[self.variadic] = tuple(rest[0]) if _is_one_sequence(rest) else _several(rest)
        elif len(args) > len(names):
            raise CannotBind
        for key, value in kwargs.items():
            bound[key if key in names else ALIASES.get(key, key)] = value
        mutates = self.mutates
        if "inplace" in bound:
            mutates = mutates or bound.pop("inplace") is not False
        if self.fixed:
            bound.update(self.fixed)
        result = {}
        for name, default in self.definition.params.items():
            value = bound.pop(name, self.defaults.get(name, default) if self.defaults else default)
            if value is REQUIRED:
                raise CannotBind
            result[name] = value
        for key, value in bound.items():
            if key[0] != "_":  # such as _stacklevel, which changes no value; anything else is retained
                result[key] = value
        if self.swap:
            first, second = list(self.definition.params)[:2]
            result[first], result[second] = result[second], result[first]
        return self.definition.spell_out(result), mutates


def _is_one_sequence(rest: Sequence[Any]) -> bool:
    return len(rest) == 1 and isinstance(rest[0], (tuple, list))


def _several(rest: Sequence[Any]) -> Any:
    # A single value that is not an int may be a whole torch.Size: x.view(shape).
    if len(rest) == 1 and not isinstance(rest[0], int):
        return rest[0]
    return tuple(rest)


DEFINITIONS: dict[str, OpDef] = {}
FUNCTIONS: dict[Any, Form] = {}
METHODS: dict[str, Form] = {}
ModuleArguments = Callable[[Any], Mapping[str, Any] | None]
"""Returns the arguments of a module's operation, or None if the module does more than that operation."""
MODULES: dict[type[nn.Module], tuple[str, ModuleArguments]] = {}
PURE: dict[Any, bool] = {}
"""Callables declared free of side effects → whether they draw random numbers."""
VIEWS: set[Any] = set()
"""Callables declared to return views of their arguments."""


def parse_signature(text: str) -> tuple[dict[str, Any], str]:
    """Parse ``"input, *size, dim=None"`` to parameters with defaults, and the name of the variadic one."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    params: dict[str, Any] = {a.arg: REQUIRED for a in arguments.args}
    for a, default in zip(reversed(arguments.args), reversed(arguments.defaults), strict=False):
        params[a.arg] = ast.literal_eval(default)
    variadic = arguments.vararg.arg if arguments.vararg else ""
    if variadic:
        params[variadic] = REQUIRED
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        params[a.arg] = REQUIRED if default is None else ast.literal_eval(default)
    return params, variadic


def _own_names(function: Any, definition: OpDef, signature: str) -> tuple[tuple[str, ...], str, dict[str, Any]]:
    """Return a form's own positional order, variadic parameter and defaults.

    They are taken from ``signature`` if given, else from a Python function's signature, else from the definition.
    """
    if signature:
        params, variadic = parse_signature(signature)
    elif inspect.isfunction(function):
        parameters = inspect.signature(function).parameters
        params, variadic = {ALIASES.get(n, n): p.default for n, p in parameters.items()}, ""
        if not set(params) & set(definition.params):  # a (*args, **kwargs) wrapper has no useful names
            params, variadic = dict(definition.params), definition.variadic
    else:
        params, variadic = dict(definition.params), definition.variadic
    defaults = {
        name: default
        for name, default in params.items()
        if default is not REQUIRED and name in definition.params and default != definition.params[name]
    }
    return tuple(params), variadic, defaults


def register_op(
    name: str,
    signature: str,
    *,
    functions: Iterable[Any] = (),
    methods: Iterable[str] = (),
    module: tuple[type[nn.Module], ModuleArguments] | None = None,
    commutative: tuple[str, ...] = (),
    dims: Iterable[str] = (),
    per_dim: Mapping[str, int] | None = None,
    view: bool = False,
    rng: bool = False,
    metadata: bool = False,
) -> OpDef:
    """Add an operation to the vocabulary, or more forms to an existing one.

    Args:
        name: canonical name. ``torch.<name>``, ``F.<name>``, ``operator.<name>``, ``Tensor.<name>``, and their
            in-place variants (``<name>_``, ``operator.i<name>``) become forms automatically.
        signature: canonical parameters, such as ``"input, dim, dtype=None"``; defaults are Python literals.
        functions: more callables with the same meaning and parameter order.
        methods: more method names with the same meaning.
        module: a ``torch.nn`` class, as for :func:`register_module`, and how its attributes become arguments.
        commutative, dims, per_dim, view, rng, metadata: see :class:`OpDef`.
    """
    params, variadic = parse_signature(signature)
    definition = OpDef(
        name, params, variadic, tuple(commutative), frozenset(dims), dict(per_dim or {}), view, rng, metadata
    )
    DEFINITIONS[name] = definition
    spaces = (torch, functional, torch.special, neural_functions, operator)
    found = [getattr(space, n) for space in spaces for n in (name, name + "_") if hasattr(space, n)]
    for function in [*filter(is_shipped, found), *functions]:
        if callable(function):
            mutating = getattr(function, "__name__", "").endswith(f"{name}_")
            register_form(name, function, mutates=mutating)
    if hasattr(operator, f"i{name}"):
        register_form(name, getattr(operator, f"i{name}"), mutates=True)
    for method in (name, *methods):
        register_form(name, method)
        register_form(name, f"{method}_", mutates=True)
        register_form(name, f"__{method}__")
        register_form(name, f"__i{method}__", mutates=True)
    if module is not None:
        MODULES[module[0]] = (name, module[1])
    return definition


def register_form(
    name: str,
    target: Any,
    signature: str = "",
    *,
    fixed: Mapping[str, Any] | None = None,
    swap: bool = False,
    mutates: bool = False,
) -> None:
    """Add one way to call the operation ``name``.

    Args:
        name: canonical name, registered before.
        target: a callable, or a method's name.
        signature: its own parameters if they differ from the canonical ones.
        fixed: canonical arguments it implies (``x.float()`` is a cast to float32).
        swap: the first two arguments are swapped (``rsub``).
        mutates: its first argument is changed in place.
    """
    definition = DEFINITIONS[name]
    names, variadic, defaults = _own_names(target, definition, signature)
    form = Form(definition, names, variadic, dict(fixed or {}), defaults, swap, mutates)
    if isinstance(target, str):
        METHODS[target] = form
    else:
        FUNCTIONS[target] = form


def register_module(name: str, kind: type[nn.Module], arguments: ModuleArguments) -> None:
    """Register ``kind`` as the operation ``name`` with these arguments.

    A subclass counts too if it has nothing but a constructor of its own.
    """
    MODULES[kind] = (name, arguments)


def arguments_of(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments of the operation of a registered module, or None if it does more than that operation."""
    row = _row(type(module))
    return None if row is None else row[1](module)


def _row(cls: type[nn.Module]) -> tuple[str, ModuleArguments] | None:
    """Return the row of ``cls``, or of its base if the subclass has nothing but a constructor of its own."""
    for each in cls.__mro__:
        if each in MODULES:
            return MODULES[each]
        if not _ADDS_NOTHING.issuperset(vars(each)):
            return None
    return None


_ADDS_NOTHING = frozenset(
    (
        *("__init__", "__module__", "__qualname__", "__doc__", "__annotations__"),
        "__static_attributes__",
        "__firstlineno__",
    )
)


def operation_of(cls: type[nn.Module]) -> str | None:
    """Return the operation computed by a ``cls``, or None.

    It is also None if its forward, or the function it calls, has been replaced.
    """
    row = _row(cls) if has_own_forward(cls) else None
    name = None if row is None else row[0]
    forms = [find_form("call_function", function) for _, _, function in functions_called(cls)]
    names = [form.definition.name for form in forms if form is not None]
    return name if name and len(names) == len(forms) and (name in names or not names) else None


def declare_pure(function: Callable[..., Any], *, rng: bool = False) -> None:
    """Declare ``function`` free of side effects on its arguments.

    ``rng`` says whether it draws random numbers.
    """
    PURE[function] = rng


def declare_view(function: Callable[..., Any]) -> None:
    """Declare ``function`` to return a view of its arguments, free of side effects on them."""
    VIEWS.add(function)


def find_form(kind: str, target: Any) -> Form | None:
    """Return the form of a ``call_function`` or ``call_method`` target, or None if it is unknown."""
    if kind == "call_method":
        return METHODS.get(target)
    try:
        form = FUNCTIONS.get(target)
    except TypeError:  # an unhashable callable
        return None
    if form is None and is_tensor_method(target):
        return METHODS.get(target.__name__)
    return form


def is_tensor_method(target: Any) -> bool:
    """Check whether ``target`` is an unbound method of Tensor, such as ``torch.Tensor.add``."""
    name = getattr(target, "__name__", None)
    return isinstance(name, str) and getattr(torch.Tensor, name, None) is target


def is_foreign(name: str) -> bool:
    """Check whether a :func:`qualified_name` is neither torch's nor Python's own."""
    if name.startswith("."):
        return not hasattr(torch.Tensor, name[1:])
    return "." in name and name.partition(".")[0] not in ("torch", "operator", "_operator", "builtins", "math")


def qualified_name(target: Any) -> str:
    """Return ``module.qualname`` for a callable, or ``.name`` for the name of a method."""
    if isinstance(target, str):
        return "." + target
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', None) or 'builtins'}.{name}"
