"""Benchmarks: what is measured against whom; run with `python -m benchmarks.NAME`."""
