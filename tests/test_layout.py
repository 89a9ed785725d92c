"""Names, codes and records of the format, byte by byte where the format fixes them."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_uring import _engine, layout
from megatron_uring.errors import CorruptionError, NotACheckpointError
from megatron_uring.layout import Superblock, Trailer

SAVE_ID = "0123456789abcdef"
save_ids = st.integers(0, 2**64 - 1).map("{:016x}".format)


def test_dtype_codes_and_sizes_of_version_1_never_change():
    assert layout.FORMAT_VERSION == 1
    assert dict(zip(layout.DTYPE_NAMES, layout.DTYPE_BYTES.tolist(), strict=True)) == {
        "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
        "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
        "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
        "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    }  # fmt: skip
    assert list(layout.DTYPE_NAMES)[:3] == ["bool", "uint8", "int8"]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtype_sizes_are_those_of_torch():
    for name, size in zip(layout.DTYPE_NAMES, layout.DTYPE_BYTES.tolist(), strict=True):
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == size, name


@pytest.mark.parametrize(
    "name",
    [
        layout.subfile_name(SAVE_ID, 0),
        layout.subfile_name(SAVE_ID, 123456),
        layout.common_name(SAVE_ID),
        layout.timeline_name(SAVE_ID),
        *(layout.temporary_name(kind, SAVE_ID) for kind in ("index", "metadata", "common")),
    ],
)
def test_own_names_carry_the_save_id(name):
    assert layout.save_id_of(name) == SAVE_ID


@pytest.mark.parametrize(
    "name",
    [
        "index.h5",
        "metadata.json",
        "common.pt",
        "data-0123.bin",
        f"data-{SAVE_ID}-00000.bin.bak",
        f"data-{SAVE_ID.upper()}-00000.bin",
        f"xdata-{SAVE_ID}-00000.bin",
        f".other-{SAVE_ID}.tmp",
        f"timeline-{SAVE_ID}.json",
        f".timeline-{SAVE_ID}.tmp",
        f"data-{SAVE_ID}-0.bin",
        "__0_0.distcp",
    ],
)
def test_names_of_others_are_not_taken_for_ours(name):
    assert layout.save_id_of(name) is None


@given(st.integers(0, 2**50), st.integers(1, 2**24))
def test_round_up_is_the_smallest_multiple_not_below(value, alignment):
    result = layout.round_up(value, alignment)
    assert result % alignment == 0
    assert value <= result < value + alignment


@pytest.mark.parametrize(
    ("length", "blocks"), [(0, 0), (1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (5 << 20, 5)]
)
def test_a_short_last_block_counts(length, blocks):
    assert layout.block_count(length) == blocks


@given(save_ids, st.integers(0, 2**32 - 1))
def test_superblock_round_trip(save_id, subfile):
    page = Superblock(save_id, subfile).pack()
    assert len(page) == layout.SUPERBLOCK_BYTES
    assert Superblock.unpack(page, "f") == Superblock(save_id, subfile)
    assert not any(page[36:])


@given(save_ids, st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**32 - 1))
def test_trailer_round_trip(save_id, offset, length, crc32c):
    record = Trailer(save_id, offset, length, crc32c).pack()
    assert len(record) == 64
    assert Trailer.unpack(record, "f", 0) == Trailer(save_id, offset, length, crc32c)


def test_superblock_fields_lie_where_the_format_says():
    page = Superblock(SAVE_ID, 7).pack()
    assert page[:8] == b"MURDATA\0"
    assert struct.unpack_from("<IIQII", page, 8) == (1, 1 << 20, 0x0123456789ABCDEF, 7, 0)
    assert struct.unpack_from("<I", page, 32)[0] == _engine.crc32c(page[:32])


def test_trailer_fields_lie_where_the_format_says():
    record = Trailer(SAVE_ID, 10, 20, 30).pack()
    assert record[:8] == b"MURTAIL\0"
    assert struct.unpack_from("<IIQQQ", record, 8) == (1, 0, 0x0123456789ABCDEF, 10, 20)
    assert record[40:56] == bytes(16)
    assert struct.unpack_from("<II", record, 56) == (30, _engine.crc32c(record[:60]))


def unpack_superblock(data):
    return Superblock.unpack(data, "/d/file")


def unpack_trailer(data):
    return Trailer.unpack(data, "/d/file", 512)


RECORDS = [
    pytest.param(Superblock(SAVE_ID, 1).pack(), 36, unpack_superblock, id="superblock"),
    pytest.param(Trailer(SAVE_ID, 1, 2, 3).pack(), 64, unpack_trailer, id="trailer"),
]


@pytest.mark.parametrize(("record", "size", "unpack"), RECORDS)
def test_every_flipped_bit_of_a_record_is_found(record, size, unpack):
    for position in range(size * 8):
        damaged = bytearray(record)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptionError, match="/d/file: offset"):
            unpack(bytes(damaged))


@pytest.mark.parametrize(("record", "size", "unpack"), RECORDS)
def test_every_truncated_record_is_found(record, size, unpack):
    for length in range(size):
        with pytest.raises(CorruptionError):
            unpack(record[:length])


@pytest.mark.parametrize(("record", "size", "unpack"), RECORDS)
def test_another_version_is_no_corruption_and_both_versions_are_named(record, size, unpack):
    body = bytearray(record[: size - 4])
    struct.pack_into("<I", body, 8, 2)
    with pytest.raises(NotACheckpointError, match="expected format version 1, found 2"):
        unpack(bytes(body) + struct.pack("<I", _engine.crc32c(bytes(body))))
