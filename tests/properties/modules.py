"""Random modules: trees of layers as a transformer has them, from plain data that hypothesis can shrink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH = 8
Spec = tuple[Any, ...]
"""(kind, arguments …, parts …), which :func:`build` makes a module of."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}


class Mlp(nn.Module):
    """Two layers, whose bias may fuse with the activation."""

    def __init__(self, act: str, bias: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH)
        self.act = ACTIVATIONS[act]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Gated(nn.Module):
    """A gate and what it lets through."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.act = ACTIVATIONS[act]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Two heads; with a causal mask or without, by hand or by torch's function.

    Its operands may depend on each other: the values are the keys, the keys computed from the queries, or all are one.
    """

    def __init__(self, causal: bool, by_hand: bool, p: float, shares: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout, self.causal, self.by_hand, self.shares = nn.Dropout(p), causal, by_hand, shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (part(x).view(rows, length, 2, WIDTH // 2).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.shares == "q in k":
            k = F.normalize(q, dim=-1)
        elif self.shares:
            k, v = q if self.shares == "q is k" else k, q if self.shares == "q is k" else k
        if self.by_hand:
            scores = q @ k.transpose(-1, -2) * 0.5
            if self.causal:
                later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
            mixed = self.dropout(F.softmax(scores, dim=-1)) @ v
        else:
            p = self.dropout.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class RootMeanSquare(nn.Module):
    """The norm as Llama writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Residual(nn.Module):
    """What goes around, and what goes through: ``x + dropout(part(norm(x)))``."""

    def __init__(self, part: nn.Module, norm: nn.Module, p: float, in_place: bool) -> None:
        super().__init__()
        self.part, self.norm, self.dropout, self.in_place = part, norm, nn.Dropout(p), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.part(self.norm(x)))
        if self.in_place:
            y = y / 2  # what the part returns may be kept for its gradient, this not
            y += x
            return y
        return x + y


class Branches(nn.Module):
    """Two parts of one value, put together."""

    def __init__(self, one: nn.Module, other: nn.Module, how: str) -> None:
        super().__init__()
        self.one, self.other, self.how = one, other, how
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.one(x), self.other(x)
        if self.how == "cat":
            return self.join(torch.cat([one, other], dim=-1))
        return one * torch.sigmoid(other) if self.how == "mul" else one + other


class Twice(nn.Module):
    """One part called twice, as albert does."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x))


class Tied(nn.Module):
    """Two layers with one weight, the second time turned round."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.act = ACTIVATIONS[act]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.act(self.fc(x)), self.fc.weight.t(), self.bias)


class Weight(nn.Parameter):
    """A class of parameters that changes nothing."""


class Root(nn.Module):
    """The model: one or several results, as a tensor, tuple or dict, or a loss whose weight is that of the input."""

    def __init__(self, body: nn.Module, returns: str) -> None:
        super().__init__()
        self.body, self.head, self.returns = body, nn.Linear(WIDTH, WIDTH, bias=False), returns

    def forward(self, x: torch.Tensor) -> Any:
        if self.returns == "loss":
            x = F.linear(x, self.head.weight)
        hidden = self.body(x)
        out = self.head(hidden)
        if self.returns == "loss":
            targets = torch.arange(out.shape[0] * out.shape[1], device=x.device) % WIDTH
            return F.cross_entropy(out.view(-1, WIDTH), targets)
        if self.returns == "tuple":
            return out, hidden
        return {"out": out, "hidden": hidden} if self.returns == "dict" else out


def build(spec: Spec) -> nn.Module:
    """The module that ``spec`` describes, with seeded weights."""
    kind, *rest = spec
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH, bias=rest[0])
    if kind == "act":
        return ACTIVATIONS[rest[0]]()
    if kind == "norm":
        return {"layer": lambda: nn.LayerNorm(WIDTH), "rms": lambda: nn.RMSNorm(WIDTH), "llama": RootMeanSquare}[
            rest[0]
        ]()
    if kind == "dropout":
        return nn.Dropout(rest[0])
    if kind == "residual":
        part, norm, p, in_place = rest
        return Residual(build(part), build(("norm", norm)), p, in_place)
    if kind == "branches":
        return Branches(build(rest[0]), build(rest[1]), rest[2])
    if kind == "sequence":
        return nn.Sequential(*map(build, rest))
    own: dict[str, Callable[..., nn.Module]] = {"mlp": Mlp, "gated": Gated, "attention": Attention, "tied": Tied}
    return own[kind](*rest) if kind in own else Twice(build(rest[0]))


def model_of(spec: Spec, returns: str, subclassed: bool = False) -> nn.Module:
    """The model of a spec; biases are not zero, so that one that is lost shows.

    Args:
        spec: what its body is.
        returns: what it returns.
        subclassed: its parameters are of a class of their own.
    """
    torch.manual_seed(0)
    model = Root(build(spec), returns)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules() if subclassed else ():
        for name, own in module._parameters.items():
            module._parameters[name] = None if own is None else Weight(own.detach())
    return model


_names = st.sampled_from(list(ACTIVATIONS))
_norms = st.sampled_from(["layer", "rms", "llama"])
_rates = st.sampled_from([0.0, 0.1])

leaves: st.SearchStrategy[Spec] = st.one_of(
    st.tuples(st.just("linear"), st.booleans()),
    st.tuples(st.just("act"), _names),
    st.tuples(st.just("norm"), _norms),
    st.tuples(st.just("dropout"), _rates),
    st.tuples(st.just("mlp"), _names, st.booleans()),
    st.tuples(st.just("gated"), _names),
    st.tuples(
        st.just("attention"), st.booleans(), st.booleans(), _rates, st.sampled_from(["", "k is v", "q in k", "q is k"])
    ),
    st.tuples(st.just("tied"), _names),
)


def _larger(parts: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    return st.one_of(
        st.tuples(st.just("residual"), parts, _norms, _rates, st.booleans()),
        st.tuples(st.just("branches"), parts, parts, st.sampled_from(["add", "mul", "cat"])),
        st.lists(parts, min_size=1, max_size=4).map(lambda each: ("sequence", *each)),
        st.tuples(st.just("twice"), parts),
    )


specs = st.recursive(leaves, _larger, max_leaves=5)
models = st.builds(model_of, specs, st.sampled_from(["tensor", "tuple", "dict", "loss"]), st.booleans())
