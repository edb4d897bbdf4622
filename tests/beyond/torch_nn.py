"""Models made of torch.nn's own transformer modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, which has a path of its own in evaluation."""

    def __init__(self, norm_first: bool, activation: str | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Decoder(nn.Module):
    """``nn.TransformerDecoder``: attention of the target, then of the memory."""

    def __init__(self, norm_first: bool, activation: str | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(
            16, 4, 32, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(16))

    def forward(self, tgt: Tensor, memory: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        return self.decoder(tgt, memory, tgt_mask=causal, tgt_is_causal=True)


class Attention(nn.Module):
    """``nn.MultiheadAttention``, and what follows it."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.fc1, self.fc2, self.act = nn.Linear(16, 32), nn.Linear(32, 16), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.fc2(self.act(self.fc1(x + y)))
