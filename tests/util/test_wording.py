"""How numbers and calls are written."""

from __future__ import annotations

import pytest

import schedule
from schedule.primitives.registry import call_text
from schedule.util.wording import counted, size_text
from tests.small import bias_gelu, ids, small


def test_counted() -> None:
    assert [counted(n, "place") for n in (0, 1, 2)] == ["0 places", "1 place", "2 places"]
    assert [counted(n, "match", "matches") for n in (1, 2)] == ["1 match", "2 matches"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_122_400, "1.122 MB"), (25e9, "25 GB")]
)
def test_size_text(count: float, text: str) -> None:
    assert size_text(count) == text


def test_calls_name_what_has_a_default() -> None:
    sch = schedule.create_schedule(small(), ids())
    matches = sch["blocks.*.mlp"].find(bias_gelu)
    sch["blocks.*.mlp"].fuse(matches[:1], None)
    sch["blocks.*"].checkpoint(every=2)
    sch["blocks.1.mlp"].trace(True)
    sch["blocks.1.mlp"].annotate("fc1.weight", key="decay", value=0.0)
    schedule.optimize(sch["blocks.1.mlp"], rules="bias_activation", cost_guard=False)
    assert [step.description for step in sch.history] == [
        "fuse(bias_gelu, compiler=None) on blocks.*.mlp (2 modules)",
        "checkpoint(every=2) on blocks.* (2 modules)",
        "trace(flatten=True) on blocks.1.mlp",
        "annotate('fc1.weight', 'decay', 0.0) on blocks.1.mlp",
        "optimize(bias_gelu_tanh) on 1 match in 1 module",
    ]


def test_calls_of_what_takes_any_keyword() -> None:
    def softened(sch: schedule.Schedule, match: object, **options: float) -> None: ...

    assert call_text(softened, {"match": 1, "options": {"strength": 2.0}}) == "softened(1, strength=2.0)"
