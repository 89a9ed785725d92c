"""The Megatron-Core adapter: patch points, ShardedTensor <-> shard; the only importer of
``megatron.*``.

Guarantees
----------
- Importing this folder does not import Megatron; `switch.enable` does.
"""
