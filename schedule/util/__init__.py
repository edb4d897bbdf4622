"""Helpers for every other part of the package: files, random states, strings, walks of nested values."""
