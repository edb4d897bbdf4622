"""Lookup of numbers by name in a config and its sub-configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

VISION = ("vision", "visual", "image", "vit", "backbone", "encoder")
AUDIO = ("audio", "speech", "sound", "encoder")
TEXT = ("text", "language", "llm", "decoder", "generator")


class Configs:
    """A config and all configs in it.

    Args:
        config: a ``PreTrainedConfig``, or any object with its settings as attributes.
    """

    def __init__(self, config: Any) -> None:
        self.root = config
        self.named = list(_walk(config, "", set()))

    def near(self, *parts: str) -> list[Any]:
        """Return all configs, first those with one of ``parts`` in their path, in the order of ``parts``."""
        ranked = []
        for position, (path, config) in enumerate(self.named):
            rank = next((index for index, part in enumerate(parts) if part in path), len(parts))
            ranked.append((rank, position, config))
        return [config for *_, config in sorted(ranked, key=lambda item: item[:2])]

    def find(self, *names: str, near: Sequence[str] = (), default: Any = None) -> Any:
        """Return the first of ``names`` set in the config nearest to ``near``, else ``default``."""
        for config in self.near(*near):
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def number(self, *names: str, near: Sequence[str] = (), default: int = 0) -> int:
        """Look up one integer as :meth:`find` does: the first one of a list."""
        value = self.find(*names, near=near, default=default)
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return int(value) if isinstance(value, (int, float)) else default

    def pair(self, *names: str, near: Sequence[str] = (), default: int = 0) -> tuple[int, int]:
        """Look up a height and a width as :meth:`find` does. A single number is used for both."""
        value = self.find(*names, near=near, default=default)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)) and len(value) >= 2:
            return int(value[-2]), int(value[-1])
        number = value[0] if isinstance(value, (list, tuple)) else value
        return int(number), int(number)

    @property
    def special_ids(self) -> set[int]:
        """Ids of special tokens, such as padding and image placeholders."""
        found: set[int] = set()
        for _, config in self.named:
            for name, value in vars(config).items():
                if name.endswith(("token_id", "token_ids", "token_index")):
                    found.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if _whole(v))
        return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _walk(config: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(config) in seen or not hasattr(config, "__dict__"):
        return
    seen.add(id(config))
    yield path, config
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _walk(value, f"{path}.{name}", seen)
