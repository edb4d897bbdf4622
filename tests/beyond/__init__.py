"""Models as they are written outside transformers."""

from tests.beyond.convolutional import EfficientNet, ResNet
from tests.beyond.diffusers import UNetBlock
from tests.beyond.experts import GroupedExperts, LoopedExperts, MoeBlock
from tests.beyond.nanogpt import GptMlp, NanoGpt
from tests.beyond.timm import Vit
from tests.beyond.torch_nn import Attention, Decoder, Encoder

__all__ = [
    "Attention",
    "Decoder",
    "EfficientNet",
    "Encoder",
    "GptMlp",
    "GroupedExperts",
    "LoopedExperts",
    "MoeBlock",
    "NanoGpt",
    "ResNet",
    "UNetBlock",
    "Vit",
]
