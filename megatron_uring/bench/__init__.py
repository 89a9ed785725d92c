"""Benchmarks: what was measured, and the programs that measure it.

`suite` measures I/O patterns, and `pages` says what follows from them; the modules here measure the
package as a whole beside others (`speed`, `durable`) and its planning (`scale`).

Guarantees
----------
- Every figure is from the call until the data is durable, of the slowest rank; trials of what is
  compared are interleaved; medians and spread are printed, never a best run.
"""
