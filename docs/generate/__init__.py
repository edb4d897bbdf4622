"""The parts of the site that are written from the code: each page says where with ``<!-- generated: name -->``."""

from __future__ import annotations

import re

from docs.generate.api import huggingface_reference, public_reference, testing_reference
from docs.generate.commands import command_reference
from docs.generate.errors import error_reference
from docs.generate.numbers import number_reference
from docs.generate.ops import op_reference
from docs.generate.primitives import primitive_reference
from docs.generate.rules import rule_reference
from docs.generate.scaling import (
    counted_reference,
    long_sequence_reference,
    search_reference,
    shared_reference,
    worked_out_reference,
)
from docs.generate.sweeps import sweep_reference
from docs.generate.versions import version_reference

PARTS = {
    "api": public_reference,
    "commands": command_reference,
    "counted": counted_reference,
    "errors": error_reference,
    "huggingface": huggingface_reference,
    "long_sequences": long_sequence_reference,
    "numbers": number_reference,
    "ops": op_reference,
    "primitives": primitive_reference,
    "rules": rule_reference,
    "searches": search_reference,
    "shared": shared_reference,
    "sweeps": sweep_reference,
    "testing": testing_reference,
    "versions": version_reference,
    "worked_out": worked_out_reference,
}

_PLACE = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """A page of docs/ with its generated parts.

    Raises:
        KeyError: it asks for a part that there is none of.
    """
    return _PLACE.sub(lambda place: PARTS[place[1]](), page)
