"""Sources whose pieces lie in files, each as one run of bytes that is read as it is.

Guarantees
----------
- A read ends where it was asked to, or is an error that names file and offset: a file that was cut
  is never taken for a whole one.
- The pieces of each tensor are proved to cover it exactly once before any of it is read.
- Few files are open at a time.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from megatron_uring import ownership
from megatron_uring.columns import Uint8Array
from megatron_uring.convert.parts import Catalog, Part
from megatron_uring.errors import CheckpointError, CorruptionError, as_checkpoint_error
from megatron_uring.regular import require_regular

_OPEN_FILES = 32


class Files:
    """Open files of a directory, by name; few at a time."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._descriptors: dict[str, int] = {}

    def read(self, name: str, offset: int, into: Uint8Array) -> None:
        """Fill `into` with the bytes at `offset`.

        Raises
        ------
        CorruptionError
            If the file ends before.
        StorageError
        """
        path = os.path.join(self.directory, name)
        view, done = into.data, 0
        try:
            descriptor = self._open(name, path)
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if not count:
                    raise _cut(path, offset + done, offset + len(view))
                done += count
        except OSError as error:
            raise as_checkpoint_error(error, "read source", path) from error

    def read_bytes(self, name: str, offset: int, length: int) -> bytes:
        """So many bytes; none is allocated before it is known that the file has them."""
        size = self.size(name)
        if offset < 0 or length < 0 or offset + length > size:
            raise _cut(os.path.join(self.directory, name), size, offset + length)
        data = np.empty(length, np.uint8)
        self.read(name, offset, data)
        return data.tobytes()

    def read_file(self, name: str) -> bytes:
        """All of a file."""
        return self.read_bytes(name, 0, self.size(name))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        path = os.path.join(self.directory, name)
        try:
            return os.fstat(self._open(name, path)).st_size
        except OSError as error:
            raise as_checkpoint_error(error, "read source", path) from error

    def _open(self, name: str, path: str) -> int:
        descriptor = self._descriptors.pop(name, -1)
        if descriptor < 0:
            require_regular(path, "read source")
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[name] = descriptor
        while len(self._descriptors) > _OPEN_FILES:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        return descriptor

    def close(self) -> None:
        """All of them."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popitem()[1])


def _cut(path: str, found: int, expected: int) -> CorruptionError:
    return CorruptionError(
        "read source",
        path=path,
        offset=found,
        expected=f"at least {expected} bytes",
        found="the end of the file",
        cause="the file was cut",
    )


class FileSource(ABC):
    """A `parts.Source` over pieces in files.

    Parameters
    ----------
    directory
    catalog
    """

    wraps_objects = False

    def __init__(self, directory: str, catalog: Catalog) -> None:
        self.catalog, self.files = catalog, Files(directory)
        shards = catalog.shards
        by_tensor = shards.by_tensor()
        self._rows = {key: by_tensor.of(number) for number, key in enumerate(shards.keys)}
        try:
            count = len(shards)
            ownership.check_ownership(
                shards, np.zeros(count, np.int32), np.ones(count, bool), operation="check source"
            )
        except CheckpointError as error:
            raise CorruptionError("check source", path=directory, cause=error) from error

    @abstractmethod
    def read_run(self, row: int, start_bytes: int, into: Uint8Array) -> None:
        """Fill `into` with the bytes from `start_bytes` of the piece in this row of the catalog."""

    @abstractmethod
    def object_bytes(self, key: str) -> bytes:
        """The ``torch.save`` archive of an object, as it is stored."""

    def fill(self, parts: Sequence[Part], buffer: Uint8Array, at: Sequence[int]) -> None:
        """Read each part to its place in `buffer`, bytes from its start."""
        for part, place in zip(parts, at, strict=True):
            for offset, shape, where in part.boxes(place):
                self._fill_box(part, offset, shape, buffer[where])

    def _fill_box(
        self, part: Part, offset: tuple[int, ...], shape: tuple[int, ...], into: Uint8Array
    ) -> None:
        shards, ndim, item = self.catalog.shards, len(shape), part.item_bytes
        first, size = np.array(offset, np.int64), np.array(shape, np.int64)
        rows = self._rows[part.key]
        piece_first, piece_size = shards.offset[rows, :ndim], shards.shape[rows, :ndim]
        low = np.maximum(piece_first, first)
        count = np.minimum(piece_first + piece_size, first + size) - low
        for number in np.flatnonzero((count > 0).all(axis=1)).tolist():
            begin = _run_start(
                piece_size[number].tolist(),
                (low[number] - piece_first[number]).tolist(),
                count[number].tolist(),
            )
            if (count[number] == size).all():
                self.read_run(int(rows[number]), begin * item, into)
                continue
            run = np.empty(int(count[number].prod()) * item, np.uint8)
            self.read_run(int(rows[number]), begin * item, run)
            where = tuple(
                slice(start, start + length)
                for start, length in zip(
                    (low[number] - first).tolist(), count[number].tolist(), strict=True
                )
            )
            into.reshape(*shape, item)[where] = run.reshape(*count[number].tolist(), item)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def _run_start(shape: list[int], offset: list[int], count: list[int]) -> int:
    """Number of the first element of a box that is one run of a row-major array."""
    start, partial = 0, False
    for whole, first, length in zip(shape, offset, count, strict=True):
        assert length == whole or not partial, "a box that is no run of its piece"
        partial = partial or length > 1
        start = start * whole + first
    return start
