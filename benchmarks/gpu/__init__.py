"""Correctness, kernels and whole models on a card, most important first, inside a budget of seconds.

    python -m benchmarks.gpu --part A|B|C [--budget 540] [--output FILE] [--dry-run]

Part A runs the tests of the kernels and those marked `cuda`, part B times the ops, part C trains whole models. Every
item runs in a process of its own with a time limit. What it measures is appended to the file at once, as lines of JSON,
and a table of the whole file is printed last. A dry run goes through the same queue on the CPU at tiny sizes.
"""
