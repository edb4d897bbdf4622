"""Templates of HTML: every value is escaped, and one that is missing is an error."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # heavy, and most runs render nothing

    return Environment(
        loader=PackageLoader("schedule.util"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def rendered(template: str, **values: Any) -> Markup:
    """A template of ``schedule/util/templates`` with ``values`` put in; safe to be put into another."""
    return Markup(_templates().get_template(template).render(**values))
