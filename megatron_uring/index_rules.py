"""What an index holds, and what must be true of it before anybody follows it.

Guarantees
----------
- `check_index` refuses columns that differ in length, extents outside every region, regions outside
  their subfile or with too few checksums, shards outside their tensor, keys twice or without a
  shard: what passes points nowhere outside. No sum or product of it can overflow unseen.
- `check_objects` refuses, before the commit, an object that no rank or more than one saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from megatron_uring.columns import Int32Array, Int64Array, product, volume
from megatron_uring.errors import CorruptionError, StateMismatchError
from megatron_uring.layout import BLOCK_BYTES, DTYPE_BYTES, PAGE_BYTES
from megatron_uring.shards import ShardTable
from megatron_uring.tables import (
    SUBFILE_BYTES_LIMIT,
    SUBFILES_LIMIT,
    Contents,
    Extents,
    Regions,
    Structure,
    on_axis,
)

_NO_COMMON = -1
_BYTES_LIMIT = 1 << 62


@dataclass(frozen=True)
class Index:
    """All that is known of a checkpoint, or, in a subfile's footer, of one group's part of it.

    Attributes
    ----------
    shards, shard_extents
        A row for each saved shard.
    object_keys, object_extents
        A row for each object.
    regions
        What ranks wrote, with checksums.
    subfile_number : int32 [F]
    subfile_length : int64 [F]
        Bytes of each subfile.
    common_length, common_crc32c
        Of the common state's file; a length of -1 says there is none.
    facts
        Text about the save: software versions, mode. Nothing depends on it.
    """

    save_id: str
    shards: ShardTable
    shard_extents: Extents
    object_keys: tuple[str, ...]
    object_extents: Extents
    regions: Regions
    subfile_number: Int32Array
    subfile_length: Int64Array
    common_length: int = _NO_COMMON
    common_crc32c: int = 0
    facts: dict[str, str] = field(default_factory=dict)

    def names_in(self, subfile: int, start: int, end: int) -> list[str]:
        """Keys of the tensors and objects that have a byte in [start, end) of a subfile."""
        names = []
        for extents, keys in (
            (self.shard_extents, [self.shards.keys[i] for i in self.shards.tensor.tolist()]),
            (self.object_extents, list(self.object_keys)),
        ):
            inside = (
                (extents.subfile == subfile)
                & (extents.start < end)
                & (extents.start + extents.length > start)
            )
            names += [keys[row] for row in np.flatnonzero(inside).tolist()]
        return names


@dataclass(frozen=True)
class PartOfIndex(Index):
    """Some rows of an index, for reading these alone; `names_in` still knows all."""

    whole: Index | None = None

    def names_in(self, subfile: int, start: int, end: int) -> list[str]:
        """Keys as `Index.names_in` of the whole index."""
        if self.whole is not None:
            return self.whole.names_in(subfile, start, end)
        return super().names_in(subfile, start, end)


def part_of_index(
    index: Index, tensor: int | None, shard_rows: npt.NDArray[np.intp], object_rows: list[int]
) -> PartOfIndex:
    """The rows of one tensor, by its number in ``index.shards.keys``, and of some objects."""
    shards = index.shards.take(shard_rows)
    keys = () if tensor is None else (index.shards.keys[tensor],)
    values = {entry.name: getattr(index, entry.name) for entry in fields(Index)}
    values.update(
        shards=replace(shards, keys=keys, tensor=np.zeros(len(shards), np.int32)),
        shard_extents=index.shard_extents.take(shard_rows),
        object_keys=tuple(index.object_keys[row] for row in object_rows),
        object_extents=index.object_extents.take(np.array(object_rows, np.intp)),
    )
    return PartOfIndex(**values, whole=index)


def owned_rows(structure: Structure) -> tuple[ShardTable, Extents]:
    """The rows that the index has of a structure: replicas are not saved."""
    owned, extents = np.flatnonzero(structure.owner), structure.extents
    return (
        structure.shards.take(owned).compact(),
        extents.take(owned),
    )


def assemble_index(
    save_id: str,
    rows: tuple[ShardTable, Extents],
    contents: Contents,
    facts: dict[str, str],
    open_end: int | None,
) -> Index:
    """Join what is known before the write (`rows`) with what is known after it.

    Subfiles end with their last region, or, before the footer exists, at `open_end`.
    """
    regions = contents.regions
    numbers = np.unique(regions.subfile).astype(np.int32)
    length = np.zeros(len(numbers), np.int64)
    np.maximum.at(length, np.searchsorted(numbers, regions.subfile), regions.start + regions.length)
    if open_end is not None:
        length[:] = open_end
    return Index(
        save_id,
        *rows,
        contents.object_keys,
        contents.object_extents,
        regions,
        numbers,
        length,
        facts=facts,
    )


def check_index(index: Index, path: object) -> None:
    """Refuse an index that points outside its subfiles or whose columns differ in length."""
    shards, regions = index.shards, index.regions
    problems = []
    for name, extents, count in (
        ("shards", index.shard_extents, len(shards)),
        ("objects", index.object_extents, len(index.object_keys)),
    ):
        columns = (extents.subfile, extents.start, extents.length)
        if any(len(column) != count for column in columns):
            problems.append(f"{name}: columns differ in length")
        elif not _inside_regions(extents, regions):
            problems.append(f"{name}: an extent lies outside every region")
    problem = _check_boxes(shards) or _check_keys(index)
    if problem is not None:
        problems.append(problem)
    elif (
        len(shards) == len(index.shard_extents)
        and (shards.lengths() != index.shard_extents.length).any()
    ):
        problems.append("shards: length and shape differ")
    if problems:
        raise CorruptionError("parse index", path=path, found="; ".join(problems))
    _check_regions(index, path)


def _check_boxes(shards: ShardTable) -> str | None:
    if (shards.shape < 0).any() or (shards.global_shape < 0).any():
        return "shards: a negative shape"
    for shape in (shards.shape, shards.global_shape):
        if (volume(shape) * DTYPE_BYTES[shards.dtype] >= _BYTES_LIMIT).any():
            return "shards: a shape beyond what files can hold"
    outside = np.flatnonzero(~shards.inside())
    if product(shards.shape.take(outside, axis=0)).any():  # an empty one has no byte to point to
        return "shards: one lies outside its tensor"
    return None


def _check_keys(index: Index) -> str | None:
    keys, objects = index.shards.keys, index.object_keys
    if len(set(keys)) != len(keys) or len(set(objects)) != len(objects):
        return "a key that is there twice"
    if not np.bincount(index.shards.tensor, minlength=len(keys)).all():
        return "a tensor without a shard"
    return None


def _inside_regions(extents: Extents, regions: Regions) -> bool:
    filled = extents.length != 0
    subfile, start = extents.subfile[filled], extents.start[filled]
    if not len(start):
        return True
    in_range = (start >= 0) & (start < SUBFILE_BYTES_LIMIT) & (extents.length[filled] > 0)
    if not len(regions) or not in_range.all():
        return False
    axis = on_axis(regions.subfile, regions.start)
    order = np.argsort(axis)
    place = np.searchsorted(axis[order], on_axis(subfile, start), "right") - 1
    owner = order[np.maximum(place, 0)]
    return bool(
        (place >= 0).all()
        and (regions.subfile[owner] == subfile).all()
        and (extents.length[filled] <= regions.start[owner] + regions.length[owner] - start).all()
    )


def _check_regions(index: Index, path: object) -> None:
    regions = index.regions
    counts = {len(regions.rank), len(regions.subfile), len(regions.start), len(regions.length)}
    fits = len(counts) == 1 and len(index.subfile_number) == len(index.subfile_length)
    fits = fits and bool(
        (np.diff(index.subfile_number) > 0).all()
        and (index.subfile_number >= 0).all()
        and (index.subfile_number < SUBFILES_LIMIT).all()
        and (index.subfile_length < SUBFILE_BYTES_LIMIT).all()
    )
    if fits:
        place = np.searchsorted(index.subfile_number, regions.subfile)
        known = place < len(index.subfile_number)
        fits = bool(known.all()) and bool(
            (index.subfile_number[place] == regions.subfile).all()
            and (regions.start >= 0).all()
            and (regions.start % BLOCK_BYTES == 0).all()
            and (regions.length > 0).all()
            and (regions.length % PAGE_BYTES == 0).all()
            and (regions.length <= index.subfile_length[place] - regions.start).all()
            and regions.first_block()[-1] == len(regions.crc32c)
            and not _overlap(regions)
        )
    if not fits:
        raise CorruptionError(
            "parse index", path=path, found="regions that do not fit the subfiles"
        )


def _overlap(regions: Regions) -> bool:
    order = np.lexsort((regions.start, regions.subfile))
    subfile, start = regions.subfile[order], regions.start[order]
    end = start + regions.length[order]
    return bool(((subfile[1:] == subfile[:-1]) & (start[1:] < end[:-1])).any())


def with_common(index: Index, length: int, crc32c: int) -> Index:
    """`index` with the length and checksum of the common state's file."""
    return replace(index, common_length=length, common_crc32c=crc32c)


def without_tensors(index: Index, key_prefix: str) -> Index:
    """`index` without the tensors whose key begins with `key_prefix`; their bytes stay in the
    subfiles.
    """
    stays = np.array([not key.startswith(key_prefix) for key in index.shards.keys], bool)
    rows = np.flatnonzero(stays[index.shards.tensor]) if len(stays) else np.zeros(0, np.intp)
    return replace(
        index,
        shards=index.shards.take(rows).compact(),
        shard_extents=index.shard_extents.take(rows),
    )


def check_objects(contents: Contents, tensor_keys: tuple[str, ...]) -> None:
    """Every object has one owner, and no key is that of an object and of a tensor.

    Raises
    ------
    StateMismatchError
        Naming the key.
    """
    seen, tensors = set[str](), set(tensor_keys)
    problem = None
    for key in contents.object_keys:
        if key in seen:
            problem = (key, "two", "put the rank into the key, or give it on one rank only")
        elif key in tensors:
            problem = (key, "a tensor of that key too", "perhaps on another rank")
        seen.add(key)
    for key in contents.replicas:
        if key not in seen:
            problem = (
                key,
                "none: rank 0 writes replicated objects, and does not have it",
                "what differs between ranks goes into an ObjectProvider, with the rank in its key",
            )
    if problem is not None:
        key, found, cause = problem
        raise StateMismatchError(
            f"plan save: object {key!r}", expected="exactly one owner", found=found, cause=cause
        )
