"""A conversion under way on this rank, and the ledger of what it has written.

Guarantees
----------
- Everything that is written is entered with its CRC32C as it was handed over, and compared when it
  is read back from the target, through the reader that would read it there.
- Ranks that wait for this one hear that it moves.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from megatron_uring import _engine
from megatron_uring.columns import Uint8Array
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.convert import parts as parts_module
from megatron_uring.convert.parts import Catalog, Part, Scratch, Source, batches
from megatron_uring.errors import (
    CheckpointError,
    CorruptionError,
    StateMismatchError,
    as_checkpoint_error,
)
from megatron_uring.objects import deserialize_object, prove_loadable, serialize_object


class Ledger:
    """What this rank has written: parts of tensors, and objects, each with its checksum."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._checksums: list[int] = []
        self._objects: dict[str, int] = {}

    def enter(self, parts: Sequence[Part], buffer: Uint8Array, at: Sequence[int]) -> None:
        """Enter parts that lie in `buffer`, each from `at` on."""
        for part, place in zip(parts, at, strict=True):
            self._parts.append(part)
            self._checksums.append(_engine.crc32c(buffer[place : place + part.nbytes].data))

    def enter_object(self, key: str, data: bytes) -> None:
        """Enter an object as it is stored."""
        self._objects[key] = _engine.crc32c(data)

    def compare(self, job: Job, target: Source, directory: str) -> None:
        """Read all of it from `target` and compare.

        Raises
        ------
        CorruptionError
            Naming the tensor or object that is not what was written.
        """
        number = 0
        for batch, at, size in batches(self._parts, parts_module.WINDOW_BYTES):
            buffer = job.scratch.take(size)
            target.fill(batch, buffer, at)
            job.moved(size)
            for part, place in zip(batch, at, strict=True):
                found = _engine.crc32c(buffer[place : place + part.nbytes].data)
                _require(f"tensor {part.key!r}", directory, self._checksums[number], found)
                number += 1
        for key, expected in self._objects.items():
            found = _engine.crc32c(target.object_bytes(key))
            _require(f"object {key!r}", directory, expected, found)


def _require(what: str, directory: str, expected: int, found: int) -> None:
    if expected != found:
        raise CorruptionError(
            f"read back {what}",
            path=directory,
            expected=f"crc32c {expected:#010x}, as it was written",
            found=f"{found:#010x}",
        )


@dataclass
class Job:
    """What the steps of a conversion have in common.

    Attributes
    ----------
    world
        Ranks that share the work.
    source, catalog
        What is converted; the catalog holds only keys that were asked for.
    directory
        Where it is written.
    config
    max_file_bytes
        Of a safetensors file.
    """

    world: Communicator
    source: Source
    catalog: Catalog
    directory: str
    config: Config
    max_file_bytes: int
    ledger: Ledger = field(default_factory=Ledger)
    notes: list[str] = field(default_factory=list)
    scratch: Scratch = field(default_factory=Scratch)
    moved_bytes: int = 0

    def moved(self, count: int) -> None:
        """So many bytes more were read or written."""
        self.moved_bytes += count
        self.world.report_progress(self.moved_bytes)

    def read(self, parts: Sequence[Part], at: Sequence[int], buffer: Uint8Array) -> None:
        """Read parts from the source, and enter them as what will be written."""
        self.source.fill(parts, buffer, at)
        self.ledger.enter(parts, buffer, at)
        self.moved(len(buffer))

    @property
    def own_objects(self) -> tuple[str, ...]:
        """Keys of the objects that this rank writes."""
        return self.catalog.object_keys[self.world.rank :: self.world.size]

    def object_bytes(self, key: str, *, wrapped: bool, proved: bool) -> bytes:
        """The archive of an object as the target stores it, entered in the ledger.

        Parameters
        ----------
        wrapped
            As the one element of a list.
        proved
            Whether it must load with ``weights_only=True``.

        Raises
        ------
        StateMismatchError
            Naming the key, if it cannot be loaded without running code, where that is needed.
        """
        allowed = self.config.allowed_globals
        data = self.source.object_bytes(key)
        if self.source.wraps_objects != wrapped:
            value: Any = deserialize_object(key, data, allowed)
            data = serialize_object(key, [value] if wrapped else _only(key, value), allowed)
        elif proved:
            prove_loadable(key, data, allowed)
        self.ledger.enter_object(key, data)
        return data

    def note_common(self) -> None:
        """Say so if the common state loads only where more classes are allowed than here."""
        if self.catalog.common is None:
            return
        try:
            prove_loadable("common state", self.catalog.common, self.config.allowed_globals)
        except CheckpointError as error:
            self.notes.append(f"the common state went along as it is, unread: {error.cause}")

    def path(self, name: str) -> str:
        """Of a file of the target."""
        return os.path.join(self.directory, name)

    @contextlib.contextmanager
    def new_file(self, name: str, kind: str) -> Iterator[BinaryIO]:
        """A new file of the target, durable when the block is over; `kind` is for messages.

        Raises
        ------
        StorageError
        """
        path = self.path(name)
        try:
            with open(path, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise as_checkpoint_error(error, f"write {kind} file", path) from error

    def metadata_bytes(self, backend: str, version: int) -> bytes:
        """Megatron's ``metadata.json``, as the target has it."""
        known = self.catalog.megatron or {}
        named = {**known, "sharded_backend": backend, "sharded_backend_version": version}
        return json.dumps(named).encode()


def _only(key: str, value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 1:
        found = f"{len(value)} elements" if isinstance(value, list) else type(value).__name__
        raise StateMismatchError(
            f"convert object {key!r}",
            expected="a list of one element, as Megatron saves objects",
            found=found,
        )
    return value[0]
