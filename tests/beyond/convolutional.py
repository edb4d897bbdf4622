"""Convolutional models as torchvision and timm write them: in place, with identities that options leave behind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.beyond.timm import DropPath


class Bottleneck(nn.Module):
    """A block of a ResNet, with a shortcut of its own where the width changes."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.drop_block, self.act2 = nn.Identity(), nn.ReLU(True)
        self.conv3, self.bn3 = nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.drop_path, self.act3 = DropPath(0.0), nn.ReLU(True)
        self.downsample: nn.Module | None = None
        if inputs != 2 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.drop_block(self.bn2(self.conv2(x))))
        x = self.drop_path(self.bn3(self.conv3(x)))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act3(x)


class ResNet(nn.Module):
    """A stem, three blocks, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)
        self.layer1 = nn.Sequential(Bottleneck(8, 8), Bottleneck(16, 8), Bottleneck(16, 8))
        self.fc = nn.Linear(16, 4)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(pixel_values)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layer1(x), 1), 1))


class NormAct(nn.BatchNorm2d):
    """A batch norm with the activation in it, and a forward of its own."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__(width)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        of_batch = True if self.training else self.running_mean is None and self.running_var is None
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            of_batch,
            factor,
            self.eps,
        )
        return self.act(self.drop(x))


class InvertedResidual(nn.Module):
    """A block of an EfficientNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_pw, self.bn1 = nn.Conv2d(width, 4 * width, 1, bias=False), NormAct(4 * width, nn.SiLU(inplace=True))
        self.conv_dw = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width, bias=False)
        self.bn2 = NormAct(4 * width, nn.Hardswish(inplace=True))
        self.conv_pwl, self.bn3 = nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.drop_path = DropPath(0.0)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        return self.drop_path(self.bn3(self.conv_pwl(x))) + shortcut


class EfficientNet(nn.Module):
    """Two blocks, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), NormAct(8, nn.SiLU(inplace=True))
        self.blocks = nn.Sequential(InvertedResidual(8), InvertedResidual(8))
        self.classifier = nn.Linear(8, 4)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.blocks(self.bn1(self.conv_stem(pixel_values)))
        return self.classifier(x.mean((2, 3)))
