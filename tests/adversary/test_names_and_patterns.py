"""Patterns of ``match``, and builtins: what they read is guarded, and a case is taken as in Python."""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import inspect
import pickle
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.capture.tracing.reading.guard import Guard
from schedule.capture.tracing.reading.instrument import NoSource
from schedule.capture.tracing.reading.ledger import Ledger
from schedule.capture.tracing.reading.sources import Const, Item
from schedule.capture.tracing.reading.transform import Transformer
from tests.adversary.matches import (
    MATCHES,
    SUBJECTS,
    Color,
    Keyed,
    Names,
    Odd,
    Point,
    Point3,
    Row,
    Setting,
    Table,
    by_builtin_class,
    by_captured_attribute,
    by_captures_of_guards,
    by_class,
    by_local_values,
    by_mapping,
    by_none,
    by_point,
    by_sequence,
    by_truth,
    by_value,
)
from tests.adversary.readings import Read, Reading, as_untouched, fallbacks

# -- patterns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", MATCHES, ids=lambda read: read.__name__)
def test_a_match_takes_the_case_that_it_takes_in_python(read: Read) -> None:
    for name, make in SUBJECTS.items():
        try:
            module, twin = (Reading(read, subject=make(), items=[1, 2]).eval() for _ in range(2))
            twin.load_state_dict(module.state_dict())
            as_untouched(module, twin=twin)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, value)


def _of_subject(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda m: change(m.subject)


CHANGES: dict[str, tuple[Read, Callable[[], Any], Callable[[Any], Any]]] = {
    "an attribute compared": (by_class, Setting, _of_subject(_set("mode", "y"))),
    "an attribute captured": (by_captured_attribute, Setting, _of_subject(_set("k", 3.0))),
    "the class": (by_class, Setting, _set("subject", Point(2.0, 3.0))),
    "None": (by_none, Setting, _set("subject", None)),
    "not None": (by_none, lambda: None, _set("subject", Setting())),
    "True is not 1": (by_truth, lambda: True, _set("subject", 1)),
    "an attribute by position": (by_point, lambda: Point(2.0, 3.0, ["scaled", ""]), _of_subject(_set("y", 4.0))),
    "an attribute of a guard": (by_point, lambda: Point3(2.0, 3.0, [], 4.0), _of_subject(_set("z", 0.0))),
    "an item of a list of an object": (
        by_point,
        lambda: Point(2.0, 3.0, ["scaled", ""]),
        _of_subject(lambda point: point.tags.__setitem__(0, "plain")),
    ),
    "an alternative": (by_point, lambda: Point(1.0, 3.0), _of_subject(_set("x", 4.0))),
    "what a property reads": (by_point, lambda: Odd(3), _of_subject(_set("number", 4))),
    "an attribute that was missing": (by_point, lambda: Odd(4), _of_subject(_set("missing", 4))),
    "the length of a list": (by_sequence, lambda: [4, 2], _of_subject(lambda items: items.append(5))),
    "an empty list": (by_sequence, list, _of_subject(lambda items: items.append(1))),
    "an item of a list": (by_sequence, lambda: [4, 2], _of_subject(lambda items: items.__setitem__(0, 5))),
    "the last item": (by_sequence, lambda: [1, 2, -1], _of_subject(lambda items: items.__setitem__(2, 1))),
    "an item below a star": (by_sequence, lambda: [1, 2, -1], _of_subject(lambda items: items.__setitem__(1, 5))),
    "a tuple for a text": (by_sequence, lambda: "text", _set("subject", ("text",))),
    "an item of a deque": (
        by_sequence,
        lambda: collections.deque([4, 2]),
        _of_subject(lambda items: items.appendleft(1)),
    ),
    "an item of a user's sequence": (by_sequence, lambda: Row(4, 2), _of_subject(lambda row: row.content.append(1))),
    "a list in a list": (by_sequence, lambda: ["mean", [2.0]], _of_subject(lambda items: items[1].append(1))),
    "an entry": (by_mapping, lambda: {"type": "scale", "by": 3}, _of_subject(lambda d: d.update(by=4))),
    "an entry that is gone": (by_mapping, lambda: {"type": "scale", "by": 3}, _of_subject(lambda d: d.pop("by"))),
    "an entry of the rest": (by_mapping, lambda: {"type": "x", "a": 1, "b": 2}, _of_subject(lambda d: d.update(b=4))),
    "an entry that was missing": (by_mapping, lambda: {"n": 0}, _of_subject(lambda d: d.update(x=4))),
    "a list in a dict in a dict": (
        by_mapping,
        lambda: {"deep": {"er": [3]}},
        _of_subject(lambda d: d["deep"]["er"].__setitem__(0, 4)),
    ),
    "an entry of a user's mapping": (
        by_mapping,
        lambda: Table(type="scale", by=3),
        _of_subject(lambda table: table.content.update(by=4)),
    ),
    "the class of a number": (by_builtin_class, lambda: 4, _set("subject", True)),
    "the class of a module": (by_builtin_class, nn.GELU, _set("subject", nn.ReLU())),
    "an attribute of a module": (by_builtin_class, nn.ReLU, _of_subject(_set("inplace", True))),
    "an enum": (by_builtin_class, lambda: Color.RED, _set("subject", Color.BLUE)),
    "a name bound before a guard": (
        by_captures_of_guards,
        lambda: [4, 2],
        _of_subject(lambda items: items.__setitem__(0, 5)),
    ),
    "an object in a tuple": (by_local_values, lambda: [Setting()], lambda m: setattr(m.subject[0], "k", 4.0)),
    "a length in a tuple": (by_local_values, lambda: 3, lambda m: m.items.append(3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_pattern_reads_is_guarded(name: str) -> None:
    read, make, change = CHANGES[name]
    as_untouched(Reading(read, subject=make(), items=[1, 2]).eval(), change)


CLASS_CHANGES: dict[str, tuple[Read, Callable[[], Any], type, str, Any]] = {
    "a value": (by_value, lambda: "x", Names, "A", "q"),
    "a key": (by_mapping, lambda: {"x": 4}, Names, "A", "q"),
    "names of positions": (by_point, Keyed, Keyed, "__match_args__", ("two",)),
    "a property": (by_point, lambda: Odd(3), Odd, "is_odd", property(lambda self: False)),
}


@pytest.mark.parametrize("name", CLASS_CHANGES)
def test_what_a_pattern_reads_of_a_class_is_guarded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, make, cls, attribute, value = CLASS_CHANGES[name]
    module, x = Reading(read, subject=make()).eval(), torch.randn(2, 4)
    twin, before = copy.deepcopy(module), module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert schedule.optimize(module, x, cost_guard=False).applied
        torch.testing.assert_close(module(x), before)
        assert not fallbacks(module)
        monkeypatch.setattr(cls, attribute, value)
        assert not torch.equal(twin(x), before), "the change matters"
        torch.testing.assert_close(module(x), twin(x))


def test_a_change_that_no_pattern_reads_costs_no_fallback() -> None:
    module, x = Reading(by_class, subject=Setting()).eval(), torch.randn(2, 4)
    assert schedule.optimize(module, x, cost_guard=False).applied
    expected = module(x)
    module.subject.k = 17.0  # type: ignore[union-attr]
    torch.testing.assert_close(module(x), expected)
    assert not fallbacks(module)


class Sizes(nn.Module):
    """Patterns of sizes and of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        z = F.gelu(self.proj(x))
        match mask:
            case None:
                z = z * 5
            case Tensor(ndim=2):
                z = z * mask
            case {"by": by} | [by]:
                z = z * by
        match x.shape[0] > 2:
            case True:
                z = z * 7
        match x.shape, f"{x.shape[0]} rows".split():
            case (2, _), _:
                return z * 2
            case (int(n), 4), ["3", *_]:
                return z * n
            case (int(n), 4), _:
                return z * n * 3
        return z


@pytest.mark.parametrize("example", [None, torch.randn(2, 4), [torch.randn(2, 4)], {"by": torch.randn(2, 4)}], ids=type)
def test_patterns_of_sizes_and_arguments(example: Any) -> None:
    module = Sizes().eval()
    twin = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert schedule.optimize(module, (torch.randn(2, 4), example), cost_guard=False).applied
        for rows in (2, 3, 1, 2):
            mask = torch.randn(rows, 4)
            for given in (None, mask, [mask], {"by": mask}, mask[0], []):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(module(x, given), twin(x, given))


def too_many(m: Any) -> Any:
    match m.subject:
        case Point(_, _, _, _):
            return 2
    return 7


def twice_one(m: Any) -> Any:
    match m.subject:
        case Point(_, x=_):
            return 2
    return 7


def no_class(m: Any) -> Any:
    match m.subject:
        case m.factory():
            return 2
    return 7


def too_many_of_a_builtin(m: Any) -> Any:
    match m.subject:
        case Setting(_) | Point(x=int(_, _)):
            return 2
    return 7


@pytest.mark.parametrize("read", [too_many, twice_one, no_class, too_many_of_a_builtin], ids=lambda read: read.__name__)
def test_an_error_of_a_pattern_is_pythons(read: Read) -> None:
    """A graph is made for a subject without an error, and one with it runs the user's code."""
    module = Reading(read, subject=3, factory=Point).eval()
    x = torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert schedule.optimize(module, x, cost_guard=False).applied
        for subject, factory in ((Point(2, 3.0), len), (Setting(), len)):
            module.subject, module.factory = subject, factory
            twin = Reading(read, subject=subject, factory=factory).eval()
            try:
                expected = "no error" if twin(x) is not None else ""
            except TypeError as error:
                expected = str(error)
            try:
                got = "no error" if module(x) is not None else ""
            except TypeError as error:
                got = str(error)
            assert got == expected


def test_a_pattern_that_is_not_known_is_refused_with_its_line() -> None:
    class Unknown(ast.MatchSingleton):
        pass

    tree = ast.parse(textwrap.dedent(inspect.getsource(by_none)))
    definition: Any = tree.body[0]
    case = definition.body[0].cases[0]
    case.pattern = ast.copy_location(Unknown(None), case.pattern)
    with pytest.raises(NoSource, match=r"line 3 holds a Unknown"):
        Transformer(by_none.__code__, definition, "").result()


# -- names that are built in --------------------------------------------------------------------------------


def test_a_builtin_of_the_user_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "H_SCALE", 1.5, raising=False)
    module = Reading(lambda m: H_SCALE).eval()  # type: ignore[name-defined]  # noqa: F821
    as_untouched(module, lambda m: monkeypatch.setattr(builtins, "H_SCALE", 3.0), once=True)


def test_a_builtin_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Reading(lambda m: len(m.items), items=[1, 2]).eval()
    as_untouched(module, lambda m: monkeypatch.setattr(builtins, "len", lambda items: 17), once=True)
    monkeypatch.undo()


def test_a_builtin_that_is_added_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        try:
            return H_LATER  # type: ignore[name-defined]
        except NameError:
            return 2

    as_untouched(Reading(read).eval(), lambda m: monkeypatch.setattr(builtins, "H_LATER", 3, raising=False), once=True)


def test_a_builtin_read_beside_a_local_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        inner = [H_BESIDE for H_BESIDE in (1, 2)]
        return H_BESIDE + len(inner)  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setattr(builtins, "H_BESIDE", 1.5, raising=False)
    as_untouched(Reading(read).eval(), lambda m: monkeypatch.setattr(builtins, "H_BESIDE", 3.0), once=True)


def test_guards_on_builtins_and_loaded_modules_are_saved() -> None:
    kept = Ledger(
        [
            Guard("is", Item(Const(vars(builtins)), "len"), len),
            Guard("is", Item(Const(sys.modules), "json"), Const(__import__("json"))),
            Guard("lacks_item", Const(sys.modules), "no_such_module"),
        ]
    )
    loaded = pickle.loads(pickle.dumps(kept))
    assert len(loaded.guards) == 3 and loaded.holds(nn.Module())
    assert loaded.guards[0].source.base.value is vars(builtins) and loaded.guards[1].source.base.value is sys.modules
