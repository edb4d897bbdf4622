"""Items, loops, truth tests and comparisons, with guards on the parts read of outside containers."""

from __future__ import annotations

import itertools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from schedule.capture.effects.opaque import _Watched
from schedule.capture.graph.scalars import computed, scalar_of
from schedule.capture.graph.string_formatting import DisplayedNumber
from schedule.capture.guards.origin import is_changeable, is_fixed
from schedule.capture.guards.plain_values import Tracked, is_atom, is_plain_content, snapshot
from schedule.capture.guards.resolution import ABSENT
from schedule.capture.guards.sources import Const, Item, Query, Source, described
from schedule.capture.python.attribute_reads import BUILTIN_CONTAINERS, AttributeReads
from schedule.capture.python.operators import Operand, has_operators, plain
from schedule.util.internal_errors import perform

_MOST_TENSORS = 64


def unwrapped(method: Any) -> Any:
    """Return the function of a class method; a function as it is."""
    return method.__func__ if isinstance(method, classmethod) else method


class ItemReads(AttributeReads):
    """Part of the evaluator for item reads and comparisons."""

    _looked_up: dict[Source, torch.Tensor]

    def item(self, owner: Any, key: Any) -> Any:
        """Evaluate ``owner[key]``."""
        source = self.source_of(owner)
        key = self.index(owner, key)
        method = self.python_method(owner, "__getitem__")
        if method is not None:
            return method(key)
        if self.on and isinstance(owner, type):
            made = self.resolve(owner, "__class_getitem__")
            if isinstance(made, (classmethod, types.FunctionType)) and not self.is_native(unwrapped(made)):
                return self.call(unwrapped(made), owner, key)
        if source is None or not isinstance(owner, BUILTIN_CONTAINERS):
            if source is not None and not is_fixed(owner):
                raise self.refused(f"the forward looks into a {type(owner).__name__}, {described(source)}")
            fixed = is_fixed(owner) and not isinstance(owner, type) and is_atom(key)
            found = perform(operator.getitem, owner, key)
            return self.read(found, Item(Const(owner), key)) if fixed else found
        if isinstance(key, slice):
            return perform(operator.getitem, (list if isinstance(owner, list) else tuple)(self.iterate(owner)), key)
        if isinstance(owner, (dict, types.MappingProxyType)):
            return self.entry(owner, key, source)
        if isinstance(key, torch.SymInt):
            key = int(key)
        beyond = isinstance(key, int) and not 0 <= key < len(owner)
        if beyond:
            self.guard("length", source, len(owner))
        value = perform(operator.getitem, owner, key)
        if beyond:
            key += len(owner)
        return self.read(value, Item(source, key))

    def entry(self, owner: Any, key: Any, source: Source) -> Any:
        """Return an entry of a dict from outside."""
        if isinstance(owner, dict) and type(owner).__getitem__ is not dict.__getitem__:  # called through super()
            return self._entry_below(owner, self._key(key), source)
        if key in owner:
            return self.read(owner[key], Item(source, self._key(key)))
        self.guard("lacks_item", source, self._key(key))
        if type(owner).__missing__ is not None if hasattr(type(owner), "__missing__") else False:
            raise self.refused(f"the forward asks {described(source)} for an item that it would make")
        return perform(operator.getitem, owner, key)

    def _entry_below(self, owner: dict[Any, Any], key: Any, source: Source) -> Any:
        """Return an entry as stored by ``dict``, below an overriding ``__getitem__`` of ``owner``."""
        self.guard("is", source, owner)
        below = dict.__getitem__.__get__(owner)
        return self.read(perform(below, key), Query(below, (key,)))

    def _key(self, key: Any) -> Any:
        if not (is_atom(key) or is_fixed(key)):
            raise self.refused(f"the forward looks an item up by a {type(key).__name__}")
        return key

    def iterate(self, value: Any) -> Any:
        """Return the iterable for a loop over ``value``, or ``value`` itself if it needs no guard."""
        source = self.source_of(value)
        if isinstance(value, (torch.Tensor, str)) or (type(value) in (list, tuple, range) and source is None):
            return value
        method = self.python_method(value, "__iter__")
        if method is not None:
            return self._steps(method())
        if self.on and self.resolve_of(value, "__iter__") is ABSENT:
            method = self.python_method(value, "__getitem__")
            if method is not None:
                return self._indexed(method)
        if source is not None and isinstance(value, (dict, types.MappingProxyType)):
            return self.keys(value, source)
        if source is not None and isinstance(value, (set, frozenset)):
            found = self._whole(value, source)
            self.guard("keys", source, tuple(value))  # equal sets may have other orders
            return [*found]
        if source is not None and isinstance(value, (list, tuple, deque)):
            return self.items(value, source)
        if source is not None and hasattr(type(value), "__next__"):
            raise self.refused(f"the forward goes through an iterator that it did not make, {described(source)}")
        if source is not None and is_changeable(value):
            raise self.refused(f"the forward goes through a {type(value).__name__}, {described(source)}")
        return value

    def _steps(self, iterator: Any) -> Any:
        """Return an iterator, with a ``__next__`` of its own followed."""
        step = self.python_method(iterator, "__next__")
        return iterator if step is None else self._taken(step, StopIteration)

    def _indexed(self, method: Callable[..., Any]) -> Iterator[Any]:
        """Return the items at 0, 1, … until there is none, as Python does for a class with ``__getitem__`` alone."""
        counter = itertools.count()
        return self._taken(lambda: method(next(counter)), IndexError)

    @staticmethod
    def _taken(step: Callable[[], Any], end: type[Exception]) -> Iterator[Any]:
        while True:
            try:
                item = step()
            except end:
                return
            yield item

    def keys(self, value: Any, source: Source) -> list[Any]:
        """Return the keys of a dict from outside."""
        keys = tuple(value)
        self.guard("keys", source, keys)
        for key in keys:
            if not is_atom(key) and not is_fixed(key):
                self.know(key, Const(key))
        return list(keys)

    def items(self, value: Any, source: Source) -> list[Any]:
        """Return the items of a list or tuple from outside."""
        self.guard("length", source, len(value))
        return [self.read(each, Item(source, index)) for index, each in enumerate(value)]

    def mapping(self, value: Any) -> Any:
        """Return the entries passed by ``**value``."""
        source = self.source_of(value)
        if source is None or not isinstance(value, dict):
            return value
        return {key: self.entry(value, key, source) for key in self.iterate(value)}

    def _whole(self, value: Any, source: Source) -> Any:
        """Read a container as a whole, for example to compare it."""
        if is_plain_content(value, 1 << 16):
            self.guard("content", source, snapshot(value))
            return value
        if isinstance(value, (dict, types.MappingProxyType)):
            return {key: plain(self.operand(self.entry(value, key, source))) for key in self.iterate(value)}
        if isinstance(value, (list, tuple, deque)):
            return type(value)([plain(self.operand(each)) for each in self.iterate(value)])
        kind = type(value).__name__
        raise self.refused(f"the forward reads a {kind}, {described(source)}, whose items cannot be compared")

    def index(self, owner: Any, key: Any) -> Any:
        """Return the key of an item of ``owner``: a user's object gives its number, or is refused."""
        if self.on and isinstance(owner, torch.Tensor):
            self._read_indices(key)
        if not self.on or not has_operators(type(key)):
            return key
        if isinstance(owner, (list, tuple, str, range, deque, torch.Tensor)):
            return perform(operator.index, Operand(self, key))
        return self.key(key) if isinstance(owner, (dict, types.MappingProxyType)) else key

    def key(self, value: Any) -> Any:
        """Return a key of a dict or an item of a set; the hash of a user's object from outside is not followed."""
        if self.on and isinstance(value, torch.Tensor):
            self._look_up(value)
        self.refuse_key(value)
        return value

    def _look_up(self, tensor: torch.Tensor) -> None:
        """Guard on a parameter or buffer being no other one that was looked up, as ``parameters()`` leaves out ties."""
        source = self.tensor_source(tensor)
        if source is None or len(self._looked_up) >= _MOST_TENSORS:
            raise self.refused("the forward looks something up by a tensor, that is by which object it is")
        if self.later.is_due(("tie", source)):
            for other, known in self._looked_up.items():
                if known is not tensor:
                    self.guard("distinct", source, other)
            self._looked_up[source] = tensor

    def _read_indices(self, key: Any) -> None:
        """Guard on the content of lists from outside by which a tensor is indexed."""
        for part in self.iterate(key) if type(key) is tuple else (key,):
            if isinstance(part, BUILTIN_CONTAINERS):
                self.operand(part)

    def refuse_key(self, value: Any) -> None:
        """Raise if ``value`` is an object from outside with methods of its own to compare it."""
        if self.on and has_operators(type(value)) and self.source_of(value) is not None:
            kind = type(value).__name__
            raise self.refused(f"the forward looks something up by a {kind}, which its own methods compare")

    def operand(self, value: Any) -> Any:
        """Read all of ``value``, an operand of an operation."""
        if self.on and has_operators(type(value)):
            return Operand(self, value)
        source = self.source_of(value)
        if source is not None and is_changeable(value):
            raise self.refused(f"the forward computes with a {type(value).__name__}, {described(source)}")
        if source is not None and not is_fixed(value) and isinstance(value, BUILTIN_CONTAINERS):
            return self._whole(value, source)
        return value

    def shown(self, value: Any) -> Any:
        """Guard on a container converted to a string, and return ``value``."""
        if self.on and has_operators(type(value)):
            return Operand(self, value)
        source = self.source_of(value)
        if source is None or is_atom(value):
            return value
        if isinstance(value, BUILTIN_CONTAINERS):
            return self._whole(value, source)
        if is_changeable(value) or not is_fixed(value):
            raise self.refused(f"the forward shows a {type(value).__name__}, {described(source)}")
        return value

    def inverted(self, value: Any) -> Any:
        """Evaluate ``~value``."""
        if scalar_of(value) is not None:
            return computed(self.tracer, operator.invert, value)
        return perform(operator.invert, self.operand(value))

    def displayed(self, value: Any) -> Any:
        """Return ``value`` for formatting, as :meth:`shown`; a symbolic number takes any format."""
        scalar = scalar_of(value)
        return self.shown(value) if scalar is None else DisplayedNumber(self.tracer.strings, scalar)

    def formatted(self, value: Any) -> Any:
        """Return the result of formatting, marked if it names an open size."""
        return self.tracer.strings.marked(value)

    def truth(self, value: Any) -> Any:
        """Guard on the truth of ``value``, and return ``value``."""
        source = self.source_of(value)
        if source is not None and is_changeable(value):
            self.query(bool, (value,), bool(value))
        if source is None or isinstance(value, torch.Tensor) or is_fixed(value):
            return value
        for name in ("__bool__", "__len__"):
            if (method := self.python_method(value, name)) is not None:
                return bool(method())
        if not is_atom(value):
            self.guard("true" if value else "false", source)
        return value

    def _identical(self, a: Any, b: Any) -> None:
        """Guard on the result of a comparison by identity."""
        one, other = self.source_of(a), self.source_of(b)
        one = one if one is not None else self.tensor_source(a)
        other = other if other is not None else self.tensor_source(b)
        if one is not None and other is not None:
            if one != other:
                self.guard("is" if a is b else "distinct", one, other)
        elif one is not None and is_atom(b):
            self.guard("distinct", one, b)
        elif other is not None and is_atom(a):
            self.guard("distinct", other, a)
        elif self.on and a is not b:
            for value, other in ((a, b), (b, a)):
                if (isinstance(value, torch.Tensor) and is_atom(other)) or other is None:
                    self.tracer.ask(value)
            self._distinct(a, b)

    def _distinct(self, a: Any, b: Any) -> None:
        """Guard on ``a is not b`` for two values of the graph, such as two arguments."""
        if isinstance(a, (torch.Tensor, _Watched)) and isinstance(b, (torch.Tensor, _Watched)):
            node = self.tracer.emit(operator.is_, (self.tracer.node_of(a), self.tracer.node_of(b)))
            self.tracer.guard(node, False)
        elif (self.is_given(a) and self.is_given(b)) or (isinstance(a, Tracked) and isinstance(b, Tracked)):
            raise self.refused("the forward asks whether two arguments, or parts of them, are one object")

    def is_(self, a: Any, b: Any) -> bool:
        """Evaluate ``a is b``."""
        self._identical(a, b)
        return a is b

    def is_not(self, a: Any, b: Any) -> bool:
        """Evaluate ``a is not b``."""
        self._identical(a, b)
        return a is not b

    def _equated(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return what to compare: the answer of a followed ``__eq__`` and True, or the operands."""
        followed = []
        for value, other in ((a, b), (b, a)):
            method = self.python_method(value, "__eq__") if self.source_of(value) is not None else None
            if method is not None:
                followed.append(value)
                if (found := method(other)) is not NotImplemented:
                    return found, True
        if not isinstance(a, BUILTIN_CONTAINERS) and not isinstance(b, BUILTIN_CONTAINERS):
            self._identical(a, b)
        for value in (a, b):
            source = self.source_of(value)
            if source is not None and not any(value is each for each in followed) and self._has_native_equality(value):
                raise self.refused(f"the forward compares a {type(value).__name__}, {described(source)}")
        return (a is b, True) if followed else (self.operand(a), self.operand(b))

    def _has_native_equality(self, value: Any) -> bool:
        """Check whether native code compares the content of ``value``, which is not a container or immutable."""
        if isinstance(value, (torch.Tensor, *BUILTIN_CONTAINERS)) or is_atom(value):
            return False
        if is_fixed(value) and not is_changeable(value):
            return False
        return type(value).__eq__ is not object.__eq__ and not has_operators(type(value))

    def eq(self, a: Any, b: Any) -> Any:
        """Evaluate ``a == b``."""
        a, b = self._equated(a, b)
        return perform(operator.eq, a, b)

    def ne(self, a: Any, b: Any) -> Any:
        """Evaluate ``a != b``."""
        a, b = self._equated(a, b)
        return perform(operator.ne, a, b)

    def in_(self, a: Any, b: Any) -> bool:
        """Evaluate ``a in b``."""
        source, method = self.source_of(b), self.python_method(b, "__contains__")
        if method is not None:
            return bool(method(a))
        if isinstance(b, (dict, set, frozenset)):
            self.key(a)
        elif isinstance(b, (list, tuple, deque)) and self._compares(a, b):
            return any(each is a or self.truth(self.eq(each, a)) for each in self.iterate(b))
        by_item = isinstance(b, (set, frozenset)) and (is_atom(a) or is_fixed(a))
        if source is not None and (by_item or isinstance(b, (dict, types.MappingProxyType))):
            found = perform(operator.contains, b, a)
            self.guard("contains" if found else "lacks_item", source, self._key(a))
            return found
        if source is not None and isinstance(b, BUILTIN_CONTAINERS):
            return perform(operator.contains, self._whole(b, source), a)
        if source is not None and is_changeable(b):
            raise self.refused(f"the forward looks into a {type(b).__name__}, {described(source)}")
        followed = self.python_method(b, "__iter__") or self.python_method(b, "__getitem__")
        return perform(operator.contains, b if followed is None else self.iterate(b), a)

    def _compares(self, a: Any, items: Any) -> bool:
        """Check whether a search for ``a`` among ``items`` calls user code, or compares the identity of ``a``."""
        outside = self.source_of(a) is not None and not is_atom(a)
        return self.on and (outside or any(has_operators(type(each)) for each in (a, *items)))

    def not_in(self, a: Any, b: Any) -> bool:
        """Evaluate ``a not in b``."""
        return not self.in_(a, b)

    def python_method(self, value: Any, name: str) -> Callable[..., Any] | None:
        """Return a special method of ``value`` written in Python, to be followed, or None."""
        if not self.on or isinstance(value, (torch.Tensor, _Watched, Tracked)):
            return None
        raw, source = self.resolve_of(value, name), self.source_of(value)
        plain = source is None or is_fixed(value) or is_atom(value)
        if not isinstance(raw, types.FunctionType) or (plain and self.is_native(raw)):
            return None
        return lambda *args: self.call(raw, value, *args)
