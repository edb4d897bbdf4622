"""Which code is torch's, and which is a user's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

CODE = """
import torch
from torch import nn
import schedule
assert "linked" in torch.__file__ and "linked" in schedule.__file__
model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
sch = schedule.create_schedule(model, (torch.randn(2, 4),))
sch.trace(flatten=True)
print([node.op for node in sch.graph.nodes])
"""


def test_packages_reached_by_a_symbolic_link(tmp_path: Path) -> None:
    """Files of torch and of this package are told apart from a user's by the path that they were imported by."""
    packages, ours = tmp_path / "linked", tmp_path / "linked_too"
    packages.symlink_to(Path(torch.__file__).parents[1])
    ours.symlink_to(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ours), str(packages)))}
    command = [sys.executable, "-c", textwrap.dedent(CODE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "call_module" not in done.stdout and "call_function" in done.stdout
