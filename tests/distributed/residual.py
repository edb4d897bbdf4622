"""Wide residual nets, as Zagoruyko and Komodakis' and as torchvision's, small."""

from __future__ import annotations

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution without a bias that keeps the image, or makes it smaller by ``stride``."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Shortcut(nn.Sequential):
    """What passes by a block that changes the width or the size of the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class Basic(nn.Module):
    """Two convolutions of 3 × 3."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.downsample = Shortcut(inputs, outputs, stride) if (inputs, stride) != (outputs, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, outputs, …]."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(y)
        return result


class Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1, the inner ones twice as wide as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        width = outputs // 2
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = Shortcut(inputs, outputs, stride) if (inputs, stride) != (outputs, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, outputs, …]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(y)
        return result


class WideResNet(nn.Module):
    """A stem, two stages of two blocks, and a classifier of the averaged features."""

    def __init__(self, block: type[Basic | Bottleneck] = Basic, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(3, 8), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(block(8, width), block(width, width))
        self.layer2 = nn.Sequential(block(width, 2 * width, 2), block(2 * width, 2 * width))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] → [batch, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        result: Tensor = self.fc(x.flatten(1))
        return result
