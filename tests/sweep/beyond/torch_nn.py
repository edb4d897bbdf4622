"""Models made of torch's own modules."""

from __future__ import annotations

import torch
from torch import nn

from tests import beyond as own
from tests.sweep.beyond.case import Case, L, N, given, indices

_IMAGE = given(input=(N, 3, 8, 8))


def _encoder(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _mlp(*activations: nn.Module) -> nn.Module:
    """One hidden layer for each of ``activations``."""
    hidden = (part for activation in activations for part in (nn.Linear(16, 16), activation, nn.LayerNorm(16)))
    return nn.Sequential(*hidden, nn.Linear(16, 4))


def _convolutional(dimensions: int, normalized: bool) -> nn.Module:
    """Two convolutions of 1, 2 or 3 dimensions, pooled."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dimensions - 1]
    return nn.Sequential(
        convolution(3, 8, 3, padding=1, bias=not normalized),
        norm(8) if normalized else nn.GroupNorm(2, 8),
        nn.ReLU() if normalized else nn.SiLU(),
        convolution(8, 16, 3, stride=2, padding=1),
        nn.GELU(),
        pool(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 3, 3, padding=1),
        nn.Sigmoid(),
    )


class Recurrent(nn.Module):
    """A recurrent network over tokens."""

    def __init__(self, cls: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = cls(16, 16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embedding(tokens))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


_HIDDEN = (N, L, 16)

TORCH: dict[str, Case] = {
    "ResNet": Case(own.ResNet, given(pixel_values=(N, 3, 8, 8))),
    "EfficientNet": Case(own.EfficientNet, given(pixel_values=(N, 3, 8, 8))),
    "TransformerEncoder": Case(_encoder, given(src=_HIDDEN)),
    "TransformerEncoder with norm first": Case(
        lambda: _encoder(norm_first=True, activation="gelu", bias=False), given(src=_HIDDEN)
    ),
    "TransformerEncoder with a mask": Case(
        _encoder,
        given(src=_HIDDEN, src_key_padding_mask=lambda rows, length: torch.arange(length).expand(rows, -1) > 6),
    ),
    "TransformerDecoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2),
        given(tgt=_HIDDEN, memory=(N, 5, 16)),
    ),
    "Transformer": Case(
        lambda: nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True), given(src=(N, 5, 16), tgt=_HIDDEN)
    ),
    "MLP": Case(lambda: _mlp(nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Mish()), given(input=_HIDDEN)),
    "Conv1d": Case(lambda: _convolutional(1, True), given(input=(N, 3, 16))),
    "Conv2d": Case(lambda: _convolutional(2, True), _IMAGE),
    "Conv3d": Case(lambda: _convolutional(3, True), given(input=(N, 3, 4, 8, 8))),
    "Conv1d with group norm": Case(lambda: _convolutional(1, False), given(input=(N, 3, 16))),
    "Conv2d with group norm": Case(lambda: _convolutional(2, False), _IMAGE),
    "Conv3d with group norm": Case(lambda: _convolutional(3, False), given(input=(N, 3, 4, 8, 8))),
    "ConvTranspose2d": Case(_autoencoder, _IMAGE),
    **{
        cls.__name__: Case(lambda cls=cls: Recurrent(cls), given(tokens=indices(32, N, L))) for cls in (nn.GRU, nn.LSTM)
    },
    "RNN": Case(lambda: Recurrent(nn.RNN), given(tokens=indices(32, N, L))),
    "EmbeddingBag": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(32, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        given(input=indices(32, N, L)),
    ),
}
