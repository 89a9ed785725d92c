"""What the patched names do: each function takes the place of one Megatron method.

Guarantees
----------
- Loading looks at the directory, not at the strategy: ours is read by us, anything else by
  Megatron's own code.
- No collective is added to loading.
- The common state is kept under the save id by our save. Where Megatron keeps a ``common.pt``, up
  to 0.18, it reaches that only after the commit, or, if some other strategy wrote the tensors,
  right before Megatron's own ``metadata.json``.
- A save that our writer did not see is counted and logged.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from megatron_uring import checkpoint, commit
from megatron_uring import index as index_module
from megatron_uring.errors import CheckpointError
from megatron_uring.index_rules import without_tensors
from megatron_uring.layout import BACKEND, BACKEND_VERSION, COMMON_NAME, INDEX_NAME, METADATA_NAME
from megatron_uring.megatron import asynchronous, convert, versions
from megatron_uring.megatron.convert import megatron_errors
from megatron_uring.objects import deserialize_object, serialize_object
from megatron_uring.report import Report

_log = logging.getLogger("megatron_uring")

Original = Callable[..., Any]

# By directory, on rank 0: the common state that it was given, and the save that our writer
# committed.
_common: dict[str, bytes | CheckpointError] = {}
_committed: dict[str, str] = {}


def is_ours(directory: object) -> bool:
    """Whether a directory's checkpoint is in our format; ``metadata.json`` decides where there is
    one.
    """
    directory = str(directory)
    if os.path.exists(os.path.join(directory, METADATA_NAME)):
        return commit.megatron_backend(directory) == BACKEND
    return os.path.exists(os.path.join(directory, INDEX_NAME))


# -------------------------------------------------------------------------------------------------
# saving


def save(
    installed: Any,
    original: Original,
    strategy: Any,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *arguments: Any,
    **keywords: Any,
) -> None:
    """``TorchDistSaveShardedStrategy.save``."""
    if _is_remote(checkpoint_dir):
        original(strategy, sharded_state_dict, checkpoint_dir, *arguments, **keywords)
        return
    with megatron_errors():
        _save(installed, sharded_state_dict, checkpoint_dir)


def async_save(
    installed: Any,
    original: Original,
    strategy: Any,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """``TorchDistSaveShardedStrategy.async_save``: written by native threads of this process; the
    request's first finalize function commits.
    """
    if _is_remote(checkpoint_dir):
        return original(strategy, sharded_state_dict, checkpoint_dir, *arguments, **keywords)
    with megatron_errors():
        pending = _begin(installed, checkpoint.save_async, sharded_state_dict, checkpoint_dir)

    def commit_save() -> None:
        with megatron_errors():
            _committed_by(installed, pending.wait(), checkpoint_dir)

    return asynchronous.request(pending, commit_save)


def _save(installed: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
    report = _begin(installed, checkpoint.save, sharded_state_dict, checkpoint_dir)
    _committed_by(installed, report, checkpoint_dir)


def _begin(
    installed: Any, save: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any
) -> Any:
    config = installed.config
    sharded_state_dict = _take_common_object(installed, sharded_state_dict, checkpoint_dir)
    installed.counts.begun_saves += 1
    common = _common.pop(_key(checkpoint_dir), None)
    failure = common if isinstance(common, CheckpointError) else None
    return save(
        convert.MegatronState(sharded_state_dict, failure, config.allowed_globals),
        str(checkpoint_dir),
        config=config,
        common=common if isinstance(common, bytes) else None,
    )


def _committed_by(installed: Any, report: Report, checkpoint_dir: Any) -> None:
    installed.counts.saves += 1
    if torch.distributed.get_rank() == 0:  # where save_config follows
        _committed[_key(checkpoint_dir)] = report.save_id


def _take_common_object(installed: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
    """The rest of the state, where the common state is an object beside the tensors: it is kept as
    `save_common` keeps it, so that a checkpoint is the same whichever version wrote it.
    """
    if not versions.has_common_object():
        return sharded_state_dict

    def is_common(leaf: Any) -> bool:
        return isinstance(leaf, ShardedObject) and leaf.key == versions.COMMON_OBJECT

    common, rest = extract_matching_values(sharded_state_dict, is_common)
    for leaf in nested_values(common):
        if is_main_replica(leaf.replica_id):  # rank 0's
            _keep_common(installed, leaf.data, checkpoint_dir)
    return rest


def save_common(installed: Any, original: Original, *arguments: Any) -> None:
    """``TorchCommonSaveStrategy.save_common`` (up to 0.16) or ``serialization.save_common``: keep
    the bytes until it is known who writes the tensors.

    An error is kept too: raised here, on rank 0 alone, it would leave the other ranks waiting.
    """
    common_state_dict, checkpoint_dir = arguments[-2:]
    if _is_remote(checkpoint_dir):
        original(*arguments)
    elif torch.distributed.get_rank() == 0:
        _keep_common(installed, common_state_dict, checkpoint_dir)


def _keep_common(installed: Any, common_state_dict: Any, checkpoint_dir: Any) -> None:
    allowed = installed.config.allowed_globals
    try:
        _common[_key(checkpoint_dir)] = serialize_object("common state", common_state_dict, allowed)
    except CheckpointError as error:
        _common[_key(checkpoint_dir)] = _with_key(common_state_dict, allowed) or error


def _with_key(common_state_dict: Any, allowed_globals: tuple[str, ...]) -> CheckpointError | None:
    """The error of the first entry that by itself cannot be loaded again; names its key."""
    for key, value in common_state_dict.items():
        try:
            serialize_object(f"common state: {key}", value, allowed_globals)
        except CheckpointError as error:
            return error
    return None


def save_config(installed: Any, original: Original, config: Any, checkpoint_dir: Any) -> None:
    """``serialization.save_config``: on rank 0, after the tensors were written by us or by
    another.
    """
    key = _key(checkpoint_dir)
    save_id = _committed.pop(key, None)
    directory = str(checkpoint_dir)
    with megatron_errors():
        if save_id is not None:
            config.sharded_backend, config.sharded_backend_version = BACKEND, BACKEND_VERSION
            text = json.dumps(asdict(config)).encode()
            commit.replace_file(directory, METADATA_NAME, text, save_id)
            _publish_common(directory, save_id)
            return
        if installed.saving:
            installed.counts.bypassed_saves += 1
            _log.warning("%s was not written by megatron_uring (another strategy)", directory)
        common = _common.pop(key, None)
        if isinstance(common, CheckpointError):
            raise common
        if common is not None:
            commit.replace_file(directory, COMMON_NAME, common, commit.new_save_id())
        elif versions.has_common_object() and is_ours(checkpoint_dir):
            commit.remove_common(directory)
        original(config, checkpoint_dir)
        if not _is_remote(checkpoint_dir):
            commit.retire(directory)


def _publish_common(directory: str, save_id: str) -> None:
    if versions.has_common_object():
        commit.remove_common(directory)
        return
    index = index_module.read_index(directory)
    if index.common_length >= 0:
        data = commit.read_common(directory, save_id, index.common_length, index.common_crc32c)
        commit.replace_common(directory, data, save_id)


# -------------------------------------------------------------------------------------------------
# loading


def load(
    installed: Any,
    original: Original,
    strategy: Any,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """``TorchDistLoadShardedStrategy.load``."""
    if not is_ours(checkpoint_dir):
        return original(strategy, sharded_state_dict, checkpoint_dir, *arguments, **keywords)
    with megatron_errors():
        tensors = convert.values(sharded_state_dict, ShardedTensor)
        keys = [leaf.unique_key for leaf in convert.values(sharded_state_dict, ShardedObject)]
        objects = checkpoint.restore_into(
            str(checkpoint_dir),
            [request for leaf in tensors for request in convert.requests(leaf)],
            list(dict.fromkeys(keys)),
            config=installed.config,
        ).objects
        installed.counts.loads += 1

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return leaf.data.detach()
        return objects[leaf.unique_key] if isinstance(leaf, ShardedObject) else leaf

    return dict_list_map_outplace(filled, sharded_state_dict)


def load_common(
    installed: Any, original: Original, *arguments: Any, checkpoint_dir: Any = None
) -> Any:
    """``TorchCommonLoadStrategy.load_common`` (up to 0.16), ``serialization.load_common`` or
    ``load_common_state_dict``.
    """
    if checkpoint_dir is None:
        *arguments_before, checkpoint_dir = arguments
    else:
        arguments_before = list(arguments)
    if not is_ours(checkpoint_dir):
        return original(*arguments_before, checkpoint_dir)
    with megatron_errors():
        directory = str(checkpoint_dir)
        index = index_module.read_index(directory)
        if index.common_length < 0:
            return {}
        data = commit.read_common(
            directory, index.save_id, index.common_length, index.common_crc32c
        )
        return deserialize_object("common state", data, installed.config.allowed_globals)


def has_common_file(installed: Any, original: Original, checkpoint_dir: Any) -> Any:
    """``serialization._legacy_common_state_exists``: whether `load_common` is the one to ask."""
    return is_ours(checkpoint_dir) or original(checkpoint_dir)


def load_tensors_metadata(
    installed: Any,
    original: Original,
    strategy: Any,
    checkpoint_dir: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """``TorchDistLoadShardedStrategy.load_tensors_metadata``."""
    if not is_ours(checkpoint_dir):
        return original(strategy, checkpoint_dir, *arguments, **keywords)
    with megatron_errors():
        return convert.tensors_metadata(index_module.read_index(str(checkpoint_dir)))


def load_sharded_metadata(
    installed: Any,
    original: Original,
    strategy: Any,
    checkpoint_dir: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """``TorchDistLoadShardedStrategy.load_sharded_metadata``."""
    if not is_ours(checkpoint_dir):
        return original(strategy, checkpoint_dir, *arguments, **keywords)
    with megatron_errors():
        index = index_module.read_index(str(checkpoint_dir))
        found = {**convert.objects_metadata(index), **convert.tensors_metadata(index)}
        if index.common_length >= 0 and versions.has_common_object():
            key = ShardedObject(versions.COMMON_OBJECT, None, (1,), (0,)).unique_key
            found[key] = ShardedObject.empty_from_unique_key(key)
        return found


def remove_sharded_tensors(
    installed: Any, original: Original, strategy: Any, checkpoint_dir: Any, key_prefix: str
) -> Any:
    """``TorchDistLoadShardedStrategy.remove_sharded_tensors``: the rows leave the index, the bytes
    stay.
    """
    if not is_ours(checkpoint_dir):
        return original(strategy, checkpoint_dir, key_prefix)
    with megatron_errors():
        directory = str(checkpoint_dir)
        index = without_tensors(index_module.read_index(directory), key_prefix)
        commit.publish(directory, index.save_id, index_module.sealed(index), replaces=index.save_id)
        return None


def _key(checkpoint_dir: Any) -> str:
    return os.path.realpath(str(checkpoint_dir))


def _is_remote(checkpoint_dir: Any) -> bool:
    """Whether the path belongs to the multi-storage client, which only Megatron's own code can
    reach.
    """
    return not isinstance(checkpoint_dir, str | Path) or str(checkpoint_dir).startswith("msc:/")


def forget() -> None:
    """Drop what a save left behind that was never finished."""
    _common.clear()
    _committed.clear()
