"""Checkpoints of Megatron-Core, written and read by native io_uring writers."""

__version__ = "0.1.0"
