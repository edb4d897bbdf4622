"""Recipes of strangers, thousands of them: no code of theirs runs, whatever they name, and the model stays as it is."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fused
import schedule
from schedule.recipes.recipe import Recipe
from schedule.util.errors import RecipeError
from tests.small import Mlp

SAVED = json.loads((Path(__file__).parent / "saved.json").read_text())
LEADS = (
    "os",
    "sys",
    "subprocess",
    "shutil",
    "builtins",
    "torch",
    "torch.hub",
    "torch.nn.functional",
    "ctypes",
    "pickle",
)
LEADS += (
    "fused",
    "fused.backends.kernel_store",
    "schedule",
    "schedule.recipes.recipe_files",
    "importlib",
    "runpy",
    "torch.nn",
)
STEPS_ON = (
    "system",
    "os",
    "popen",
    "run",
    "load",
    "sys",
    "modules",
    "exec",
    "eval",
    "open",
    "__builtins__",
    "__class__",
)
STEPS_ON += (
    "Module",
    "Linear",
    "gelu",
    "__globals__",
    "__init__",
    "rmtree",
    "import_module",
    "write_whole",
    "nn",
    "_C",
)
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.rmdir")
FORBIDDEN += ("os.chmod", "os.link", "os.symlink", "os.truncate", "os.putenv", "subprocess.", "shutil.", "socket.")
FORBIDDEN += ("ctypes.dlopen", "urllib.", "webbrowser.", "pty.")
"""Beginnings of the names of events that Python reports to its audit hooks."""


def name(draw: random.Random) -> str:
    """A reference into whatever is imported, sometimes of a module's own name."""
    module = draw.choice(LEADS if draw.random() < 0.7 else sorted(sys.modules))
    parts = [draw.choice(STEPS_ON) for _ in range(draw.randint(1, 3))]
    known = sys.modules.get(module)
    if known is not None and draw.random() < 0.5:
        parts[0] = draw.choice(sorted(vars(known)))
    return f"{module}{draw.choice((':', ':', ':', '.', '::', ':.'))}{'.'.join(parts)}"


def word(draw: random.Random) -> str:
    """A name that is well-formed."""
    parts = re.split(r"[.:]+", name(draw))
    split = draw.randint(1, len(parts) - 1)
    return f"{'.'.join(parts[:split])}:{'.'.join(parts[split:])}"


def value(draw: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can hold, most often of the shape of a value in a recipe."""
    kinds: list[Any] = [
        lambda: {"reference": name(draw)},
        lambda: {"make": name(draw), "arguments": {draw.choice(("command", "f", "path")): "touch /tmp/ran"}},
        lambda: {"call_module": {"reference": name(draw)}},
        lambda: {"tuple": [value(draw, depth + 1)]} if depth < 3 else None,
        lambda: {"dict": {"key": value(draw, depth + 1)}} if depth < 3 else [],
        lambda: draw.choice((None, True, 0, -1, 1e309, "", "linear", "*", "../..", [[]], {}, {"device": "cuda:0; ls"})),
    ]
    made: Any = draw.choice(kinds)()
    return made


def fuzzed(draw: random.Random) -> str:
    """A recipe with one to three of its values changed, or with names in the right places."""
    recipe = copy.deepcopy(draw.choice(list(SAVED.values()))["recipe"])
    recipe["architecture"] = ""
    if draw.random() < 0.6:
        new = draw.choice(({"reference": word(draw)}, {"make": word(draw), "arguments": {"command": "touch ran"}}))
        recipe["steps"] = [
            {"find": "m1", "at": ["*"], "pattern": {"reference": word(draw)}, "counts": 1},
            {"call": draw.choice(("replace", "fuse")), "at": ["act"], "arguments": {"new": new}},
        ][draw.randint(0, 1) :]
        return json.dumps(recipe)
    for _ in range(draw.randint(1, 3)):
        change(recipe, draw)
    return json.dumps(recipe)


def change(data: Any, draw: random.Random) -> None:
    """Walk to some value in ``data``, and put another in its place."""
    while isinstance(data, (dict, list)) and data:
        key = draw.choice(list(data) if isinstance(data, dict) else range(len(data)))
        if not isinstance(data[key], (dict, list)) or not data[key] or draw.random() < 0.2:
            data[key] = name(draw) if isinstance(data[key], str) and draw.random() < 0.6 else value(draw)
            return
        data = data[key]


def replay_all(first: int, last: int) -> None:
    """Replay the recipes of these numbers, and say which events of Python's audit were seen."""
    model, x = Mlp(16), torch.zeros(2, 16)
    tempfile.gettempdir()
    schedule.replay(Mlp(16), schedule.optimize(Mlp(16), (x,), cost_guard=False).schedule.recipe(), x)  # imports
    before, seen, counts = copy.deepcopy(model.state_dict()), list[str](), {"read": 0, "refused": 0}
    watched = [True]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if watched[0] and event.startswith(FORBIDDEN):
            seen.append(f"{event}{given}")

    sys.addaudithook(hook)
    with fused.backend("reference"):
        for number in range(first, last):
            try:
                recipe = Recipe.from_json(fuzzed(random.Random(number)))
                counts["read"] += 1
                schedule.replay(model, recipe, x)
            except RecipeError:
                counts["refused"] += 1
    watched[0] = False
    assert not seen, "\n".join(seen[:5])
    assert all(torch.equal(before[key], now) for key, now in model.state_dict().items())
    print(json.dumps(counts))


@pytest.mark.parametrize("numbers", [(0, 500), pytest.param((500, 5000), marks=pytest.mark.slow)])
def test_no_recipe_runs_what_it_names(numbers: tuple[int, int]) -> None:
    code = f"from tests.recipes.test_fuzzed import replay_all; replay_all(*{numbers})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    counts = json.loads(ran.stdout.splitlines()[-1])
    total = numbers[1] - numbers[0]
    assert counts["refused"] > 0.9 * total and counts["read"] > 0.3 * total
