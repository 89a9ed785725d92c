"""`FORMAT.md` in code: names, sizes, codes, and the two records of a subfile.

Guarantees
----------
- Every name, size and code that is on disk is defined here and nowhere else.
- Records (`Superblock`, `Trailer`) carry a checksum of themselves; unpacking a damaged one raises
  `CorruptionError`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_uring import _engine
from megatron_uring.errors import CorruptionError, NotACheckpointError

FORMAT_NAME = "megatron_uring"
FORMAT_VERSION = 1
# What metadata.json calls us
BACKEND, BACKEND_VERSION = FORMAT_NAME, 1

BLOCK_BYTES = 1 << 20
PAGE_BYTES = 4096
SMALL_ALIGNMENT_BYTES = 64
LARGE_SHARD_BYTES = BLOCK_BYTES
SUPERBLOCK_BYTES = PAGE_BYTES
MAXIMUM_DIMENSIONS = 16

INDEX_NAME = "index.h5"
METADATA_NAME = "metadata.json"
COMMON_NAME = "common.pt"
TRACKER_NAME = "latest_checkpointed_iteration.txt"

# The order is the on-disk code: append, never reorder.
DTYPE_NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
DTYPE_BYTES = np.array(
    [1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1], dtype=np.int64
)
assert len(DTYPE_NAMES) == len(DTYPE_BYTES)

_SAVE_ID = "[0-9a-f]{16}"
_OWN_NAME = re.compile(
    rf"^(?:data-({_SAVE_ID})-\d{{5,}}\.bin|common-({_SAVE_ID})\.pt|timeline-({_SAVE_ID})\.jsonl"
    rf"|\.(?:index|metadata|common|probe)-({_SAVE_ID})\.tmp)$"
)


def subfile_name(save_id: str, number: int) -> str:
    """Name of the subfile `number` of the save `save_id` (16 hexadecimal digits)."""
    return f"data-{save_id}-{number:05d}.bin"


def common_name(save_id: str) -> str:
    """Name of the file that holds the state common to all ranks."""
    return f"common-{save_id}.pt"


def timeline_name(save_id: str) -> str:
    """Name of the file that tells where the time of the save went."""
    return f"timeline-{save_id}.jsonl"


def temporary_name(kind: str, save_id: str) -> str:
    """Name under which `index`, `metadata` or `common` is written before its rename, or `probe` for
    its short life.
    """
    return f".{kind}-{save_id}.tmp"


def save_id_of(name: str) -> str | None:
    """Save id in one of our own per-save file names; None for anybody else's file."""
    match = _OWN_NAME.match(name)
    return None if match is None else next(group for group in match.groups() if group)


def round_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def block_count(length: int) -> int:
    """Blocks, the last maybe short, of a region of `length` bytes."""
    return -(-length // BLOCK_BYTES)


@dataclass(frozen=True)
class Superblock:
    """First bytes of a subfile: whose it is. The other bytes of its page are zero."""

    save_id: str
    subfile: int

    _FORMAT: ClassVar[struct.Struct] = struct.Struct("<8sIIQII")
    _MAGIC: ClassVar[bytes] = b"MURDATA\0"

    def pack(self) -> bytes:
        """The page as it lies on disk, `SUPERBLOCK_BYTES` long."""
        body = self._FORMAT.pack(
            self._MAGIC, FORMAT_VERSION, BLOCK_BYTES, int(self.save_id, 16), self.subfile, 0
        )
        return (body + struct.pack("<I", _engine.crc32c(body))).ljust(SUPERBLOCK_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes, path: object) -> Superblock:
        """Read a superblock back; raises `CorruptionError` or, for another version,
        `NotACheckpointError`.
        """
        size = cls._FORMAT.size
        if len(data) < size + 4 or data[:8] != cls._MAGIC:
            raise CorruptionError(
                "read superblock", path=path, offset=0, expected=cls._MAGIC, found=data[:8]
            )
        _check_record(data[:size], data[size : size + 4], "read superblock", path, 0)
        _, version, _, save_id, subfile, _ = cls._FORMAT.unpack(data[:size])
        require_version(version, path)
        return cls(f"{save_id:016x}", subfile)


@dataclass(frozen=True)
class Trailer:
    """Last 64 bytes of a subfile and of `index.h5`: where the HDF5 image lies, its length and its
    CRC32C.
    """

    save_id: str
    image_offset: int
    image_length: int
    image_crc32c: int

    SIZE_BYTES: ClassVar[int] = 64
    _FORMAT: ClassVar[struct.Struct] = struct.Struct("<8sIIQQQ16xI")
    _MAGIC: ClassVar[bytes] = b"MURTAIL\0"

    def pack(self) -> bytes:
        """The record as it lies on disk, `SIZE_BYTES` long."""
        body = self._FORMAT.pack(
            self._MAGIC,
            FORMAT_VERSION,
            0,
            int(self.save_id, 16),
            self.image_offset,
            self.image_length,
            self.image_crc32c,
        )
        return body + struct.pack("<I", _engine.crc32c(body))

    @classmethod
    def unpack(cls, data: bytes, path: object, offset: int) -> Trailer:
        """Read a trailer back; raises as `Superblock.unpack` does."""
        if len(data) != cls.SIZE_BYTES or data[:8] != cls._MAGIC:
            raise CorruptionError(
                "read trailer",
                path=path,
                offset=max(offset, 0),
                expected=cls._MAGIC,
                found=data[:8],
                cause="the file was cut, or it is not one of ours",
            )
        _check_record(data[:60], data[60:], "read trailer", path, offset)
        _, version, _, save_id, image_offset, image_length, crc = cls._FORMAT.unpack(data[:60])
        require_version(version, path)
        return cls(f"{save_id:016x}", image_offset, image_length, crc)


def _check_record(body: bytes, stored: bytes, operation: str, path: object, offset: int) -> None:
    expected = struct.unpack("<I", stored)[0]
    found = _engine.crc32c(body)
    if expected != found:
        raise CorruptionError(
            operation,
            path=path,
            offset=offset,
            expected=f"crc32c {expected:#010x}",
            found=f"{found:#010x}",
        )


def require_version(version: int, path: object) -> None:
    """Refuse a format version that this release does not read."""
    if version != FORMAT_VERSION:
        raise NotACheckpointError(
            "read checkpoint",
            path=path,
            expected=f"format version {FORMAT_VERSION}",
            found=version,
            cause="written by another release of megatron_uring",
        )
