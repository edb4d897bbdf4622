"""Which code is torch's, and which is a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

CODE = """
import torch
import torch.nn.functional as F
from torch import nn
import schedule

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
    def forward(self, x):
        return F.softmax(self.proj(x), dim=-1)

assert "linked" in torch.__file__ and "linked" in schedule.__file__
sch = schedule.create_schedule(nn.Sequential(Layer()), (torch.randn(2, 4),))
sch.trace(flatten=True)
print([node.name for node in sch.graph.nodes])
"""


def test_packages_reached_by_a_symbolic_link(tmp_path: Path) -> None:
    """Files of torch and of this package are told apart from a user's by the path that they were imported by."""
    packages, ours = tmp_path / "linked", tmp_path / "linked_too"
    packages.symlink_to(Path(torch.__file__).parents[1])
    ours.symlink_to(Path(__file__).parents[3])
    script = tmp_path / "script.py"
    script.write_text(CODE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ours), str(packages)))}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout
