"""Sharded modules: parameters, forwards, collectives, and dependent sizes."""
