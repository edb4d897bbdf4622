"""What the tests of patterns share: tensors, patterns, and ways to look at what was found."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from schedule.patterns import search

X, B, W = torch.randn(2, 3, 4), torch.randn(4), torch.randn(4, 4)


def bias_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def qkv(x, q, k, v):
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def only(graph, pattern, modules=None):
    """The single match."""
    (graph_match,) = search(graph, pattern, modules).graph_matches
    return graph_match


def names(graph_match):
    """Names of the consumed nodes."""
    return [node.name for node in graph_match.nodes]
