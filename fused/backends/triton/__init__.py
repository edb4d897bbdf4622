"""The ops as hand-written Triton kernels, one module a family.

Functions here have the names and the signatures of the reference formulas; `Op` finds them by module and imports them
when they first run. What all kernels keep to:

- rows are numbered in int64, so that an offset may pass 2³¹;
- any number of columns, by masks; accumulation in float32 (float64 for float64), results rounded once;
- no atomics: sums over rows go through one partial sum a program, which makes every result deterministic.
"""
