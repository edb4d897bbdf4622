"""How :mod:`torch.fx` copies a function with another number of arguments."""

from torch.fx._symbolic_trace import _patch_function as with_arguments

__all__ = ["with_arguments"]
