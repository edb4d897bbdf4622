"""Instrumented copies of functions compute what the functions do, and name the same lines."""

from __future__ import annotations

import contextlib
import functools
import linecache
import operator
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedule.capture.python.instrument import NoSource, instrumented, is_instrumented, original_code


class Plain:
    """Does what Python does, and keeps what was asked for."""

    def __init__(self, function: Any) -> None:
        self.function, self.asked = function, list[Any]()

    def attr(self, owner: Any, name: str) -> Any:
        self.asked.append(name)
        return getattr(owner, name)

    def item(self, owner: Any, key: Any) -> Any:
        self.asked.append(key)
        return owner[key]

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def protected(self) -> Any:
        return contextlib.nullcontext()

    def name(self, name: str) -> Any:
        self.asked.append(name)
        table = self.function.__globals__
        return (
            table[name] if name in table else getattr(table["__builtins__"], name, None) or table["__builtins__"][name]
        )

    def cell(self, name: str, value: Any) -> Any:
        self.asked.append(name)
        return value

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)

    def set_item(self, owner: Any, key: Any, value: Any) -> None:
        owner[key] = value

    def del_attr(self, owner: Any, name: str) -> None:
        delattr(owner, name)

    def del_item(self, owner: Any, key: Any) -> None:
        del owner[key]

    def augmented(self, name: str, target: Any, value: Any) -> Any:
        import operator

        return getattr(operator, name)(target, value)

    def super(self, cls: type, instance: Any) -> Any:
        return super(cls, instance)

    def same(self, value: Any) -> Any:
        return value

    truth = operand = displayed = formatted = key = iterate = mapping = context = same
    slice = staticmethod(slice)
    inverted = staticmethod(operator.invert)
    is_ = staticmethod(lambda a, b: a is b)
    is_not = staticmethod(lambda a, b: a is not b)
    eq = staticmethod(lambda a, b: a == b)
    ne = staticmethod(lambda a, b: a != b)
    in_ = staticmethod(lambda a, b: a in b)
    not_in = staticmethod(lambda a, b: a not in b)
    note_global = note_cell = same


GAIN = 3


def arithmetic(x: int, *more: int, scale: int = 2, **options: int) -> Any:
    total = x * scale + GAIN
    for index, each in enumerate(more):
        total += each if index % 2 else -each
    return total, {**options, "n": len(more)}, [a for a in more if a > 1], f"{total:>4}"


def targets(box: Any) -> Any:
    box.a, (box.b, *rest), box.items[0] = 1, (2, 3, 4), 5
    box.a += 10
    box.items[-1] *= 2
    first = second = box.items[1:]
    del box.b
    del box.items[1]
    return box.a, rest, box.items, first is second, (lambda y=GAIN: y + box.a)()


def control(x: Any) -> Any:
    found = []
    while x > 0 and not (x > 5 and x != 7):
        x -= 1 if x < 3 else 2
        found.append(x is None or x)
    try:
        assert x >= 0, "negative"
        with pytest.raises(ZeroDivisionError):
            x / 0
    except AssertionError as error:
        found.append(str(error).partition("\n")[0])  # pytest adds lines
    finally:
        found.append("end")
    return found, (y := x + 1) and y


def generators(n: int) -> Any:
    def count(to: int) -> Any:
        for i in range(to):  # noqa: UP028
            yield i

    @functools.lru_cache
    def cached(value: int) -> int:
        nonlocal n
        n += 1
        return value + n

    return list(count(n)), cached(1), cached(1), sorted((j for j in (3, 1, 2)), key=lambda j: -j)


class Base:
    def value(self, factor: int) -> int:
        return 2 * factor


class Derived(Base):
    __hidden = 7

    def value(self, factor: int) -> int:
        return super().value(factor) + self.__hidden


def _enclosed() -> Callable[[int], int]:
    captured = 5
    return lambda x: x + captured


CASES: list[tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any]]] = [
    (arithmetic, lambda: (1, 2, 3), {"scale": 4, "k": 1}),
    (targets, lambda: (SimpleNamespace(items=[1, 2, 3]),), {}),
    (control, lambda: (4,), {}),
    (control, lambda: (-1,), {}),
    (generators, lambda: (3,), {}),
    (Derived.value, lambda: (Derived(), 3), {}),
    (_enclosed(), lambda: (1,), {}),
]


@pytest.mark.parametrize(("function", "given", "options"), CASES)
def test_a_copy_computes_the_same(function: Any, given: Callable[[], tuple[Any, ...]], options: dict[str, Any]) -> None:
    here = Plain(function)
    copy = instrumented(function, here)
    assert is_instrumented(copy) and not is_instrumented(function)
    assert original_code(copy.__code__) is function.__code__
    assert copy(*given(), **options) == function(*given(), **options)


def test_reads_go_through_the_evaluator() -> None:
    here = Plain(arithmetic)
    instrumented(arithmetic, here)(1, 2)
    assert {"GAIN", "enumerate", "len"} <= set(here.asked)
    here = Plain(Derived.value)
    instrumented(Derived.value, here)(Derived(), 3)
    assert here.asked == ["value", "_Derived__hidden"]
    enclosed: Any = _enclosed()
    here = Plain(enclosed)
    instrumented(enclosed, here)(1)
    assert here.asked == ["captured"]


def test_lines_are_those_of_the_function() -> None:
    def failing(x: int) -> int:
        y = x + 1
        return (
            y / 0
        )  # fmt: skip

    def line(function: Any) -> Any:
        with pytest.raises(ZeroDivisionError) as caught:
            function(1)
        frame = traceback.extract_tb(caught.value.__traceback__)[-1]
        return frame.filename, frame.lineno, frame.name

    assert line(instrumented(failing, Plain(failing))) == line(failing)  # type: ignore[arg-type]


def test_code_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {}
    exec("def made(x): return x.y", namespace)
    with pytest.raises(NoSource):
        instrumented(namespace["made"], Plain(namespace["made"]))


def test_code_that_is_no_longer_in_its_file_is_not_followed(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def gain(x):\n    return x * 2\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    file.write_text("def gain(x):\n    return x * 3\n")
    with pytest.raises(NoSource, match="changed since it was loaded"):
        instrumented(names["gain"], Plain(names["gain"]))
    file.write_text("def gain(x):\n    return x * 2\n\n\ndef other(x):\n    return x\n")
    linecache.checkcache(str(file))
    assert instrumented(names["gain"], Plain(names["gain"]))(2) == 4


def test_code_in_a_page_of_text_is_followed(tmp_path: Path) -> None:
    file, names = tmp_path / "page.md", dict[str, Any]()
    code = "class Gain:\n    def gain(self, x):\n        return x * 2\n"
    file.write_text(f"# A page\n\nWith code:\n\n{code}")
    exec(compile("\n" * 4 + code, str(file), "exec"), names)
    gain = names["Gain"].gain
    assert instrumented(gain, Plain(gain))(None, 2) == 4


def test_asserts_that_pytest_has_replaced_do_not_matter() -> None:
    def positive(x: float) -> float:
        assert x > 0
        return x * 2

    assert instrumented(positive, Plain(positive))(2.0) == 4.0
