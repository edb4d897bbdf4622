"""Benchmark scripts behind the speed claims, printing tables and writing JSON."""
