"""Benchmarks: what was measured, and the programs that measure it.

Guarantees
----------
- Every figure is from the call until the data is durable, of the slowest rank; trials of what is
  compared are interleaved; medians and spread are printed, never a best run.
"""
