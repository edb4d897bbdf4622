"""Recipes: schedules as data, recorded, written, read and replayed."""
