"""Names bound outside of the function that binds them, by any statement; parts that a statement unpacks."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from tests.adversary.readings import Read, Reading, as_untouched

G: Any = 5


class Opened:
    """A block that binds a value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""


def by_assignment(m: Any) -> None:
    global G
    G = 5


def by_tuple(m: Any) -> None:
    global G
    (_, (G, *_)) = 1, (5, 6)


def by_augmented(m: Any) -> None:
    global G
    G += 0


def by_annotated(m: Any) -> None:
    global G
    G = m.five


def by_walrus(m: Any) -> None:
    global G
    (G := 5)


def by_walrus_in_a_comprehension(m: Any) -> None:
    global G
    [G := each for each in (4, 5)]


def by_for(m: Any) -> None:
    global G
    for G in (4, 5):  # noqa: B007
        pass


def by_for_with_a_tuple(m: Any) -> None:
    global G
    for _, G in ((1, 4), (2, 5)):  # noqa: B007
        pass


def by_with(m: Any) -> None:
    global G
    with Opened(5) as G:
        pass


def by_with_a_tuple(m: Any) -> None:
    global G
    with Opened(1), Opened((1, 5)) as (_, G):
        pass


def by_except(m: Any) -> None:
    global G
    try:
        raise ValueError("5")
    except ValueError as G:  # noqa: F841
        pass


def by_import(m: Any) -> None:
    global G
    import math as G


def by_import_from(m: Any) -> None:
    global G
    from math import pi as G


def by_delete(m: Any) -> None:
    global G
    del G


def by_def(m: Any) -> None:
    global G

    def G() -> None:
        pass


def by_inner_function(m: Any) -> None:
    def inner() -> None:
        global G
        for G in (5,):  # noqa: B007
            pass

    inner()


BINDINGS = [
    by_assignment, by_tuple, by_augmented, by_annotated, by_walrus, by_walrus_in_a_comprehension, by_for,
    by_for_with_a_tuple, by_with, by_with_a_tuple, by_except, by_import, by_import_from, by_delete, by_def,
    by_inner_function,
]  # fmt: skip


class Binding(nn.Module):
    """Binds a name outside on the way."""

    def __init__(self, bind: Callable[[Any], None]) -> None:
        super().__init__()
        self.proj, self.bind, self.five = nn.Linear(4, 4), bind, 5

    def forward(self, x: Tensor) -> Tensor:
        self.bind(self)
        return F.gelu(self.proj(x))


def _optimized(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return schedule.optimize(module, torch.randn(2, 4), cost_guard=False)


@pytest.mark.parametrize("bind", BINDINGS, ids=lambda bind: bind.__name__)
def test_a_global_is_bound_at_every_call(bind: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    table, nothing = globals(), object()
    monkeypatch.setitem(table, "G", 5)
    module = Binding(bind).eval()
    report = _optimized(module)
    assert not report.applied and "assigns 'G'" in str(report), report
    results = []
    for run in (bind, lambda m: module(torch.randn(2, 4))):
        monkeypatch.setitem(table, "G", 7)
        run(module)
        results.append(table.get("G", nothing))
    kinds = [type(each) for each in results]
    assert results[0] == results[1] or (kinds[0] is kinds[1] and kinds[0] is types.FunctionType)
    assert results[0] is not 7 or bind is by_augmented  # noqa: F632


def test_a_variable_of_an_enclosing_function_is_bound_at_every_call() -> None:
    def enclosing() -> tuple[list[Callable[[Any], None]], Callable[[], int], Callable[[int], None]]:
        n = 5

        def by_for(m: Any) -> None:
            nonlocal n
            for n in (5,):  # noqa: B007
                pass

        def by_walrus(m: Any) -> None:
            nonlocal n
            (n := 5)

        def put(value: int) -> None:
            nonlocal n
            n = value

        return [by_for, by_walrus], lambda: n, put

    binds, current, put = enclosing()
    for bind in binds:
        put(5)
        module = Binding(bind).eval()
        report = _optimized(module)
        assert not report.applied and "assigns 'n'" in str(report), report
        put(7)
        module(torch.randn(2, 4))
        assert current() == 5


def test_names_of_the_function_itself_may_be_bound_in_any_way() -> None:
    def read(m: Any) -> Any:
        n = 1

        def inner(k: int) -> int:
            nonlocal n
            for n in (k, k + 1):  # noqa: B007
                pass
            with Opened(n) as (n):
                pass
            return n

        with Opened((1, [2, 3])) as (a, (b, c)), Opened(4) as m_first:
            pass
        for (d, e), f in [((1, 2), 3)]:  # noqa: B007
            pass
        return inner(m.items[0]) + a + b + c + m_first + d + e + f + n

    as_untouched(Reading(read, items=[1, 2]).eval(), lambda m: m.items.__setitem__(0, 5))


# -- parts of what a loop or a block binds ----------------------------------------------------------------------


def by_loop(m: Any) -> Any:
    total = 0.0
    for a, (b, *_) in m.pairs:
        total += a * b
    return total


def by_comprehension(m: Any) -> Any:
    return sum([a * b for a, (b, *_) in m.pairs])


def by_nested_assignment(m: Any) -> Any:
    [(a, (b, *_))] = m.pairs
    return a * b


def by_block(m: Any) -> Any:
    with Opened(m.pairs[0]) as (a, (b, *_)):
        return a * b


@pytest.mark.parametrize("read", [by_loop, by_comprehension, by_nested_assignment, by_block])
def test_parts_that_are_unpacked_are_guarded(read: Read) -> None:
    module = Reading(read, pairs=[[2.0, [3.0, 4.0]]]).eval()
    changes = (lambda m: m.pairs[0].__setitem__(0, 5.0), lambda m: m.pairs[0][1].__setitem__(0, 5.0))
    as_untouched(module, *changes)
