"""A checkpoint as a lazy mapping: some keys, some layers, or one slice of it, in plain Python.

Guarantees
----------
- Opening reads the index and nothing else, and makes no Python object for each key beyond the key;
  a tensor's bytes are read when it is indexed, an object's when it is looked up.
- A read takes the blocks in which the wanted elements lie, and gaps between them of no more than
  ``gap_bytes``; each block is checked, and no code from the checkpoint is run.
- No Megatron, no MPI, no torch.distributed, no collective: any process may open any checkpoint.
- All that is read through one mapping is of the save that was opened: where that has been
  overwritten meanwhile, the error says so.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_uring import checkpoint, commit, roots, tensors
from megatron_uring import index as index_module
from megatron_uring.config import Config, config_or_default
from megatron_uring.errors import CheckpointError, StateMismatchError
from megatron_uring.index_rules import Index, PartOfIndex, part_of_index
from megatron_uring.layout import DTYPE_BYTES, DTYPE_NAMES
from megatron_uring.objects import deserialize_object
from megatron_uring.restoring import Request
from megatron_uring.selection import Item, select


def open_checkpoint(
    directory: str | os.PathLike[str], *, config: Config | None = None
) -> SavedCheckpoint:
    """Open a checkpoint for partial use; not collective.

    Parameters
    ----------
    directory
        A checkpoint, or a save root with ``iter_*`` directories, of which the newest committed one
        is taken.
    config
        Default: from the ``MEGATRON_URING_*`` variables. ``allowed_globals`` are the classes that
        objects may hold; a smaller ``gap_bytes`` reads less of what lies between strided rows, in
        more requests.

    Raises
    ------
    NotACheckpointError, CorruptionError
        If there is none, or its index is damaged.
    """
    resolved = roots.resolve_latest(os.path.abspath(os.fspath(directory)))
    index = index_module.read_index(resolved)
    return SavedCheckpoint(resolved, index, config_or_default(config))


class SavedCheckpoint(Mapping[str, Any]):
    """An open checkpoint: under the key of a tensor a `SavedTensor`, under that of an object it.

    Keys come in the order in which they were saved, tensors first. Two mappings are equal only if
    they are the same one. Nothing but memory is held open; `close`, or the end of a ``with``, gives
    it back.

    Attributes
    ----------
    directory
        That of the checkpoint itself.
    save_id
    """

    def __init__(self, directory: str, index: Index, config: Config) -> None:
        self.directory, self.save_id = directory, index.save_id
        self._index: Index | None = index
        self._config = config
        self._rows: _Rows | None = None
        self._read_bytes = 0

    # the mapping ---------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        rows = self._known()
        if key in rows.tensor:
            return SavedTensor(self, key, rows.tensor[key])
        if key not in rows.object:
            raise checkpoint.missing_key("look up", key, self.directory, self._open())
        part = part_of_index(self._open(), None, np.zeros(0, np.intp), [rows.object[key]])
        return self._restore(part, [], [key])[key]

    def __iter__(self) -> Iterator[str]:
        index = self._open()
        yield from index.shards.keys
        yield from index.object_keys

    def __len__(self) -> int:
        index = self._open()
        return len(index.shards.keys) + len(index.object_keys)

    def __contains__(self, key: object) -> bool:
        rows = self._known()
        return key in rows.tensor or key in rows.object

    __eq__ = object.__eq__  # that of mappings would read both
    __hash__ = object.__hash__

    @property
    def tensors(self) -> tuple[str, ...]:
        """Keys of the tensors."""
        return self._open().shards.keys

    @property
    def objects(self) -> tuple[str, ...]:
        """Keys of the objects."""
        return self._open().object_keys

    def matching(self, pattern: str) -> tuple[str, ...]:
        """Keys that match a shell pattern (`fnmatch`, case counts), in order.

        ``*`` and ``?`` match ``/`` and ``.`` too; a ``[`` of a key is written ``[[]``. The time for
        a key is at most that for one search through it for each ``*``.
        """
        return tuple(fnmatch.filter(self, pattern))

    def common(self) -> Any:
        """The state common to all ranks, which Megatron keeps in ``common.pt``: arguments,
        iteration and the like. An empty dict where none was saved.

        Raises
        ------
        StateMismatchError
            If it holds a class that is not allowed, naming it.
        CorruptionError
            If it is not what was committed.
        """
        index = self._open()
        if index.common_length < 0:
            return {}
        with self._explained():
            data = commit.read_common(
                self.directory, self.save_id, index.common_length, index.common_crc32c
            )
        self._read_bytes += len(data)
        return deserialize_object("common state", data, self._config.allowed_globals)

    # what is known without reading -------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many ranks saved it."""
        index = self._open()
        text = index.facts.get("world_size", "")
        return int(text) if text.isdecimal() else len(np.unique(index.regions.rank))

    @property
    def files(self) -> int:
        """How many subfiles hold tensors and objects."""
        return len(self._open().subfile_number)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and serialized objects."""
        index = self._open()
        return int(index.shard_extents.length.sum() + index.object_extents.length.sum())

    @property
    def read_bytes(self) -> int:
        """Bytes read through this mapping so far, without the index."""
        return self._read_bytes

    def __repr__(self) -> str:
        if self._index is None:
            return f"<closed checkpoint {self.directory}>"
        return (
            f"<checkpoint {self.directory}: save {self.save_id}, {len(self.tensors)} tensors, "
            f"{len(self.objects)} objects, {self.nbytes} bytes in {self.files} files>"
        )

    # the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the memory of the index back; what is read afterwards is refused. May be called
        again.
        """
        self._index = self._rows = None

    def __enter__(self) -> SavedCheckpoint:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Index:
        if self._index is None:
            raise CheckpointError("use checkpoint", path=self.directory, cause="it was closed")
        return self._index

    def _known(self) -> _Rows:
        index = self._open()
        if self._rows is None:
            self._rows = _Rows(index)
        return self._rows

    def _part(self, number: int) -> PartOfIndex:
        """The rows of one tensor."""
        return part_of_index(self._open(), number, self._known().shards.of(number), [])

    def _restore(self, part: Index, requests: list[Request], objects: list[str]) -> dict[str, Any]:
        with self._explained():
            restored = checkpoint.restore_into(
                self.directory, requests, objects, index=part, config=self._config
            )
        self._read_bytes += restored.read_bytes
        return restored.objects

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of an error that it comes from another save in the same directory, where it does."""
        try:
            yield
        except CheckpointError as error:
            found = commit.committed_save_id(self.directory)
            if found == self.save_id:
                raise
            raise StateMismatchError(
                "read checkpoint",
                path=self.directory,
                expected=f"save {self.save_id}, as when it was opened",
                found=f"save {found}" if found else "no committed checkpoint",
                cause="it was overwritten or removed since; open it again",
            ) from error


class _Rows:
    """Where the rows of each key are; made at the first look-up."""

    def __init__(self, index: Index) -> None:
        shards = index.shards
        self.tensor = dict(zip(shards.keys, range(len(shards.keys)), strict=True))
        self.object = dict(zip(index.object_keys, range(len(index.object_keys)), strict=True))
        self.shards = shards.by_tensor()


# -------------------------------------------------------------------------------------------------
# a tensor


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor of an open checkpoint; its elements are read when it is indexed.

    Indices are those of a torch tensor: integers, which drop their dimension, slices with positive
    steps, and an ellipsis. Each indexing reads, and gives a new tensor on the CPU; iterating does
    so for each number of the first dimension.

    Megatron stacks the layers of a model under one key, with the layer as first dimension:
    ``checkpoint["decoder.layers.mlp.linear_fc1.weight"][2]`` reads the third layer alone.

    Attributes
    ----------
    key
    """

    checkpoint: SavedCheckpoint = field(repr=False)
    key: str
    _number: int = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        shards, row = self._shards_and_first()
        return tuple(shards.global_shape[row, : shards.ndim[row]].tolist())

    @property
    def dtype(self) -> Any:
        """The torch dtype; raises `UnsupportedError` where this torch lacks it."""
        return tensors.torch_dtype(self._dtype_code)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * int(DTYPE_BYTES[self._dtype_code])

    @property
    def shards(self) -> int:
        """How many pieces it was saved in."""
        return len(self._rows)

    def __len__(self) -> int:
        if not self.shape:
            raise StateMismatchError(
                f"take length of tensor {self.key!r}", expected="a dimension", found="none"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self.read(number) for number in range(len(self)))

    def __repr__(self) -> str:
        dtype = DTYPE_NAMES[self._dtype_code]
        return f"<saved tensor {self.key!r}: {list(self.shape)} {dtype} in {self.shards} shards>"

    def __getitem__(self, index: Item | tuple[Item, ...]) -> Any:
        return self.read(index)

    def read(self, index: Item | tuple[Item, ...] = ..., *, into: Any = None) -> Any:
        """Read the elements at `index`, all of them by default.

        Parameters
        ----------
        index
            As in ``saved[index]``; ``numpy.s_[1:3, ..., ::2]`` writes one.
        into
            A tensor of the shape of the result, on any device, filled in place and returned.
            Default: a new one on the CPU.

        Raises
        ------
        StateMismatchError
            An index, or a shape or dtype of `into`, that does not fit; a checkpoint that was
            overwritten.
        CorruptionError
            A block that is not as it was saved. `into` may be half written then, unless
            ``verify_first`` is on.
        """
        shape = self.shape
        chosen = select(self.key, index, shape)
        target = into
        if into is None:
            target = tensors.new_tensor(self._dtype_code, chosen.shape)
        elif not tensors.is_tensor(into) or tuple(into.shape) != chosen.shape:
            found = list(into.shape) if tensors.is_tensor(into) else type(into).__name__
            raise StateMismatchError(
                f"read tensor {self.key!r}",
                expected=f"a tensor of shape {list(chosen.shape)} to read into",
                found=found,
            )
        filled = tensors.with_dimensions(self.key, target, chosen.dropped)
        request = Request(self.key, filled, shape, chosen.offset, step=chosen.step)
        self.checkpoint._restore(self.checkpoint._part(self._number), [request], [])
        return target

    @property
    def _rows(self) -> npt.NDArray[np.intp]:
        return self.checkpoint._known().shards.of(self._number)

    def _shards_and_first(self) -> tuple[Any, int]:
        return self.checkpoint._open().shards, int(self._rows[0])

    @property
    def _dtype_code(self) -> int:
        shards, row = self._shards_and_first()
        return int(shards.dtype[row])
