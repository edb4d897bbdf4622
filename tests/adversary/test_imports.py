"""Imports in a forward: the loaded modules and what is read of them are guarded."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

import pytest

from tests.adversary.readings import Read, Reading, as_untouched


def _put(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> types.ModuleType:
    """Load a module of this name, and of the packages above it."""
    made = types.ModuleType(name)
    vars(made).update(values, __path__=[])
    monkeypatch.setitem(sys.modules, name, made)
    above, _, own = name.rpartition(".")
    if above:
        monkeypatch.setattr(sys.modules[above], own, made, raising=False)
    return made


def plain_import(m: Any) -> Any:
    import h_top

    return h_top.SCALE


def import_as(m: Any) -> Any:
    import h_top as named

    return named.SCALE


def import_below(m: Any) -> Any:
    import h_top.sub.last

    return h_top.sub.last.SCALE


def import_below_as(m: Any) -> Any:
    import h_top.sub.last as named

    return named.SCALE


def from_import(m: Any) -> Any:
    from h_top import SCALE

    return SCALE


def from_import_as(m: Any) -> Any:
    from h_top.sub.last import OTHER
    from h_top.sub.last import SCALE as k

    return k + OTHER


def from_import_of_a_module(m: Any) -> Any:
    from h_top.sub import last

    return last.SCALE


IMPORTS = [
    plain_import, import_as, import_below, import_below_as, from_import, from_import_as, from_import_of_a_module,
]  # fmt: skip


def _put_all(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    for name in ("h_top", "h_top.sub", "h_top.sub.last"):
        _put(monkeypatch, name, SCALE=scale, OTHER=1.0)


@pytest.mark.parametrize("read", IMPORTS, ids=lambda read: read.__name__)
def test_an_imported_module_that_is_replaced_is_noticed(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_all(monkeypatch, 1.5)
    as_untouched(Reading(read).eval(), lambda m: _put_all(monkeypatch, 3.0), once=True)


@pytest.mark.parametrize("read", IMPORTS, ids=lambda read: read.__name__)
def test_a_value_of_an_imported_module_is_guarded(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_all(monkeypatch, 1.5)
    last = sys.modules["h_top.sub.last" if "below" in read.__name__ or "_of_" in read.__name__ else "h_top"]
    last = sys.modules["h_top.sub.last"] if read is from_import_as else last
    as_untouched(Reading(read).eval(), lambda m: monkeypatch.setattr(last, "SCALE", 3.0), once=True)


def test_a_value_that_a_module_computes_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"SCALE": 1.5}

    def computed(name: str) -> Any:
        if name in table:
            return table[name]
        raise AttributeError(name)

    _put(monkeypatch, "h_top", __getattr__=computed)
    as_untouched(Reading(from_import).eval(), lambda m: table.update(SCALE=3.0), once=True)


def or_without(m: Any) -> Any:
    try:
        import h_missing.sub
    except ImportError:
        return 2
    return h_missing.sub.SCALE


def or_without_a_name(m: Any) -> Any:
    try:
        from h_top import MISSING
    except ImportError:
        return 2
    return MISSING


def test_a_module_that_could_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(m: Any) -> None:
        _put(monkeypatch, "h_missing")
        _put(monkeypatch, "h_missing.sub", SCALE=3.0)

    as_untouched(Reading(or_without).eval(), load, once=True)


def test_a_module_that_was_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h_top", None)

    def read(m: Any) -> Any:
        try:
            import h_top
        except ImportError:
            return 2
        return h_top.SCALE

    as_untouched(Reading(read).eval(), lambda m: _put(monkeypatch, "h_top", SCALE=3.0), once=True)


def test_a_name_that_could_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    top = _put(monkeypatch, "h_top")
    change = lambda m: monkeypatch.setattr(top, "MISSING", 3.0, raising=False)  # noqa: E731
    as_untouched(Reading(or_without_a_name).eval(), change, once=True)


def test_an_import_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        try:
            from h_top import MISSING
        except ImportError as error:
            return float(len(str(error))) + (error.name == "h_top")
        return MISSING

    _put(monkeypatch, "h_top")
    as_untouched(Reading(read).eval())


def test_a_submodule_that_only_the_loaded_modules_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        from h_top import lone

        return lone.SCALE

    def put(scale: float) -> None:
        _put(monkeypatch, "h_top.lone", SCALE=scale)
        monkeypatch.delattr(sys.modules["h_top"], "lone")

    _put(monkeypatch, "h_top")
    put(1.5)
    as_untouched(Reading(read).eval(), lambda m: put(3.0), once=True)


def test_a_relative_import_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        from . import h_beside
        from .h_beside import OTHER

        return h_beside.SCALE + OTHER

    def put(scale: float) -> None:
        _put(monkeypatch, f"{__package__}.h_beside", SCALE=scale, OTHER=scale)

    put(1.5)
    as_untouched(Reading(read).eval(), lambda m: put(3.0), once=True)


def test_an_import_by_a_function_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    _put_all(monkeypatch, 1.5)
    original, fake = builtins.__import__, types.SimpleNamespace(SCALE=3.0)

    def importing(name: str, *rest: Any, **options: Any) -> Any:
        return fake if name == "h_top" else original(name, *rest, **options)

    as_untouched(
        Reading(plain_import).eval(), lambda m: monkeypatch.setattr(builtins, "__import__", importing), once=True
    )
