"""The microbenchmark suite: workloads, I/O patterns, cases, and the runs that measure them.

Guarantees
----------
- Importing it imports nothing else: the command line names the groups before it measures any.
"""

# Of cases, each about one question; `suites` says which cases.
GROUPS = (
    "patterns",
    "coalescing",
    "alignment",
    "size",
    "engine",
    "submission",
    "pool",
    "restore",
    "inventory",
)
