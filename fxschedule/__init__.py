"""The public names of the package ``schedule``, under the name of its distribution.

``import fxschedule`` costs nothing: ``schedule``, and torch with it, is imported when a name is used first. If another
package of the name ``schedule`` is in the way, an ImportError says which, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedule import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """Return a public name of ``schedule``.

    Raises:
        ImportError: ``import schedule`` finds another package.
        AttributeError: there is no such name.
    """
    if name.startswith("__") and name not in (
        "__all__",
        "__version__",
    ):  # asked for by Python itself, for example by an import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fxschedule.installation import refuse_other_package

    refuse_other_package()
    import schedule

    return getattr(schedule, name)


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))
