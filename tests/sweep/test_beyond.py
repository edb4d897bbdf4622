"""Models of other libraries in the sweep: named, built, and called with other sizes."""

from __future__ import annotations

import pytest

from tests.sweep import beyond
from tests.sweep.models import NotBuilt, build
from tests.sweep.parts import inputs_for


@pytest.mark.parametrize("name", [name for name in beyond.names() if name.startswith("torch:")])
def test_built_by_name(name: str) -> None:
    built = build(name)
    built.model(**built.batch)
    built.model(**inputs_for(built.model, 3, 9))
    (first, *_), (other, *_) = built.batch.values(), inputs_for(built.model, 3, 9).values()
    assert first.shape[0] == 2 and other.shape[0] == 3


def test_what_is_too_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beyond, "MAX_PARAMETERS", 10)
    with pytest.raises(NotBuilt, match="too large: more than 10 parameters"):
        build("torch:ResNet")
