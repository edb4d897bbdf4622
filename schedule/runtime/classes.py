"""Generated classes of scheduled modules: creation, installation below other swapped classes, and removal.

A generated class has the name of the original class, and that class as its only base besides the mixin. If the module
carries the state of that class, the forward runs a graph. An instance without such state, or of a subclass written by
a user, behaves like the original class.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fused.torch_internals.symbolic_trace import with_arguments
from schedule.capture import TRACING, generated_class
from schedule.util.errors import NotApplicable

STATE = "_schedule_state"
ORIGINAL = "_schedule_original"
_DISPATCH = "_schedule_dispatch"

_generated: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()
_remakes: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


class ScheduledModule:
    """Mixin of every generated class, never instantiated by users."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Run the user's ``__init_subclass__`` for user subclasses, and for generated ones if it assigns ``forward``.

        That of transformers' layers does, so that the forward of the outermost class runs in a checkpoint.
        """
        if ORIGINAL not in vars(cls) or any(map(_assigns_forward, cls.__mro__)):
            super().__init_subclass__(**options)


def _assigns_forward(base: type) -> bool:
    """Check whether the ``__init_subclass__`` of ``base`` assigns ``forward``."""
    told = getattr(vars(base).get("__init_subclass__"), "__func__", None)
    if base is ScheduledModule or not isinstance(told, types.FunctionType):
        return False
    return any(each.opname == "STORE_ATTR" and each.argval == "forward" for each in dis.get_instructions(told))


def scheduled_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the generated subclass of ``cls``, one per class while in use."""
    with TRACING:
        made = _generated.get(cls)
        if made is None:
            members: dict[str, Any] = {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
            }
            if "__firstlineno__" in vars(cls):  # from Python 3.13 on, inspect finds the source of a class by it
                members["__firstlineno__"] = vars(cls)["__firstlineno__"]
            members |= {ORIGINAL: cls, "forward": _dispatching(cls), "__init__": _constructing_original(cls)}
            members |= {"_slow_forward": _traced_as_original(cls), **_copying(cls)}
            bases = (cls,) if issubclass(cls, ScheduledModule) else (ScheduledModule, cls)
            members[_DISPATCH] = members["forward"]
            made = _generated[cls] = type(cls.__name__, bases, members)
        return made


def wraps_forward(scheduled: type[nn.Module]) -> bool:
    """Check whether a base of a generated class has wrapped its dispatching forward."""
    return vars(scheduled)["forward"] is not vars(scheduled)[_DISPATCH]


# -- what the members do -------------------------------------------------------------------------------------


_FORWARD = """
def make(_schedule_class, _schedule_original, _schedule_follow, _schedule_tuple{captured}):
    def forward(self, *args, **kwargs):
        {follow}
        _state = self.__dict__.get("_schedule_state")
        if _state is None or _state.module_class is not _schedule_class:
            return _schedule_original(self, *args, **kwargs)
        return _state.run(self, args, kwargs)
        {assigned}
        return (None{captured})
    return forward
"""
_FOLLOW = "if args.__class__ is not _schedule_tuple: return _schedule_follow({names})"


def _dispatching(cls: type[nn.Module]) -> Callable[..., Any]:
    """Make the dispatching forward, with the original's properties read by torch.jit and torch.fx.

    They are its source, signature, globals and closure; the unreachable last return contains the closure's names. If
    the original has keyword-only or variable arguments, torch.fx calls the function's code with a proxy for each name.
    """
    original: Any = cls.forward
    cells = dict(zip(*_closure(original), strict=True))
    cells.pop("__class__", None)
    names = _followed_names(original)
    patched = functools.partial(with_arguments, original, len(names))
    text = _FORWARD.format(
        captured="".join(f", {name}" for name in cells),
        follow=_FOLLOW.format(names=", ".join(names)) if names else "pass",
        assigned="".join(f"{name} = " for name in names[3:]) + "None",
    )
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    made = namespace["make"](cls, original, lambda *values: patched()(*values), tuple, **dict.fromkeys(cells))
    ours = dict(zip(*_closure(made), strict=True))
    closure = tuple(cells.get(name, ours[name]) for name in made.__code__.co_freevars)
    names_of = getattr(original, "__globals__", namespace)
    return functools.wraps(original)(types.FunctionType(made.__code__, names_of, "forward", None, closure))


def _closure(function: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names and cells of a function's closure."""
    cells = getattr(function, "__closure__", None) or ()
    return (function.__code__.co_freevars if cells else ()), cells


def _followed_names(original: Any) -> list[str]:
    """Return our names for torch.fx's proxies if there are keyword-only or variable arguments, else []."""
    code = getattr(inspect.unwrap(original), "__code__", None)
    variable = 0 if code is None else code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if code is None or not (variable or code.co_kwonlyargcount):
        return []
    count = code.co_argcount + code.co_kwonlyargcount + variable.bit_count()
    return ["self", "args", "kwargs", *(f"_schedule_{index}" for index in range(3, count))][:count]


def _traced_as_original(cls: type[nn.Module]) -> Callable[..., Any]:
    """Make the ``_slow_forward`` called by ``nn.Module`` under ``torch.jit.trace``, tracing the original forward."""

    def _slow_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        table = vars(self)
        state = table.get(STATE)
        if state is None or "forward" in table:
            return cls._slow_forward(self, *args, **kwargs)
        table["forward"] = types.MethodType(state.original, self)
        try:
            return cls._slow_forward(self, *args, **kwargs)
        finally:
            table.pop("forward", None)

    return _slow_forward


def _constructing_original(cls: type[nn.Module]) -> Callable[..., None]:
    """Make an ``__init__`` to let ``type(module)(…)`` create an instance of the original class."""

    @functools.wraps(cls.__init__)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if vars(type(self)).get(ORIGINAL) is cls:
            self.__class__ = cls
        cls.__init__(self, *args, **kwargs)

    return __init__


class Owner:
    """Weak reference to a module, which leads to the copy in a copy of the module."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.refer_to(module)

    def refer_to(self, module: nn.Module | None) -> None:
        """Refer to another module, or to none."""
        self._found = None if module is None else weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        """Return the module, or None if there is none anymore."""
        return None if self._found is None else self._found()

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner(memo.get(id(self())))

    def __reduce__(self) -> Any:
        return Owner, (self(),)


# -- copies --------------------------------------------------------------------------------------------------


def _copying(cls: type[nn.Module]) -> dict[str, Any]:
    """Return methods to copy and pickle instances like the original class, then schedule the result alike."""
    reduces = cls.__reduce__ is not object.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return _copied(self, memo) if STATE in vars(self) else cls.__deepcopy__(self, memo)  # type: ignore[attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if type(self) is not scheduled_class(cls):  # a class on top of ours pickles as it would without ours
            return cls.__reduce_ex__(self, protocol)
        if reduces and STATE in vars(self):
            return _reduced(self, protocol)
        reduced: Any = cls.__reduce_ex__(self, protocol)
        make, args, *rest = reduced
        return (_rebuilt_as_scheduled, (make, tuple(cls if each is type(self) else each for each in args)), *rest)

    members: dict[str, Any] = {"__reduce_ex__": __reduce_ex__}
    return members | ({"__deepcopy__": __deepcopy__} if hasattr(cls, "__deepcopy__") else {})


@contextmanager
def _unscheduled(module: Any) -> Iterator[Any]:
    """Take our class off ``module`` temporarily, and yield its state."""
    cls, state = type(module), vars(module)[STATE]
    take_off(module)
    try:
        yield state
    finally:
        module.__class__ = cls
        vars(module)[STATE] = state


def _copied(self: Any, memo: dict[int, Any]) -> nn.Module:
    """Copy with the class's ``__deepcopy__`` (a GraphModule's makes a new class), then schedule the copy alike."""
    with _unscheduled(self) as state:
        twin: nn.Module = self.__deepcopy__(memo)
    memo[id(self)] = twin
    for name, child in self._modules.items():
        if name not in twin._modules:  # a GraphModule does not copy children unused by its graph
            twin._modules[name] = copy.deepcopy(child, memo)
    own = copy.deepcopy(state, memo)
    own = copy.copy(own) if own is state else own  # a shared state is copied, since the class differs
    own.module_class = type(twin)
    put_on(twin, own)
    return twin


_OF_THE_MODULE = ("module_class", "owner")  # found again where the state is put on the rebuilt module


def _reduced(self: Any, protocol: Any) -> Any:
    """Reduce with the class's ``__reduce_ex__``, extended to schedule the rebuilt module."""
    with _unscheduled(self) as state:
        make, args, *rest = self.__reduce_ex__(protocol)
    attributes = {name: value for name, value in state.__getstate__().items() if name not in _OF_THE_MODULE}
    return (_remade, (make, args, type(state), attributes), *rest)


def _remade(make: Callable[..., Any], args: tuple[Any, ...], kind: Any, attributes: dict[str, Any]) -> Any:
    module = make(*args)
    state = kind.__new__(kind)
    state.__setstate__({**attributes, "module_class": type(module), "owner": Owner(module)})
    put_on(module, state)
    return module


def _rebuilt_as_scheduled(make: Callable[..., Any], args: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = make(*args)
    module.__class__ = scheduled_class(type(module))
    return module


# -- on and off ----------------------------------------------------------------------------------------------


def put_on(module: nn.Module, state: Any) -> None:
    """Make ``module`` run the graphs of ``state``, and keep classes put on it by others.

    Raises:
        NotApplicable: its class has a forward other than the scheduled one.
    """
    table, cls = vars(module), type(module)
    state.owner.refer_to(module)
    if generated_class(cls, state.module_class) is None:
        before = table.get(STATE)
        cls = vars(cls).get(ORIGINAL, cls) if before is None else without(cls, before.module_class)
        if cls.forward is not state.module_class.forward:
            raise NotApplicable(
                f"{cls.__name__} has another forward than {state.module_class.__name__}, which was scheduled",
                fix="undo before the class of a module is exchanged",
            )
        state.module_class = cls
        table[STATE] = state
        module.__class__ = scheduled_class(cls)
    else:
        table[STATE] = state


def take_off(module: nn.Module) -> None:
    """Remove our class and state from ``module``, and keep classes put on it by others."""
    state = vars(module).pop(STATE, None)
    if state is not None:
        module.__class__ = without(type(module), state.module_class)


def without(cls: type, original: type) -> type[Any]:
    """Return ``cls`` with ``original`` in place of its generated class, recreating classes on top of it.

    A class that has a name, or that calls ``super()``, cannot be recreated: it stays, and the generated class under it
    behaves like the original.
    """
    if vars(cls).get(ORIGINAL) is original:
        return original
    if generated_class(cls, original) is None or not _is_anonymous(cls):
        return cls
    bases = tuple(without(base, original) for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    with TRACING:
        made = _remakes.get((cls, original))
        if made is None or any(vars(made).get(name) is not value for name, value in members.items()):
            made = _remakes[cls, original] = type(cls)(
                cls.__name__, bases, {**members, "__qualname__": cls.__qualname__}
            )
    return made


def _is_anonymous(cls: type) -> bool:
    """Check whether only its instances refer to ``cls``, for example if made to swap a module's class."""
    if "<locals>" in cls.__qualname__:
        return False
    named: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        named = getattr(named, part, None)
    functions = (getattr(value, "__func__", value) for value in vars(cls).values())
    codes = (function.__code__ for function in functions if isinstance(function, types.FunctionType))
    return named is not cls and not any("__class__" in code.co_freevars for code in codes)
