"""The recipes of these tests' schedules round-trip."""

from tests.recipes.watching import recipes_round_trip

__all__ = ["recipes_round_trip"]
