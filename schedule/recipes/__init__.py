"""Schedules as data: what a recipe is made of, how one is recorded, read, written and replayed."""
