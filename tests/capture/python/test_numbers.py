"""What forwards compute from sizes: all that Python's numbers can do, at other sizes than those traced."""

from __future__ import annotations

import copy
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import state_of

COMPUTED = (
    *("round(h / w)", "round(h / w, 1)", "round(h, -1)", "round(number=h / w, ndigits=1)", "(h / w).__round__()"),
    *("divmod(h, w)[0]", "divmod(-h, w)[1]", "divmod(h / 2, w)[1]", "pow(h, 2, 5)", "pow(h, 2)", "~h"),
    *("h.bit_count()", "h.real", "h.imag", "h.numerator", "h.denominator"),
    *("(h / 4).is_integer()", "float.is_integer(h / 4)", "(h / w).real", "int.__add__(h, w)", "h.conjugate()"),
)
"""Expressions of two sizes, of which the graph is not bound to either."""
BOUND = (
    *("h.to_bytes(2, 'big')[1]", "h.to_bytes(length=2, byteorder='big')[1]", "(h / w).as_integer_ratio()[0]"),
    *("h.bit_length()", "int.bit_length(h)"),
    *("int(f'{h:d}')", "float(f'{h / w:.1f}')", "float(format(h / w, '.1f'))", "len('{:>4d}'.format(h))"),
    *("float('%.1f' % (h / w))", "(h / w).hex() == '0x1'"),
)
"""Expressions that need the numbers themselves: such graphs are of these sizes."""


def _scheduled(expression: str, path: Path) -> tuple[nn.Module, nn.Module]:
    text = f"def forward(self, x):\n    h, w = x.shape\n    return F.gelu(self.linear(x)) + ({expression})\n"
    path.write_text(text)
    linecache.checkcache(str(path))
    namespace: dict[str, Any] = {"F": F}
    exec(compile(text, str(path), "exec"), namespace)
    model: Any = type("Model", (nn.Module,), {"forward": namespace["forward"]})()
    model.linear = nn.Linear(6, 6)
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, torch.randn(8, 6), rules=["bias_gelu"], cost_guard=False).count() == 1
    return model, twin


@pytest.mark.parametrize("expression", [*COMPUTED, *BOUND])
def test_at_other_sizes(expression: str, tmp_path: Path) -> None:
    model, twin = _scheduled(expression, tmp_path / "model.py")
    for rows in (8, 12, 7, 1):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(model(x), twin(x))


@pytest.mark.filterwarnings("error::schedule.FallbackWarning")
@pytest.mark.parametrize("expression", COMPUTED)
def test_one_graph_for_all_sizes(expression: str, tmp_path: Path) -> None:
    model, _ = _scheduled(expression, tmp_path / "model.py")
    for rows in (8, 12, 7):
        model(torch.randn(rows, 6))
    state = state_of(model)
    assert state is not None
    assert not state.adaptations
