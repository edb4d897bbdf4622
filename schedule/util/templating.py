"""HTML templates with escaped values and errors for missing ones."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import, and most runs render nothing

    return Environment(
        loader=PackageLoader("schedule.util"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def rendered(template: str, **values: Any) -> Markup:
    """Render a template of ``schedule/util/templates`` with ``values``.

    The result is markup: another template includes it without escaping.
    """
    return Markup(_templates().get_template(template).render(**values))
