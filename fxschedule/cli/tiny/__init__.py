"""Tiny models for ``--tiny`` and for the sweep over architectures.

The only part of the package that knows architectures by name, field names of configs and error messages of torch. Only
the command line imports it.
"""
