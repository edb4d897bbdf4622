"""Calls made by instrumented code: the user's functions are followed, torch's run as they are."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptFunction

from fused.torch_internals.functions import applied_class
from fused.torch_internals.modes import without_function_modes
from schedule.capture.effects.autograd_functions import is_of_library
from schedule.capture.effects.opaque import _Watched, is_opaque_class
from schedule.capture.effects.regions import TrackedBlock, TrackedFlags, sets_flags
from schedule.capture.graph.messages import MESSAGE_METHODS, log_arguments, log_at
from schedule.capture.graph.scalars import NumberMethod, scalar_of, symbolic
from schedule.capture.guards.origin import is_native_class
from schedule.capture.guards.plain_values import is_atom, is_plain_content, snapshot
from schedule.capture.guards.resolution import class_of
from schedule.capture.guards.sources import Attr, Const, Item, Source
from schedule.capture.python import native_calls as masks
from schedule.capture.python.handler_table import Followed, Handler
from schedule.capture.python.instrument import NoSource, instrumented, is_instrumented
from schedule.capture.python.native_calls import NativeCalls, container_method, equal, fields_of, initialize
from schedule.capture.python.native_queries import KNOWN_MANAGERS, SYMBOLIC, name_of
from schedule.capture.python.protected import Protected, may_swallow
from schedule.capture.recording.hooks import is_collector
from schedule.capture.recording.interception import unwatched
from schedule.capture.recording.structure import leaves, tensors
from schedule.util.errors import TraceError
from schedule.util.internal_errors import perform

_READING = {"update", "extend", "extendleft", "union", "intersection", "difference", "symmetric_difference"}
_READING |= {"intersection_update", "difference_update", "symmetric_difference_update"}
_READING |= {"issubset", "issuperset", "isdisjoint"}
"""Methods of containers that read the containers they are passed."""
_QUIET = "log once (by a cached function), or keep the module that logs a leaf (`leaves=(…,)`)"


_SINGLE_DISPATCH: Any = functools.singledispatch(lambda value: value)
_DISPATCH: Any = _SINGLE_DISPATCH.dispatch


class Calling(NativeCalls):
    """Part of the evaluator for calls."""

    here: Callable[[types.FunctionType], Any]
    set_attr: Callable[[Any, str, Any], None]

    def __init__(self, tracer: Followed, handlers: Mapping[Any, Handler]) -> None:
        super().__init__(tracer)
        self._handlers = handlers
        self._copies: dict[int, tuple[types.FunctionType, types.FunctionType]] = {}
        self._native: dict[types.CodeType, bool] = {}
        self._looked_up: dict[Source, torch.Tensor] = {}
        self._blocks: list[tuple[Any, Any]] = []  # native context managers entered by followed code

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate ``function(*args, **kwargs)``, following its code if it is the user's."""
        strings = self.tracer.strings
        if strings.written and self.on and not self._is_followed(function):
            args, kwargs = strings.handed(function, args, kwargs)
        result = self._call(function, args, kwargs)
        return strings.marked(result) if type(result) is str else result

    def _is_followed(self, function: Any) -> bool:
        """Check whether a call of ``function`` runs followed code, or is made through another call."""
        kind = type(function)
        if kind is types.FunctionType:
            return is_instrumented(function) or not self.is_native(function)
        if isinstance(function, type):
            return not (is_native_class(function) or issubclass(function, BaseException))
        return kind in (types.MethodType, functools.partial) or isinstance(function, nn.Module)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = type(function)
        if kind is weakref.CallableProxyType and self.on:
            raise self.refused("the forward calls what a weak proxy refers to", "call a weakref.ref: `self.ref()(…)`")
        if kind in _CODE or isinstance(function, type):
            handler = self._handlers.get(function)
            if handler is not None and self.on:
                return handler(self, *args, **kwargs)
        if kind is types.MethodType:
            return self._call_method(function, args, kwargs)
        if kind is types.FunctionType:
            return self.call_function(function, args, kwargs)
        if isinstance(function, nn.Module):
            return self.tracer.calls.call(function, args, kwargs)
        if kind is functools.partial:
            return self._call_partial(function, args, kwargs)
        if kind is functools._lru_cache_wrapper:
            return self._call_cached(function, args, kwargs)
        if isinstance(function, type):
            return self._instantiate(function, args, kwargs)
        if kind in _BUILTIN:
            return self._call_builtin(function, args, kwargs)
        if isinstance(function, ScriptFunction):
            return self.tracer.functions.called(function, args, kwargs)
        return self._call_object(function, args, kwargs)

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function, owner = method.__func__, method.__self__
        if (applied := applied_class(method)) is not None:
            return self.tracer.functions.apply(applied, args, kwargs)
        once = isinstance(function, functools._lru_cache_wrapper)
        if isinstance(owner, logging.Logger) and (once or function.__name__ in MESSAGE_METHODS):
            return self._log(method, owner, args, kwargs)
        return self.call(function, owner, *args, **kwargs)

    def _log(self, method: Any, logger: logging.Logger, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a logger, or write a node that logs the message at each call.

        A method behind ``lru_cache``, such as ``warning_once``, writes its message once, so it is allowed.
        """
        if self.on and not isinstance(method.__func__, functools._lru_cache_wrapper):
            level, *message = (
                (args[0], *args[1:]) if method.__name__ == "log" else (MESSAGE_METHODS[method.__name__], *args)
            )
            if isinstance(level, int) and self.call(logger.isEnabledFor, level):
                repeated = log_arguments(logger, level, tuple(message), kwargs)
                if repeated is None or method.__name__ == "exception":
                    raise self.refused("the forward logs what may change from call to call", _QUIET)
                self.tracer.emit(log_at, repeated)
            return None
        args, kwargs = self.tracer.strings.handed(method, args, kwargs)
        return perform(method, *args, **kwargs)

    def _call_cached(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function behind ``lru_cache``.

        Its cached result is used for arguments that are atoms. Tensors are computed anew by the graph; those that
        stay in the cache have data.
        """
        given, keeps = (*args, *kwargs.values()), function.cache_parameters()["maxsize"] != 0
        is_symbolic = any(isinstance(leaf, SYMBOLIC) for _, leaf in leaves(given))  # in the shape of a tensor
        if keeps and all(map(is_atom, given)) and not is_symbolic:
            with without_function_modes():
                cached = perform(function, *args, **kwargs)
            if next(tensors(cached), None) is None:
                asked = functools.partial(function, **kwargs) if kwargs else function
                self.query(asked, args, cached)
                return cached
        return self.call(function.__wrapped__, *args, **kwargs)

    def _call_partial(self, partial: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = self.source_of(partial)
        if source is None:
            return self.call(partial.func, *partial.args, *args, **{**partial.keywords, **kwargs})
        function = self.read(partial.func, Attr(source, "func"))
        self.read(partial.args, Attr(source, "args"))
        self.read(partial.keywords, Attr(source, "keywords"))
        given: dict[str, Any] = self.mapping(partial.keywords)
        return self.call(function, *self.iterate(partial.args), *args, **{**given, **kwargs})

    def dispatched(self, dispatch: Callable[[type], Any], cls: type) -> Any:
        """Return the function that ``functools.singledispatch`` has for a class now, with a guard on it."""
        found = perform(dispatch, cls)
        self.query(dispatch, (cls,), found)
        return found

    def call_function(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function written in Python."""
        original = unwatched(function)
        if original is not function:
            return self.call(original, *args, **kwargs)
        if (mask := masks.expanded(function, args)) is not None:
            return mask
        if is_instrumented(function):
            return perform(function, *args, **kwargs)
        if function.__code__ is _DISPATCH.__code__ and self.on:
            return self.dispatched(function, args[0])
        if function.__code__ is _SINGLE_DISPATCH.__code__ and self.on:
            self.guard_class(args[0])
            return self.call(self.dispatched(function.dispatch, class_of(args[0])), *args, **kwargs)
        if self.on and function in _PASSING and self._is_native_block(args[0]):
            return self.pass_block(function, args)
        if self.on and (known := self.tracer.index_functions.handles(self, function, args, kwargs)) is not None:
            return known()
        if self.on and is_of_library(function):
            return self.tracer.functions.called(function, args, kwargs)
        if self.is_native(function) and not self._reads_state(function, args, kwargs):
            return self.native(function, args, kwargs)
        try:
            copy = self.follow(function)
        except NoSource as error:
            return self._sourceless(function, error, args, kwargs)
        return perform(copy, *args, **kwargs)

    def follow(self, function: types.FunctionType) -> types.FunctionType:
        """Return the instrumented copy of ``function``.

        Raises:
            NoSource: it cannot be made.
        """
        if id(function) not in self._copies:
            copy = instrumented(function, self.here(function))
            self._copies[id(function)] = (function, copy)
        if self.on and self.later.is_due(("code", id(function))):
            self.guard("is", Attr(self.source_of(function) or Const(function), "__code__"), function.__code__)
            self._read_defaults(function)
        return self._copies[id(function)][1]

    def _read_defaults(self, function: types.FunctionType) -> None:
        """Guard on the defaults of a function, as a whole if they are plain values."""
        for name in ("__defaults__", "__kwdefaults__"):
            defaults, source = getattr(function, name), Attr(self.source_of(function) or Const(function), name)
            if not defaults:
                continue
            if is_plain_content(defaults):
                self.guard("content", source, snapshot(defaults))
                continue
            keys = defaults if isinstance(defaults, dict) else range(len(defaults))
            self.guard("length", source, len(defaults))
            for key in keys:
                self.read(defaults[key], Item(source, key))

    def _sourceless(self, function: types.FunctionType, error: NoSource, args: Any, kwargs: Any) -> Any:
        """Run generated code, such as the constructor of a dataclass, as it is, or refuse the call."""
        if not self.on:
            return perform(function, *args, **kwargs)
        self.tracer.containers.read_all((args, kwargs))
        fields = fields_of(function, args[0]) if args else None
        if fields is not None and function.__name__ == "__eq__":
            return equal(self, fields, *args)
        if fields is not None and function.__name__ == "__init__":
            return initialize(self, function, fields, *args, **kwargs)
        generated = function.__code__.co_filename.startswith("<")
        outside = [each for each in (*args, *kwargs.values()) if self._is_state(each)]
        if not generated or (outside and function.__name__ != "__init__"):
            raise self.refused(f"the forward calls {function.__qualname__}, which cannot be followed: {error}")
        return perform(function, *args, **kwargs)

    def _instantiate(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_opaque_class(cls) and self.on and not self.tracer.inside_child:
            return self.tracer.opaque.construct(cls, args, kwargs)
        if is_native_class(cls) or issubclass(cls, (BaseException, nn.Module)) or not self.on:
            return self.native(cls, args, kwargs)
        maker = self.resolve(type(cls), "__call__")
        if isinstance(maker, types.FunctionType):
            native = self.is_native(maker)
            return self.native(cls, args, kwargs) if native else self.call(maker, cls, *args, **kwargs)
        maker, starter = self.resolve(cls, "__new__"), self.resolve(cls, "__init__")
        maker = getattr(maker, "__func__", maker)
        if isinstance(maker, types.FunctionType):
            made = self.call(maker, cls, *args, **kwargs)
        else:
            given = ((), {}) if maker is object.__new__ else (args, kwargs)
            made = perform(cls.__new__, cls, *given[0], **given[1])
        if not isinstance(made, cls):
            return made
        if isinstance(starter, types.FunctionType):
            self.call(starter, made, *args, **kwargs)
        else:
            perform(cls.__init__, made, *args, **kwargs)
        return made

    def _call_builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = getattr(function, "__self__", None)
        if (applied := applied_class(function)) is not None:
            return self.tracer.functions.apply(applied, args, kwargs)
        if type(function) in _UNBOUND and args:
            if scalar_of(args[0]) is not None:
                return self.call(self.attr(args[0], function.__name__), *args[1:], **kwargs)
            bound = perform(function.__get__, args[0], type(args[0]))
            if type(bound) in _BUILTIN and not isinstance(args[0], torch.Tensor):
                return self._call_builtin(bound, args[1:], kwargs)
        if owner is None or isinstance(owner, types.ModuleType):
            return self.native(function, args, kwargs)
        name = function.__name__
        if isinstance(owner, contextvars.ContextVar):
            if self.on and name != "get" and not is_collector(owner):
                raise self.refused(f"the forward calls {name} of a ContextVar, which a graph would not do at each call")
            answer = perform(function, *args)
            if self.on and name == "get":
                self.query(function, args, answer)
            return answer
        if isinstance(owner, (list, dict, set, frozenset, tuple, deque, types.MappingProxyType)):
            if self.source_of(owner) is not None or (self.on and not self.may_write(owner)):
                return container_method(self, owner, name, args, kwargs)
            if self.on and name not in _KEEPING:
                self.refuse_compared(args, owner if isinstance(owner, (list, tuple, deque)) else ())
            if self.on and name in _READING:
                args = tuple(self.mapping(each) if isinstance(each, dict) else self.iterate(each) for each in args)
            given = {key: self.bridged(value) for key, value in kwargs.items()}
            return perform(function, *map(self.bridged, args), **given)
        return self.native(function, args, kwargs)

    def _call_ufunc(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Call a function of numpy on numbers, some of them sizes, and write it as a node if it returns a float."""
        value = perform(function, *map(self.tracer.value_of, args))
        if not isinstance(value, float):
            return self.native(function, args, {})
        return symbolic(self.tracer, self.tracer.emit_scalar(function, self.tracer.as_nodes(args), value), value)

    def _call_object(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(value, NumberMethod):
            return value(*args, **kwargs)
        if self.on and type(value).__name__ == "ufunc" and any(map(scalar_of, args)) and not kwargs:
            return self._call_ufunc(value, args)
        caller = None if isinstance(value, _Watched) or not self.on else self.resolve_of(value, "__call__")
        if isinstance(caller, types.FunctionType):
            return self.call(caller, value, *args, **kwargs)
        return self.native(value, args, kwargs)

    def context(self, value: Any) -> Any:
        """Return the context manager for a ``with`` statement to enter.

        Raises:
            TraceError: it is not written in the user's Python, so the graph would not enter it.
        """
        if masks.is_indexing(value):
            return contextlib.nullcontext()
        if not self.on:
            return value
        if isinstance(value, (torch.autocast, torch.inference_mode)):
            return TrackedBlock(self.tracer.regions, value)
        if sets_flags(value):
            return TrackedFlags(self.tracer, self.tracer.regions, value)
        if not self._is_native_block(value):
            enter, leave = (self.resolve_of(value, name) for name in ("__enter__", "__exit__"))
            context = _Context(self, value, enter, leave)
            return Protected(self, context) if may_swallow(value, leave) else context
        if isinstance(value, KNOWN_MANAGERS):
            return value
        raise self._refused_block(value)

    def _refused_block(self, value: Any) -> TraceError:
        name = getattr(getattr(value, "func", type(value)), "__qualname__", type(value).__qualname__)
        return self.refused(f"the forward enters a block of {name}, which a graph would not enter at each call")

    def _is_native_block(self, value: Any) -> bool:
        """Check whether a context manager runs no code of the user."""
        if isinstance(value, contextlib._GeneratorContextManager):
            return isinstance(value.func, types.FunctionType) and self.is_native(value.func)
        methods = (self.resolve_of(value, name) for name in ("__enter__", "__exit__"))
        return not any(isinstance(each, types.FunctionType) and not self.is_native(each) for each in methods)

    def pass_block(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Call ``__enter__`` or ``__exit__`` of a native context manager as a ``with`` statement does."""
        bound = getattr(function, "__self__", None)
        value, error = (args[0], args[1:]) if bound is None else (bound, args)
        if not self._is_native_block(value):  # a method of the user's calls that of a base class
            if isinstance(value, KNOWN_MANAGERS):
                return perform(function, *args)
            raise self._refused_block(value)
        if name_of(function) == "__enter__":
            self._blocks.append((value, self.context(value)))
            return self._blocks[-1][1].__enter__()
        found = next((each for each in reversed(self._blocks) if each[0] is value), None)
        if found is None:
            raise self.refused(f"the forward leaves a block of {type(value).__qualname__} that it did not enter")
        self._blocks.remove(found)
        return found[1].__exit__(*error)

    def refuse_inspected(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Guard on what a function of ``inspect`` reads of functions; raise if it is handed anything else."""
        if name_of(function) in _KINDS or getattr(function, "__qualname__", "").startswith(_SIGNATURES):
            return
        for each in (*args, *kwargs.values()):
            inspected = getattr(each, "__func__", each)
            if isinstance(inspected, types.FunctionType):
                self.follow(inspected)
            elif not is_atom(inspected):
                raise self.refused(f"the forward hands a {type(each).__name__} to inspect.{name_of(function)}")


class _Context:
    """Context manager with followed methods."""

    def __init__(self, evaluator: Calling, value: Any, enter: Any, leave: Any) -> None:
        self._call = evaluator.call
        self._value, self._enter, self._leave = value, enter, leave

    def __enter__(self) -> Any:
        return self._call(self._enter, self._value)

    def __exit__(self, *error: Any) -> Any:
        return self._call(self._leave, self._value, *error)


_KEEPING = {"append", "appendleft", "extend", "extendleft", "insert", "copy", "pop", "clear", "reverse"}
"""Methods of containers that compare no items."""
_KINDS = {"isclass", "isfunction", "ismethod", "isbuiltin", "isroutine", "ismodule", "isgenerator", "iscoroutine"}
_SIGNATURES = ("Signature.", "Parameter.", "BoundArguments.")
_UNBOUND = (types.MethodDescriptorType, types.WrapperDescriptorType)
_BUILTIN = (types.BuiltinFunctionType, types.MethodWrapperType, *_UNBOUND, types.ClassMethodDescriptorType)
_PASSING = {vars(contextlib._GeneratorContextManager)[name] for name in ("__enter__", "__exit__")}
_CODE = (types.FunctionType, *_BUILTIN)
