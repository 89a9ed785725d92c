"""The microbenchmark suite: workloads, I/O patterns, cases, and the runs that measure them."""
