#!/usr/bin/env python
"""Prove that a checkpoint can be restored: ``mpirun -n N python scripts/validate_restore.py DIR``.

Guarantees
----------
- Exit code 0 only if every block's checksum holds, every global tensor is covered exactly once, and
  lengths, superblocks, footers and the common state are those of this save. The same as
  ``megatron-uring verify DIR``.
"""

import sys

from megatron_uring.cli import verify

if __name__ == "__main__":
    verify(sys.argv[1:], prog_name="validate_restore.py")
