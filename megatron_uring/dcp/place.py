"""The place of a checkpoint, as DCP names it to storage writers and readers.

Guarantees
----------
- A directory that each call names (``checkpoint_id``) wins over the one given once.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_uring.errors import UnsupportedError


class Place:
    """What a storage writer and a storage reader have in common; stands before DCP's own class.

    Parameters
    ----------
    directory
        None: the first ``checkpoint_id`` names it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._directory = None if directory is None else os.fspath(directory)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory."""
        return self._directory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, and no URL."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Take `checkpoint_id` as the directory from now on."""
        if checkpoint_id is not None:
            self._directory = os.fspath(checkpoint_id)

    def chosen_directory(self) -> str:
        """The directory, which has to be known now."""
        if self._directory is None:
            raise UnsupportedError(
                f"use {type(self).__name__}",
                expected="a directory",
                found="none",
                cause="give it one, or checkpoint_id",
            )
        return self._directory
