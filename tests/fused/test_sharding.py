"""DTensor inputs, on two gloo processes; the cases are in sharded_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fused.processes import run_by_two


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ops_on_dtensors_run_on_shards_and_send_nothing(tmp_path: Path) -> None:
    run_by_two(Path(__file__).with_name("sharded_cases.py"), tmp_path)
