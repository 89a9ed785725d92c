"""Safetensors files as a source of a conversion.

Guarantees
----------
- A key that two files hold, a file that is cut or has bytes too many, and an index that names what
  is not there are errors that name the file.
- They hold no objects and no common state; for Megatron the common state is empty.
"""

from __future__ import annotations

import os

from megatron_uring.columns import Uint8Array
from megatron_uring.convert import safetensors_layout as layout
from megatron_uring.convert.files import Files, FileSource
from megatron_uring.convert.parts import Catalog
from megatron_uring.errors import CorruptionError, MissingKeyError
from megatron_uring.objects import serialize_object


class SafetensorsSource(FileSource):
    """A `parts.Source` over the safetensors files of a directory, or one such file.

    Raises
    ------
    CheckpointError
        If it cannot be read.
    """

    def __init__(self, path: str) -> None:
        if os.path.isdir(path):
            directory, names = path, layout.read_names(path)
        else:
            directory, name = os.path.split(path)
            names = [name]
        files = Files(directory)
        try:
            tensors = [one for name in names for one in layout.read_header(files, name)]
        finally:
            files.close()
        seen: dict[str, str] = {}
        for one in tensors:
            if one.key in seen:
                raise CorruptionError(
                    f"read tensor {one.key!r}",
                    path=os.path.join(directory, one.file),
                    expected="one file with it",
                    found=f"another in {seen[one.key]}",
                )
            seen[one.key] = one.file
        self._tensors = tensors
        catalog = Catalog(
            layout.table_of(tensors),
            common=serialize_object("common state", {}),
            megatron={"sharded_backend": "safetensors", "sharded_backend_version": 1},
        )
        super().__init__(directory, catalog)

    def read_run(self, row: int, start_bytes: int, into: Uint8Array) -> None:
        """Fill `into` with the bytes from `start_bytes` of the piece in this row of the catalog."""
        tensor = self._tensors[row]
        self.files.read(tensor.file, tensor.start + start_bytes, into)

    def object_bytes(self, key: str) -> bytes:
        """There is none."""
        raise MissingKeyError(f"read object {key!r}", expected="an object", found="safetensors")
