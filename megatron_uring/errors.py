"""The errors of the package: one family, `CheckpointError`, whose message says what to do next.

Guarantees
----------
- Every error that a caller can meet is a `CheckpointError`; its message is lowercase and gives, as
  far as they are known, operation, path, offset, expected, found and likely cause, in that order.
- An error survives the way from one rank to all others: `to_wire` and `from_wire` keep class and
  message.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class CheckpointError(Exception):
    """An operation on a checkpoint failed; nothing that was committed before is lost.

    Parameters
    ----------
    operation
        What was being done, as a short phrase: ``"write subfile"``.
    path
        File or directory concerned.
    offset
        Bytes from the start of `path`.
    expected, found
        What the operation needed and what it met instead.
    cause
        The likely cause, or the cure, in plain words.
    """

    _children: ClassVar[dict[str, type[CheckpointError]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        CheckpointError._children.setdefault(cls.__name__, cls)

    def __init__(
        self,
        operation: str,
        *,
        path: object = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        cause: object = None,
    ) -> None:
        self.operation = operation
        self.path = None if path is None else str(path)
        self.offset = offset
        self.expected = expected
        self.found = found
        self.cause = cause
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.operation]
        if self.path is not None:
            parts.append(self.path)
        if self.offset is not None:
            parts.append(f"offset {self.offset}")
        message = ": ".join(parts)
        if self.expected is not None:
            message += f": expected {self.expected}"
        if self.found is not None:
            message += f"{',' if self.expected is not None else ':'} found {self.found}"
        if self.cause is not None:
            message += f" ({self.cause})"
        return message

    def to_wire(self) -> tuple[str, str]:
        """Class name and message, all that another rank needs to raise the same error."""
        return type(self).__name__, str(self)

    @staticmethod
    def from_wire(class_name: str, message: str) -> CheckpointError:
        """The error that `to_wire` described; an unknown class comes back as `CheckpointError`."""
        return CheckpointError._children.get(class_name, CheckpointError)(message)


class StorageError(CheckpointError):
    """The file system refused or failed: permissions, space, a failed read, write, sync or
    rename.
    """


class CorruptionError(CheckpointError):
    """What was read is not what was written: checksum, length, magic, identity or coverage is
    wrong.
    """


class NotACheckpointError(CheckpointError):
    """The directory holds no committed checkpoint, or one of a format version this release cannot
    read.
    """


class StateMismatchError(CheckpointError):
    """State and checkpoint do not fit: a missing key, another shape or dtype, no owner or two of a
    shard.
    """


class MissingKeyError(StateMismatchError, KeyError):
    """The checkpoint holds no tensor and no object of that key; a `KeyError` too, as mappings
    raise it.
    """

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would put it into quotes


class CommunicationError(CheckpointError):
    """Ranks could not agree: one did not arrive within `timeout_s`, or the communicator broke."""


class UnsupportedError(CheckpointError):
    """This installation cannot do it: a Megatron-Core version, a patch point or an option that is
    not there.
    """


def as_checkpoint_error(
    error: BaseException, operation: str, path: object = None
) -> CheckpointError:
    """`error` itself if it is of the family, else the member that fits, with `error` as its
    ``__cause__``.
    """
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        where = error.filename or path
        if error.errno == errno.ENODATA:  # what the engine says of a file that ends early
            reason = f"{reason}; the file was cut while it was read"
            wrapped: CheckpointError = CorruptionError(operation, path=where, cause=reason)
        else:
            wrapped = StorageError(operation, path=where, cause=reason)
    else:
        wrapped = CheckpointError(operation, path=path, cause=f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
