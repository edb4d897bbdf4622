"""What a case is made of: a world to live in, a model, a disturbance, calls."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

EQUAL, FALLBACK, REFUSED, VACUOUS, WRONG = "equal", "fallback", "refused", "vacuous", "WRONG"
_numbers = itertools.count()


@dataclass
class World:
    """Python modules of our own, loaded for one run.

    Attributes:
        modules: the file's stem → the module.
        undo: what puts shared state back at the end of the run.
    """

    modules: dict[str, types.ModuleType] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)

    def load(self, file: str | Path) -> types.ModuleType:
        """Import ``file`` under a new name."""
        path = Path(file)
        if path.stem not in self.modules:
            name = f"adversary_{next(_numbers)}_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} cannot be imported")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            self.undo.callback(sys.modules.pop, name, None)
            spec.loader.exec_module(module)
            self.modules[path.stem] = module
        return self.modules[path.stem]

    def __getattr__(self, name: str) -> Any:
        """A global variable of whichever module has it."""
        for module in self.__dict__.get("modules", {}).values():
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of something that both worlds share; it is put back."""
        before = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
        setattr(owner, name, value)
        self.undo.callback(
            delattr if before is _ABSENT else setattr, owner, name, *(() if before is _ABSENT else (before,))
        )


_ABSENT = object()

Batch = dict[str, Any]
Apply = Callable[[nn.Module, World], nn.Module | None]
"""Changes a model or its world; returns another model where the run goes on with that."""
Run = Callable[[nn.Module, Batch, World], Any]
"""Calls a model; returns what is to be compared, as any structure."""


@dataclass(frozen=True)
class Model:
    """How a model is built, and what it is called with.

    Attributes:
        name: of the model.
        build: makes it from its world, after the seeds were set.
        batch: makes a batch of so many rows, of so long sequences.
        tags: what it has, for the choice of disturbances.
    """

    name: str
    build: Callable[[World], nn.Module]
    batch: Callable[..., Batch]
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Call:
    """A way to call a model.

    Attributes:
        name: of the call.
        run: makes it, with a batch of its own.
        sizes: rows and length of the batch, if not the usual ones.
        tolerance: relative to the largest element, if not that of the dtype.
    """

    name: str
    run: Run
    sizes: tuple[int, ...] = ()
    tolerance: float = 0.0


@dataclass(frozen=True)
class Disturbance:
    """Something that is done to a model.

    Attributes:
        name: says what is done.
        apply: does it.
        models: names or tags of the models it is for.
        whens: ``before`` and ``after`` the model is scheduled.
        call: how the model is called, if not as usual.
    """

    name: str
    apply: Apply
    models: tuple[str, ...]
    whens: tuple[str, ...] = ("after",)
    call: Call | None = None


@dataclass(frozen=True)
class Case:
    """One experiment; ``sizes`` are those that the model is scheduled at."""

    model: Model
    rules: str
    disturbance: Disturbance
    when: str
    calls: tuple[Call, ...]
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        called = "+".join(call.name for call in self.calls)
        at = "".join(f" at {each}" for each in self.sizes)
        return f"{self.model.name}-{self.rules}{at}-{self.disturbance.name} {self.when}-{called}"


@dataclass
class Verdict:
    """How a case went.

    Attributes:
        kind: :data:`EQUAL`, :data:`FALLBACK`, :data:`REFUSED`, :data:`WRONG`; or :data:`VACUOUS` where no graph ran
            even before the disturbance, so that nothing was tested.
        found: what differs, or why it was refused.
        stage: where the first difference was.
        fallbacks: how many calls of modules ran the original forward after the disturbance.
    """

    kind: str
    found: list[str] = field(default_factory=list)
    stage: str = ""
    fallbacks: int = 0

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} at {self.stage or 'no stage'}", *(f"  {line}" for line in self.found[:12])])
