"""The error family: messages, wire form, translation of other errors."""

import errno
import os

import pytest

from megatron_uring import errors
from megatron_uring.errors import CheckpointError, StorageError, as_checkpoint_error

CHILDREN = [
    errors.StorageError,
    errors.CorruptionError,
    errors.NotACheckpointError,
    errors.StateMismatchError,
    errors.MissingKeyError,
    errors.CommunicationError,
    errors.UnsupportedError,
]


def test_message_gives_operation_path_offset_expected_found_cause_in_that_order():
    error = CheckpointError(
        "read block", path="/d/f", offset=4096, expected="a", found="b", cause="c"
    )
    assert str(error) == "read block: /d/f: offset 4096: expected a, found b (c)"


def test_message_leaves_out_what_is_not_known():
    assert str(CheckpointError("save")) == "save"
    assert str(CheckpointError("save", found=0)) == "save: found 0"
    assert str(CheckpointError("save", offset=0, cause="x")) == "save: offset 0 (x)"


def test_a_path_object_is_kept_as_text(tmp_path):
    assert CheckpointError("save", path=tmp_path).path == str(tmp_path)


@pytest.mark.parametrize("kind", CHILDREN)
def test_every_child_survives_the_wire_with_class_and_message(kind):
    error = kind("write", path="/d", offset=1, expected=2, found=3, cause="four")
    back = CheckpointError.from_wire(*error.to_wire())
    assert type(back) is kind
    assert str(back) == str(error)


def test_an_unknown_class_comes_back_as_the_base_class():
    back = CheckpointError.from_wire("FutureError", "what happened")
    assert type(back) is CheckpointError
    assert str(back) == "what happened"


def test_a_member_of_the_family_is_passed_through_unchanged():
    error = errors.CorruptionError("x")
    assert as_checkpoint_error(error, "other") is error


def test_an_os_error_becomes_a_storage_error_with_its_text_path_and_cause():
    inner = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/d/file")
    error = as_checkpoint_error(inner, "write subfile", "/d")
    assert type(error) is StorageError
    assert error.__cause__ is inner
    assert str(error) == "write subfile: /d/file (No space left on device)"


def test_an_os_error_without_file_name_gets_the_path_of_the_caller():
    assert as_checkpoint_error(OSError("odd"), "read", "/d").path == "/d"


def test_any_other_error_becomes_the_base_class_naming_its_type():
    error = as_checkpoint_error(ZeroDivisionError("by zero"), "collect state")
    assert type(error) is CheckpointError
    assert "ZeroDivisionError: by zero" in str(error)


def test_a_file_that_ends_early_is_damage():
    cut = OSError(errno.ENODATA, "read of 4096 bytes at offset 0: No data available", "data")
    error = as_checkpoint_error(cut, "read subfiles")
    assert isinstance(error, errors.CorruptionError)
    assert "was cut" in str(error) and error.__cause__ is cut
