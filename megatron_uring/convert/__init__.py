"""Interchange: checkpoints from one format to another.

The folder is the data path: ``from_*`` reads a format, `parts` cuts what is read, ``to_*`` writes a
format, `convert` leads through the steps.

Guarantees
----------
- `convert` writes all of a destination or none of it, and has read it back (`convert.py`).
"""

from megatron_uring.convert.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
