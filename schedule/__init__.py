"""A schedule-based rewriting compiler for PyTorch models: match, rewrite, verify, undo.

import schedule

sch = schedule.create_schedule(model, batch)
mlps = sch["transformer.h.*.mlp"]
mlps.fuse(mlps.find("bias_gelu_tanh", expect=12))
with schedule.verify(sch, batch):
    model = schedule.build(sch)

The public names are those of ``schedule.api``, which is imported when one of them is used first.
"""

import schedule.util.requirements  # noqa: F401, I001  # first: it names what is missing before anything else is imported
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from schedule.util.errors import did_you_mean
from schedule.util.logs import set_logs_by_environment

if TYPE_CHECKING:
    from schedule.api import *  # noqa: F403
    from schedule.api import __all__ as __all__

    __version__: str


def _public_names() -> dict[str, Any]:
    api = import_module("schedule.api")
    return {"__all__": api.__all__, **{name: getattr(api, name) for name in api.__all__}}


def __getattr__(name: str) -> Any:
    """Return a public name, or a module of the package."""
    if name == "__version__":
        return import_module("fused.versions").VERSION
    if name.startswith("__") and name != "__all__":  # asked for by Python itself, for example by an import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "verify" and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    public = _public_names()
    globals().update(public)
    if name in globals():
        return globals()[name]
    near = did_you_mean(name, public["__all__"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near and '; '}{near}")


def __dir__() -> list[str]:
    return sorted(_public_names()["__all__"])


class _Package(ModuleType):
    """The package, with the function ``verify`` as its attribute also after its module ``schedule.verify`` is imported.

    An import sets a module as an attribute of its package.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "verify" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
set_logs_by_environment()
