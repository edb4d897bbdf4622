"""Methods of lists, dicts and sets from outside: each reads a part, or is refused."""

from __future__ import annotations

import types
from typing import Any

from schedule.capture.tracing.reading.items import ItemReads
from schedule.capture.tracing.reading.sources import Source
from schedule.util.internal_errors import perform

_READ_ONLY = {"get", "keys", "values", "items", "copy", "index", "count", "union", "intersection", "difference"}
_READ_ONLY |= {"issubset", "issuperset", "isdisjoint", "symmetric_difference"}
_READ_ONLY |= {"__len__", "__getitem__", "__contains__", "__iter__", "__eq__", "__ne__", "__or__", "__add__"}


def container_method(ev: ItemReads, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a container from outside: guard on the part it reads, or raise if it changes the container."""
    source = ev.source_of(owner)
    if name not in _READ_ONLY:
        if name == "setdefault" and args[0] in owner:
            return ev.item(owner, args[0])
        ev.refuse_write(owner, f"calls {name}() of")
    if source is None:  # an argument: its items are part of the signature
        return perform(getattr(owner, name), *args, **kwargs)
    if name == "__len__":
        ev.guard("length", source, len(owner))
        return len(owner)
    if isinstance(owner, (dict, types.MappingProxyType)):
        if name in ("get", "__getitem__", "__contains__"):
            return _of_dict(ev, source, owner, name, *args)
        if name == "__iter__":
            return iter(ev.keys(owner, source))
        entries = {key: ev.entry(owner, key, source) for key in ev.keys(owner, source)}
        return perform(getattr(entries, name), *args, **kwargs)
    if name == "copy" and isinstance(owner, list):
        return list(ev.items(owner, source))
    return perform(getattr(ev.operand(owner), name), *map(ev.operand, args), **kwargs)


def _of_dict(ev: ItemReads, source: Source, owner: Any, name: str, key: Any, default: Any = None) -> Any:
    found = key in owner
    if name == "__contains__":
        ev.guard("contains" if found else "lacks_item", source, key)
        return found
    if name == "get" and not found:
        ev.guard("lacks_item", source, key)
        return default
    return ev.entry(owner, key, source)
