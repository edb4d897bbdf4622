"""Chains of layers that hand one tensor of hidden states on."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx, nn

from schedule.capture import TensorSpec
from schedule.distributed.tensor_parallel.sharded_modules import stays_call
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.util.errors import TraceError


@dataclass(frozen=True)
class Link:
    """One layer of a chain: its path, the argument with the hidden states, their bytes and the sequence length."""

    path: str
    argument: str
    nbytes: int
    length: int


def chains_of(paths: Collection[str], root: nn.Module, state: Sharded) -> Iterator[list[Link]]:
    """Yield the chains of modules passing a tensor from one to the next, outer chains first.

    Only modules around one of ``paths`` are links of a chain.
    """
    for path, module in root.named_modules():
        below = f"{path}." if path else ""
        if stays_call(module) or not any(one.startswith(below) for one in paths):
            continue
        whole = state.whole_forward(module)
        if isinstance(whole, TraceError):
            continue
        chain: list[Link] = []
        last: fx.Node | None = None
        for node in whole.graph.nodes:
            target = f"{below}{node.target}"
            if node.op != "call_module" or not any(one.startswith(f"{target}.") for one in paths):
                continue
            link, stream = _link(target, node, root)
            if link is None or stream is None:
                continue
            if chain and _origin(stream) is not last:
                yield chain
                chain = []
            chain, last = [*chain, link], node
        if chain:
            yield chain


def _origin(node: fx.Node) -> fx.Node:
    """Follow ``getitem`` nodes from ``node`` back to the call."""
    while getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _link(path: str, node: fx.Node, root: nn.Module) -> tuple[Link | None, fx.Node | None]:
    """Find the argument ``[batch, seq, features]`` returned in the same shape, and its node.

    Only the first tensor argument is considered.
    """
    names = [name for name in inspect.signature(type(root.get_submodule(path)).forward).parameters if name != "self"]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    out = node.meta.get("spec")
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    for name, value in given.items():
        spec = value.meta.get("spec") if isinstance(value, fx.Node) else None
        if isinstance(value, fx.Node) and isinstance(spec, TensorSpec) and isinstance(out, TensorSpec):
            if spec.ndim == 3 and spec.shape == out.shape and spec.dtype.is_floating_point:
                return Link(path, name, spec.nbytes, spec.shape[1]), value
            return None, None
    return None, None
