"""The reference of the fused ops, from their docstrings."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

import fused
from docs.generate.docstrings import documented, markdown, signature
from docs.generate.op_examples import EXAMPLES, SETUP


def op_reference() -> str:
    """Every public name of ``fused``, by the file that it is in."""
    families: dict[str, list[str]] = {}
    for name in fused.__all__:
        families.setdefault(_family(getattr(fused, name)), []).append(name)
    parts = ["The examples of single ops run after these lines:\n", _code(SETUP)]
    for family in sorted(families):
        about = sys.modules[family].__doc__ or ""
        parts += [f"## {family.removeprefix('fused.').replace('_', ' ').capitalize()}\n", markdown(about)]
        for name in families[family]:
            parts += [f"### {name}\n", *_about(name, getattr(fused, name))]
            parts += [_code(EXAMPLES[name])] if name in EXAMPLES else []
    return "\n".join(parts)


def _code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```\n"


def _family(value: Any) -> str:
    module = value.__name__ if inspect.ismodule(value) else value.__module__
    return ".".join(module.split(".")[:2])


def _about(name: str, value: Any) -> list[str]:
    real = getattr(value, "__name__", name)
    if real in fused.__all__ and real != name:
        return [f"Another name of [`{real}`](#{real.lower()}).\n"]
    if inspect.ismodule(value):  # a package that can be called, as the function in it
        value = vars(value)[name]
    plain = not (inspect.isclass(value) and issubclass(value, torch.autograd.Function))
    return [*([signature(f"fused.{name}", value)] if plain else []), documented(value)]
