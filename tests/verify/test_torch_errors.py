"""What torch itself computes wrong is not laid at a schedule's door."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from fused.torch_internals.batch_norm_gradients import corrected_gradients, is_wrong


class Tokens(nn.Module):
    """Tokens of an image, as in detection transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).flatten(2).transpose(1, 2).contiguous() * self.scale


@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_of_a_batch_norm_of_one_sample(samples: int) -> None:
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(samples, 3, 5, 4)
    sch = schedule.create_schedule(model, x)
    assert schedule.optimize(sch, rules=["conv_batch_norm"], cost_guard=False).count() == 1
    assert schedule.verify(sch, x, steps=2).report.equal


def test_torch_is_as_before_afterwards() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, 6, 3, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 6, 3, 3).double()
    result = F.instance_norm(x)

    def is_right() -> bool:
        layouts = (g, g.contiguous(memory_format=torch.channels_last))
        return torch.allclose(*(torch.autograd.grad(result, x, each, retain_graph=True)[0] for each in layouts))

    before = is_right()
    assert before or is_wrong()
    for _ in range(2):
        with corrected_gradients():
            with corrected_gradients():
                assert is_right()
            assert is_right()
        assert is_right() is before
