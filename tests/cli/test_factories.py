"""Models made by code of the user: module:factory and file.py:factory, in all forms, and what can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxschedule.cli.factories import from_factory
from fxschedule.cli.options import refuse_no_model
from fxschedule.cli.output import Code, CommandError
from tests.cli.test_cli import data, run

TEXT = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)

class Makers:
    inner = staticmethod(lambda: nn.Linear(3, 3))

def model(): return nn.Linear(3, 3)
def with_tensor(): return nn.Linear(3, 3), torch.ones(2, 3)
def with_tuple(): return nn.Linear(3, 3), (torch.ones(2, 3),)
def with_dict(): return nn.Linear(3, 3), {"input": torch.ones(2, 3)}
def with_text(): return nn.Linear(3, 3), "ones"
def nothing(): pass
def three(): return nn.Linear(3, 3), torch.ones(2, 3), 1
def needs(size): return nn.Linear(size, size)
def raises():
    raise KeyError("weights.pt")
number = 3
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file with factories."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "made_models.py").write_text(TEXT)
    yield str(tmp_path / "made_models.py")
    sys.modules.pop("made_models", None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model", type(None)),
        ("Net", type(None)),
        ("Makers.inner", type(None)),
        ("with_tensor", torch.Tensor),
        ("with_tuple", tuple),
        ("with_dict", dict),
    ],
)
def test_forms(made: str, name: str, kind: type) -> None:
    loaded = from_factory(f"{made}:{name}")
    assert loaded.model.in_features == 3 and isinstance(loaded.batch, kind)
    assert loaded.origin == f"made by {made}:{name}"


def test_a_module_that_a_file_was_imported_as(made: str) -> None:
    from_factory(f"{made}:model")
    assert from_factory("made_models:with_dict").batch.keys() == {"input"}


def test_a_command_takes_a_file_and_finds_an_example(made: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    assert data("show", f"{made}:model", ".")["graph"][0].endswith("float32[2, 12, 3]")
    found = data("optimize", f"{made}:with_tuple", "--recipe-out", str(recipe))
    assert found["model"] == f"{made}:with_tuple" and recipe.exists()


@pytest.mark.parametrize(
    ("name", "why", "fix"),
    [
        ("modle", "has no 'modle'", "did you mean 'model'?"),
        ("number", "is int, not a function", "without arguments"),
        ("raises", "raised KeyError: 'weights.pt'", "correct it"),
        ("needs", "raised TypeError", "called without arguments"),
        ("nothing", "gave NoneType, not a model", "return an nn.Module"),
        ("three", "gave tuple, not a model", "return an nn.Module"),
        ("with_text", "a model with str as its batch", "a tensor, tuple or dict"),
    ],
)
def test_what_a_factory_does_wrong(made: str, name: str, why: str, fix: str) -> None:
    with pytest.raises(CommandError) as caught:
        from_factory(f"{made}:{name}")
    assert why in caught.value.why and fix in caught.value.fix and caught.value.code == Code.NO_MODEL


def test_the_line_that_raised_is_shown(made: str) -> None:
    result = run("show", f"{made}:raises")
    assert result.exit_code == 3 and 'raise KeyError("weights.pt")' in result.stderr


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        ("import no_such_package", "needs a package: No module named 'no_such_package'", "install no_such_package"),
        ("1 / 0", "raised ZeroDivisionError", "correct it"),
        ("def", "raised SyntaxError", "correct it"),
    ],
)
def test_files_that_cannot_be_imported(made: str, text: str, why: str, fix: str) -> None:
    Path(made).write_text(text)
    with pytest.raises(CommandError) as caught:
        from_factory(f"{made}:model")
    assert why in caught.value.why and fix in caught.value.fix


def test_files_that_are_not_there_or_hidden(made: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nothing is at /none"):
        refuse_no_model("/none")
    with pytest.raises(CommandError, match=r"there is no file none/models\.py"):
        refuse_no_model("none/models.py:make")
    with pytest.raises(CommandError, match="which of its functions makes the model") as caught:
        refuse_no_model(made)
    assert f"{made}:model or {made}:with_tensor" in caught.value.fix
    (tmp_path / "torch.py").write_text(TEXT)
    with pytest.raises(CommandError, match="hidden by another module 'torch'") as caught:
        from_factory(f"{tmp_path / 'torch.py'}:model")
    assert caught.value.fix == "rename the file"


@pytest.mark.parametrize("option", ["--tiny", "--attention=eager"])
def test_options_that_do_not_change_what_a_factory_makes(made: str, option: str) -> None:
    result = run("show", f"{made}:model", option)
    assert result.exit_code == 2 and option.partition("=")[0] in result.stderr and "leave it out" in result.stderr
