"""Conditions on Python state: their sources, and the code that checks them."""
