"""Names of version 1, still available with a ``DeprecationWarning``."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, TypeVar

_INTO = {  # package → modules moved into it from its parent package
    "schedule.capture": "examples snapshots tracing",
    "schedule.core": "adapting edits graphs history matching node rebinding wrapping",
    "schedule.patterns": "rewriting saving",
    "schedule.primitives": "activations composing group",
    "schedule.report": "comparing costs pictures",
    "schedule.runtime": "classes dispatch",
    "schedule.util": "errors templating",
    "schedule.distributed.checkpoint": "checkpointing layout pieces reading slots",
    "schedule.distributed.communication": "agreement chunks collectives exchange groups mesh resharding rng verdicts",
    "schedule.distributed.pipeline": "splitting stages tied",
    "schedule.distributed.planning": "factors gradients owned partial plan plan_steps plan_table planner propagation "
    "sequence shapes units values vocabularies",
    "schedule.distributed.tensor_parallel": "callers conflicts cuts edits following forwards linears modules "
    "parameters settings state training wrapped",
}
_MOVED = {
    "schedule.building": "schedule.api.build",
    "schedule.cli": "fxschedule.cli",
    "schedule.distributed.initialise": "schedule.distributed.checkpoint.initialize",
    "schedule.distributed.simulate": "schedule.api.simulate",
    "schedule.examples.mending": "fxschedule.cli.tiny.batches",
    "schedule.examples.shrink": "fxschedule.cli.tiny.configs",
    "schedule.html": "schedule.report.pages",
    "schedule.patterns.normalise": "schedule.patterns.normalize",
    "schedule.patterns.occurrence": "schedule.patterns.graph_match",
    "schedule.recording": "schedule.capture.recording.recording",
    "schedule.repeating": "schedule.primitives.rewrites",
    "schedule.show": "schedule.report.tree_text",
    "schedule.tracing.specialisation": "schedule.capture.tracing.specialization",
    "schedule.tracing.standins": "schedule.capture.tracing.meta_kernels",
    "schedule.tracing.texts": "schedule.capture.tracing.string_formatting",
    "schedule.tree": "schedule.api.schedule",
    "schedule.verify.guilty": "schedule.verify.bisection",
    "schedule.verify.stirring": "schedule.verify.perturbation",
}
_MOVED |= {
    f"schedule.tracing.{name}": f"schedule.capture.recording.{name}"
    for name in ("calls", "data", "source", "specs", "structure")
}
_MOVED |= {
    f"{package.rpartition('.')[0]}.{name}": f"{package}.{name}"
    for package, names in _INTO.items()
    for name in names.split()
}


Class = TypeVar("Class", bound=type)


def warn_renamed(old: str, new: str) -> None:
    """Warn at the caller's call site about the rename of ``old`` to ``new``."""
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=3)


def renamed_fields(**names: str) -> Callable[[Class], Class]:
    """Support old names of dataclass fields in ``__init__`` and as attributes: ``@renamed_fields(old="new")``."""

    def decorate(cls: Class) -> Class:
        init: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def renaming(self: Any, *args: Any, **settings: Any) -> None:
            for old in names.keys() & settings.keys():
                warn_renamed(f"{cls.__name__}({old}=)", names[old])
                settings[names[old]] = settings.pop(old)
            init(self, *args, **settings)

        cls.__init__ = renaming  # type: ignore[misc]
        for old, new in names.items():
            setattr(cls, old, _renamed_property(cls.__name__, old, new))
        return cls

    return decorate


def _renamed_property(owner: str, old: str, new: str) -> property:
    def value(self: Any) -> Any:
        warn_renamed(f"{owner}.{old}", new)
        return getattr(self, new)

    return property(value)


def new_name(name: str) -> str | None:
    """Return the new name of the module ``name``, or None if it never moved."""
    inside: list[str] = []
    while name.startswith("schedule."):
        if name in _MOVED:
            return ".".join([_MOVED[name], *inside])
        name, _, last = name.rpartition(".")
        inside.insert(0, last)
    return None


class _OldNames(MetaPathFinder, Loader):
    """Importer of moved modules by their old names, returning the same module object."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if new_name(fullname) is None else spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name) or spec.name
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module.

        The module's code does not run again. Importing it by its old name has replaced ``__spec__``.
        """
        old = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._specs.pop(old, module.__spec__)


def keep_old_names() -> None:
    """Make old module names importable from now on."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
