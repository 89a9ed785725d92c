"""The HDF5 index, in both directions; beside `view` the only importer of h5py.

Guarantees
----------
- The index is built and parsed in memory: HDF5 never opens, locks or writes a file of the
  checkpoint.
- Its 64-byte trailer holds length and CRC32C of the image: damage is found before HDF5 sees a byte
  of it.
- What is read back is checked against itself (lengths of columns, numbers in range), so that
  nothing after `decode` meets an index that points outside.
- A column lies in the image itself, whole: no link, no other file, no filter but HDF5's own is
  followed, and nothing is allocated that the image could not hold compressed.
- Any HDF5 tool can read `index.h5`; its groups are those of `FORMAT.md`.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any, BinaryIO

import h5py
import numpy as np
import numpy.typing as npt

from megatron_uring import _engine
from megatron_uring.columns import pack_keys, unpack_keys, unravel
from megatron_uring.errors import (
    CheckpointError,
    CorruptionError,
    NotACheckpointError,
    as_checkpoint_error,
)
from megatron_uring.index_rules import Index, check_index
from megatron_uring.layout import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    FORMAT_NAME,
    FORMAT_VERSION,
    INDEX_NAME,
    MAXIMUM_DIMENSIONS,
    Trailer,
    require_version,
)
from megatron_uring.regular import open_regular
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Extents, Regions


def sealed(index: Index, encoded: EncodedShards | None = None) -> bytes:
    """The content of `index.h5`: image and trailer."""
    image = encode(index, encoded)
    return image + seal(image, index.save_id)


class EncodedShards:
    """The groups ``tensors`` and ``shards`` of an index, which are most of its bytes: encoded
    before the rest is known, and once for all saves of the same structure.
    """

    def __init__(self, shards: ShardTable, extents: Extents) -> None:
        self._file = _new_image()
        _encode_shards(self._file, shards, extents)

    def copy_to(self, file: h5py.File) -> None:
        """Copy the groups; HDF5 takes compressed chunks as they are."""
        for name in self._file:
            self._file.copy(name, file)


def _new_image() -> h5py.File:
    # The core driver keeps the image in memory; a file of this name is never made.
    return h5py.File(_image_name(), "w", driver="core", backing_store=False, libver="v110")


_image_numbers = itertools.count()
# Those that HDF5 has itself; any other is code that it would look for in a plugin folder.
_FILTERS = frozenset(range(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SCALEOFFSET + 1))
_EXPANSION = 1100  # deflate makes 1032 bytes of one at most


def _image_name() -> str:
    """A name that no other image of this process has: HDF5 takes equal names for one file."""
    return f"index-{os.getpid()}-{next(_image_numbers)}.h5"


def encode(index: Index, encoded: EncodedShards | None = None) -> bytes:
    """The index as an HDF5 image, without its trailer.

    `encoded` holds the index's shards, if they were encoded before.
    """
    with _new_image() as file:
        file.attrs.update(
            format=FORMAT_NAME,
            version=FORMAT_VERSION,
            save_id=index.save_id,
            block_bytes=BLOCK_BYTES,
            common_length=index.common_length,
            common_crc32c=index.common_crc32c,
        )
        facts = file.create_group("facts")
        for name, text in index.facts.items():
            facts.create_dataset(name, data=text)
        if encoded is not None:
            encoded.copy_to(file)
        else:
            _encode_shards(file, index.shards, index.shard_extents)
        _write(
            file,
            "objects",
            zip(("key_text", "key_bytes"), pack_keys(index.object_keys), strict=True),
        )
        _write(file, "objects", _extent_columns(index.object_extents))
        regions = index.regions
        _write(
            file,
            "regions",
            (
                ("rank", regions.rank),
                ("subfile", regions.subfile),
                ("start", regions.start),
                ("length", regions.length),
                ("crc32c", regions.crc32c),
            ),
        )
        _write(
            file, "subfiles", (("number", index.subfile_number), ("length", index.subfile_length))
        )
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def _encode_shards(file: h5py.File, shards: ShardTable, extents: Extents) -> None:
    first = shards.first_rows()
    ndim = shards.ndim[first]
    dimension = np.arange(shards.shape.shape[1])
    per_tensor = dimension < ndim[:, None]
    per_shard = dimension < shards.ndim[:, None]
    _write(
        file,
        "tensors",
        (
            *zip(("key_text", "key_bytes"), pack_keys(shards.keys), strict=True),
            ("dtype", shards.dtype[first]),
            ("ndim", ndim),
            ("shape", shards.global_shape[first][per_tensor]),
        ),
    )
    _write(
        file,
        "shards",
        (
            ("tensor", shards.tensor),
            ("offset", shards.offset[per_shard]),
            ("shape", shards.shape[per_shard]),
            *_extent_columns(extents),
        ),
    )


def _extent_columns(extents: Extents) -> tuple[tuple[str, npt.NDArray[Any]], ...]:
    return (("subfile", extents.subfile), ("start", extents.start), ("length", extents.length))


def _write(file: h5py.File, group: str, columns: Any) -> None:
    target = file.require_group(group)
    for name, column in columns:
        # gzip needs chunks, and chunks need an element
        options = (
            {"compression": "gzip", "compression_opts": 1, "shuffle": True} if column.size else {}
        )
        target.create_dataset(name, data=column, **options)


def decode(image: bytes, path: object) -> Index:
    """Inverse of `encode`.

    Raises
    ------
    CorruptionError
        If a part is missing or contradicts another.
    NotACheckpointError
        For another format or version.
    """
    try:
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fapl_core(backing_store=False)
        access.set_file_image(image)
        # "no locking" where HDF5 knows it: an image has no file to lock
        name = _image_name().encode()
        with h5py.File(h5py.h5f.open(name, h5py.h5f.ACC_RDONLY, fapl=access)) as file:
            return _decode_file(file, path)
    except CheckpointError:
        raise
    except Exception as error:  # whatever HDF5 and h5py make of an image that is none of ours
        raise CorruptionError(
            "parse index", path=path, cause=f"{type(error).__name__}: {error}"
        ) from error


def _decode_file(file: h5py.File, path: object) -> Index:
    if file.attrs.get("format") != FORMAT_NAME:
        raise NotACheckpointError(
            "parse index", path=path, expected=FORMAT_NAME, found=file.attrs.get("format")
        )
    require_version(int(file.attrs["version"]), path)
    objects = _decode_keys(file, "objects")
    index = Index(
        str(file.attrs["save_id"]),
        _decode_shards(file),
        _decode_extents(file, "shards"),
        objects,
        _decode_extents(file, "objects"),
        Regions(
            _read(file, "regions/rank", np.int32),
            _read(file, "regions/subfile", np.int32),
            _read(file, "regions/start", np.int64),
            _read(file, "regions/length", np.int64),
            _read(file, "regions/crc32c", np.uint32),
        ),
        _read(file, "subfiles/number", np.int32),
        _read(file, "subfiles/length", np.int64),
        int(file.attrs["common_length"]),
        int(file.attrs["common_crc32c"]),
        {name: _plain(file, f"facts/{name}")[()].decode() for name in file["facts"]},
    )
    check_index(index, path)
    return index


def _read(file: h5py.File, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    column = _plain(file, name)
    if column.ndim != 1:
        raise ValueError(f"{name} has {column.ndim} dimensions")
    if column.dtype != dtype:
        raise ValueError(f"{name} is {column.dtype}, not {np.dtype(dtype)}")
    values: npt.NDArray[Any] = column[()]
    return values


def _plain(file: h5py.File, name: str) -> h5py.Dataset:
    """A dataset that lies in the image, in as many bytes as it may have come from."""
    group, _, leaf = name.partition("/")
    for owner, link in ((file, group), (file[group], leaf)):
        if not isinstance(owner.get(link, getlink=True), h5py.HardLink):
            raise ValueError(f"{name} is missing, or a link that leads elsewhere")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is no dataset")
    made = dataset.id.get_create_plist()
    filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
    if made.get_layout() == h5py.h5d.VIRTUAL or made.get_external_count():
        raise ValueError(f"{name} lies in other files")
    if len(set(filters)) != len(filters) or not _FILTERS.issuperset(filters):
        raise ValueError(f"{name} has filters {filters}")
    most = _EXPANSION * dataset.id.get_storage_size() + BLOCK_BYTES
    wanted = dataset.size and max(dataset.size, math.prod(dataset.chunks or ()))
    if wanted and wanted * dataset.dtype.itemsize > most:
        raise ValueError(f"{name} is larger than what is stored of it can be")
    return dataset


def _decode_keys(file: h5py.File, group: str) -> tuple[str, ...]:
    return unpack_keys(
        _read(file, f"{group}/key_text", np.uint8), _read(file, f"{group}/key_bytes", np.int64)
    )


def _decode_extents(file: h5py.File, group: str) -> Extents:
    return Extents(
        _read(file, f"{group}/subfile", np.int32),
        _read(file, f"{group}/start", np.int64),
        _read(file, f"{group}/length", np.int64),
    )


def _decode_shards(file: h5py.File) -> ShardTable:
    keys = _decode_keys(file, "tensors")
    tensor = _read(file, "shards/tensor", np.int32)
    dtype, ndim = _read(file, "tensors/dtype", np.uint8), _read(file, "tensors/ndim", np.uint8)
    if len(dtype) != len(keys) or len(ndim) != len(keys) or (ndim > MAXIMUM_DIMENSIONS).any():
        raise ValueError("tensors: columns do not fit each other")
    if len(tensor) and not (0 <= tensor.min() and tensor.max() < len(keys)):
        raise ValueError("shards/tensor points outside")
    if (dtype >= len(DTYPE_BYTES)).any():
        raise ValueError("tensors/dtype holds an unknown code")
    width = int(ndim.max()) if len(ndim) else 0
    global_shape = unravel(_read(file, "tensors/shape", np.int64), ndim, width, 1)
    return ShardTable(
        keys,
        tensor,
        dtype[tensor],
        ndim[tensor],
        global_shape[tensor],
        unravel(_read(file, "shards/offset", np.int64), ndim[tensor], width, 0),
        unravel(_read(file, "shards/shape", np.int64), ndim[tensor], width, 1),
    )


# -------------------------------------------------------------------------------------------------
# the file


def seal(image: bytes, save_id: str, image_offset: int = 0) -> bytes:
    """The trailer that goes behind an image which starts at `image_offset` of its file."""
    return Trailer(save_id, image_offset, len(image), _engine.crc32c(image)).pack()


def read_index(directory: str) -> Index:
    """The committed index of a checkpoint directory.

    Raises
    ------
    NotACheckpointError
        If there is none: no directory, or a save that was never committed.
    CorruptionError
        If it is damaged.
    """
    path = os.path.join(directory, INDEX_NAME)
    try:
        _check_size(path)
        data = _engine.read_file(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpointError(
            "open checkpoint",
            path=directory,
            expected=INDEX_NAME,
            found=_found_instead(directory),
            cause="nothing was ever committed here",
        ) from error
    except OSError as error:
        raise as_checkpoint_error(error, "read index", path) from error
    index = decode(_open_image(data, path, 0), path)
    trailer = Trailer.unpack(data[-Trailer.SIZE_BYTES :], path, len(data) - Trailer.SIZE_BYTES)
    if index.save_id != trailer.save_id:
        raise CorruptionError(
            "read index", path=path, expected=f"save id {trailer.save_id}", found=index.save_id
        )
    return index


def _check_size(path: str) -> None:
    """Refuse a file whose length is not what its trailer says, before that length is allocated."""
    with open_regular(path, "read index") as file:
        size = os.fstat(file.fileno()).st_size
        position = size - Trailer.SIZE_BYTES
        file.seek(max(position, 0))
        trailer = Trailer.unpack(file.read(Trailer.SIZE_BYTES), path, position)
    if trailer.image_offset != 0 or trailer.image_length != position:
        raise CorruptionError(
            "read index",
            path=path,
            expected=f"{trailer.image_offset + trailer.image_length + Trailer.SIZE_BYTES} bytes",
            found=f"{size} bytes",
        )


def read_footer(file: BinaryIO, path: str, length: int) -> Index:
    """The group's own rows, from the end of an open subfile of `length` bytes."""
    position = length - Trailer.SIZE_BYTES
    file.seek(max(position, 0))
    trailer = Trailer.unpack(file.read(Trailer.SIZE_BYTES), path, position)
    file.seek(trailer.image_offset)
    data = file.read(length - trailer.image_offset)
    return decode(_open_image(data, path, trailer.image_offset), path)


def _open_image(data: bytes, path: str, base: int) -> bytes:
    """The image before the trailer that ends `data`, checked; `base` is the offset of `data` in its
    file.
    """
    position = len(data) - Trailer.SIZE_BYTES
    trailer = Trailer.unpack(data[max(position, 0) :], path, base + position)
    begin = trailer.image_offset - base
    image = data[max(begin, 0) : max(begin, 0) + trailer.image_length]
    if begin < 0 or begin + trailer.image_length > position:
        raise CorruptionError(
            "read index", path=path, offset=base, expected=f"{trailer.image_length} bytes of image"
        )
    found = _engine.crc32c(image)
    if found != trailer.image_crc32c:
        raise CorruptionError(
            "read index",
            path=path,
            offset=base + begin,
            expected=f"crc32c {trailer.image_crc32c:#010x}",
            found=f"{found:#010x}",
            cause="the index is damaged",
        )
    return image


def _found_instead(directory: str) -> str:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return f"no directory ({error.strerror})"
    return f"{len(names)} other entries" if names else "an empty directory"
