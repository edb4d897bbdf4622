"""Hand-written Triton kernels of the ops, one module per family.

Functions here have the names and the signatures of the reference formulas; `Op` finds them by module and imports them
when they first run. Rules for all kernels:

- rows are numbered in int64, so offsets may exceed 2³¹;
- any number of columns, by masks; accumulation in float32 (float64 for float64), results rounded once;
- no atomics: sums over rows use one partial sum per program, which makes every result deterministic.
"""
