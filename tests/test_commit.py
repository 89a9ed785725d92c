"""The commit: crash at every step, errors at every step, other people's files, the newest one."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter

import pytest
import torch

import megatron_uring
from megatron_uring import Config, _engine, commit, roots, verify
from megatron_uring import index as index_module
from megatron_uring.errors import (
    CheckpointError,
    CorruptionError,
    NotACheckpointError,
    StorageError,
)
from megatron_uring.layout import save_id_of

OTHERS = ("notes.txt", "modelopt_state", "data-x.bin", "metadata.json")


def state(value):
    return {
        "big": torch.full((270_000,), float(value)),
        "small": [torch.tensor(value), torch.full((3,), value)],
        "object": {"rng": "r" * value},
    }


def common(value):
    return b"common %d" % value


def put_others(directory):
    for name in OTHERS:
        (directory / name).write_text(name)


def holds(directory, config):
    """Which value the directory holds, after proving that all of it is that value."""
    restored = megatron_uring.restore(directory, config=config)
    value = int(restored["small"][0])
    expected = dict(megatron_uring.providers.flatten(state(value)))
    for key, leaf in megatron_uring.providers.flatten(restored):
        same = torch.equal(leaf, expected[key]) if torch.is_tensor(leaf) else leaf == expected[key]
        assert same, key
    index = index_module.read_index(str(directory))
    data = commit.read_common(
        str(directory), index.save_id, index.common_length, index.common_crc32c
    )
    assert data == common(value)
    return value


def assert_usable(directory, config, world, save):
    """Old or new, whole, others' files untouched, and the next save works and sweeps."""
    value = holds(directory, config)
    assert value in (1, 2)
    findings = verify.verify(str(directory), world, config)
    assert findings.good, findings.problems
    save(state(3), directory, config, common=common(3))
    assert holds(directory, config) == 3
    for name in OTHERS:
        assert (directory / name).read_text() == name
    save_id = index_module.read_index(str(directory)).save_id
    own = {save_id_of(name) for name in os.listdir(directory)} - {None}
    assert own == {save_id}
    return value


@pytest.fixture
def old(save, config, tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    put_others(directory)
    save(state(1), directory, config, common=common(1))
    return directory


# -------------------------------------------------------------------------------------------------
# crash

SERVER = """
import json, os, sys
import torch
import megatron_uring
from megatron_uring import Config, _engine
from megatron_uring.comm import SingleCommunicator
sys.path.insert(0, sys.argv[1])
from test_commit import common, state
for line in sys.stdin:
    wanted = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            config = Config(engine=wanted["engine"], slab_bytes=1 << 20, slab_count=2)
            _engine.inject_fault(
                wanted["operation"], "kill", skip=wanted["skip"], path_contains=wanted["directory"]
            )
            world = SingleCommunicator(30.0, "test", "host")
            megatron_uring.save(
                state(2), wanted["directory"], config=config, communicator=world, common=common(2)
            )
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), flush=True)
"""


@pytest.fixture(scope="module")
def crash():
    """Save state 2 in a forked process that kills itself at an operation; returns its signal."""
    here = os.path.dirname(__file__)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, here],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(**wanted):
        server.stdin.write(json.dumps(wanted) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    yield run
    server.stdin.close()
    assert server.wait(60) == 0
    server.stdout.close()


KILLED = ["open", "preallocate", "write", "sync", "truncate", "rename", "sync_directory", "remove"]


# The commit itself is the same for both engines: io_uring is asked where it does the work.
@pytest.mark.fault
@pytest.mark.parametrize(
    ("config", "operation"),
    [("posix", name) for name in KILLED] + [("io_uring", name) for name in ("write", "sync")],
    indirect=["config"],
)
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    old, config, world, save, crash, tmp_path, operation
):
    seen = []
    for skip in range(30):
        directory = tmp_path / f"at-{skip}"
        shutil.copytree(old, directory)
        found = crash(
            operation=operation, skip=skip, directory=str(directory), engine=config.engine
        )
        if found == 0:
            assert holds(directory, config) == 2
            break
        assert found == signal.SIGKILL
        seen.append(assert_usable(directory, config, world, save))
    assert found == 0 and seen, "no crash point, or more than were tried"
    assert seen == sorted(seen), "a later crash must not bring back an older state"
    if operation in ("write", "sync", "truncate", "rename"):
        assert seen[0] == 1


@pytest.mark.fault
def test_before_the_rename_the_old_one_loads_and_after_it_the_new_one(
    old, config, world, save, crash
):
    wanted = {"directory": str(old), "engine": config.engine}
    assert crash(operation="rename", skip=0, **wanted) == signal.SIGKILL
    assert holds(old, config) == 1
    # the sync of the directory that follows the rename is the third one
    assert crash(operation="sync_directory", skip=1, **wanted) == signal.SIGKILL
    assert assert_usable(old, config, world, save) == 2


@pytest.mark.fault
def test_a_crash_in_an_empty_directory_leaves_no_checkpoint(tmp_path, config, crash, save):
    directory = tmp_path / "fresh"
    found = crash(operation="rename", skip=0, directory=str(directory), engine=config.engine)
    assert found == signal.SIGKILL
    assert os.listdir(directory)
    with pytest.raises(NotACheckpointError):
        megatron_uring.restore(directory, config=config)
    save(state(1), directory, config, common=common(1))
    assert holds(directory, config) == 1
    assert len(os.listdir(directory)) == 4


# -------------------------------------------------------------------------------------------------
# errors

FAILED = ["open", "preallocate", "write", "sync", "truncate", "rename", "sync_directory"]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("config", "fault", "operation"),
    [("posix", "enospc", name) for name in FAILED]
    + [("io_uring", "eio", name) for name in ("open", "write", "sync")],
    indirect=["config"],
)
def test_an_error_at_any_operation_is_reported_with_its_text_and_loses_nothing(
    old, config, world, save, operation, fault
):
    text = {"eio": os.strerror(errno.EIO), "enospc": os.strerror(errno.ENOSPC)}[fault]
    failed, value = 0, 1
    for skip in range(30):
        if value != 1:
            save(state(1), old, config, common=common(1))
        _engine.inject_fault(operation, fault, skip=skip, path_contains=str(old))
        _engine.trace_start()
        try:
            save(state(2), old, config, common=common(2))
        except StorageError as error:
            assert text in str(error) and str(old) in str(error)
            failed += 1
            raised = True
        else:
            raised = False
        trace = _engine.trace_stop()
        _engine.clear_faults()
        # a save never fails for its timeline
        hit = any(row[4] < 0 for row in trace if "timeline-" not in row[1])
        assert raised == hit, f"the error at {operation} {skip} was swallowed"
        value = holds(old, config)
        own = {save_id_of(name) for name in os.listdir(old)} - {None}
        if raised and value == 1:
            assert own == {index_module.read_index(str(old)).save_id}, "debris was left"
        if not hit:
            break
    assert failed and not hit
    assert assert_usable(old, config, world, save) in (1, 2)


@pytest.mark.fault
def test_a_failed_rename_leaves_the_old_checkpoint(old, config, save):
    _engine.inject_fault("rename", "eio", path_contains=str(old))
    with pytest.raises(StorageError, match="Input/output error"):
        save(state(2), old, config, common=common(2))
    _engine.clear_faults()
    assert holds(old, config) == 1


@pytest.mark.fault
def test_a_failed_sync_is_never_retried_and_its_subfile_is_discarded(old, config, save):
    before = sorted(os.listdir(old))
    _engine.inject_fault("sync", "eio", path_contains="data-")
    _engine.trace_start()
    with pytest.raises(StorageError, match=r"sync subfile.*Input/output error"):
        save(state(2), old, config, common=common(2))
    trace = _engine.trace_stop()
    _engine.clear_faults()
    assert [row[0] for row in trace if "data-" in row[1]].count("sync") == 1
    assert sorted(os.listdir(old)) == before
    assert holds(old, config) == 1


def test_data_is_durable_before_the_rename_and_old_files_go_after_it(old, config, save):
    _engine.trace_start()
    save(state(2), old, config, common=common(2))
    trace = [(operation, os.path.basename(path)) for operation, path, *_ in _engine.trace_stop()]
    trace = [row for row in trace if not row[1].startswith("timeline-")]  # no part of the data
    kinds = [operation for operation, _ in trace]
    rename = kinds.index("rename")
    syncs = [n for n, (operation, name) in enumerate(trace) if operation == "sync"]
    writes = [n for n, (operation, name) in enumerate(trace) if operation == "write"]
    truncates = [n for n, kind in enumerate(kinds) if kind == "truncate"]
    data_sync = max(n for n in syncs if trace[n][1].startswith("data-"))
    assert max(n for n in [*writes, *truncates] if trace[n][1].startswith("data-")) < data_sync
    assert max(syncs) < rename and max(writes) < rename
    assert "sync_directory" in kinds[data_sync:rename] and "sync_directory" in kinds[rename:]
    current = index_module.read_index(str(old)).save_id
    removed = [n for n, (o, name) in enumerate(trace) if o == "remove" and name[:4] == "data"]
    assert removed and min(removed) > rename
    assert not [n for n in removed if current in trace[n][1]]
    assert Counter(kinds)["rename"] == 1


# -------------------------------------------------------------------------------------------------
# directories


def test_a_missing_directory_is_made_with_its_parents(tmp_path, save, posix):
    save(state(1), tmp_path / "a" / "b" / "c", common=common(1))
    assert holds(tmp_path / "a" / "b" / "c", posix) == 1


def test_a_path_that_is_a_file_is_a_storage_error(tmp_path, save):
    (tmp_path / "f").write_text("x")
    for path in (tmp_path / "f", tmp_path / "f" / "below"):
        with pytest.raises(
            StorageError, match=r"write to checkpoint directory.*(exists|directory)"
        ):
            save(state(1), path)
    assert (tmp_path / "f").read_text() == "x"


def test_a_symbolic_link_to_a_directory_is_followed(tmp_path, save, posix):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(state(1), tmp_path / "link", common=common(1))
    assert holds(tmp_path / "real", posix) == 1


def test_files_follow_the_umask(tmp_path, save):
    before = os.umask(0o027)
    try:
        save(state(1), tmp_path / "c", common=common(1))
    finally:
        os.umask(before)
    for entry in os.scandir(tmp_path / "c"):
        assert stat.S_IMODE(entry.stat().st_mode) == 0o640, entry.name


@pytest.mark.parametrize("config", ["posix"], indirect=True)
def test_a_directory_that_may_not_be_written_is_a_storage_error(old, config):
    program = (
        "import os, sys\n"
        "from megatron_uring import commit\n"
        "from megatron_uring.errors import StorageError\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: commit.prepare_directory(os.curdir)\n"
        "except StorageError as error: print(error)\n"
    )
    old.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        cwd=old,
        capture_output=True,
        text=True,
        timeout=120,
    )
    old.chmod(0o755)
    assert "write to checkpoint directory" in done.stdout, done.stderr
    assert os.strerror(errno.EACCES) in done.stdout
    assert holds(old, config) == 1


def test_only_names_of_ours_are_swept_and_discarded(tmp_path):
    keep, drop = "0" * 16, "1" * 16
    own = [f"data-{i}-00000.bin" for i in (keep, drop)] + [f".index-{drop}.tmp"]
    for name in (*own, *OTHERS):
        (tmp_path / name).write_text("x")
    assert sorted(commit.sweep(str(tmp_path), keep)) == sorted(own[1:])
    assert sorted(os.listdir(tmp_path)) == sorted([own[0], *OTHERS])
    commit.discard(str(tmp_path), keep)
    assert sorted(os.listdir(tmp_path)) == sorted(OTHERS)
    commit.discard(str(tmp_path / "missing"), keep)


def test_retiring_removes_our_checkpoint_and_nothing_else(old, config):
    commit.retire(str(old))
    assert sorted(os.listdir(old)) == sorted(OTHERS)
    with pytest.raises(NotACheckpointError):
        megatron_uring.restore(old, config=config)
    commit.retire(str(old))


def test_a_replaced_file_has_the_new_content_and_no_temporary_is_left(tmp_path):
    (tmp_path / "metadata.json").write_text("old")
    commit.replace_file(str(tmp_path), "metadata.json", b"new", "0" * 16)
    commit.replace_common(str(tmp_path), b"state", "0" * 16)
    assert (tmp_path / "metadata.json").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["common.pt", "metadata.json"]


@pytest.mark.fault
@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
def test_a_file_that_could_not_be_replaced_keeps_its_old_content(tmp_path, operation):
    (tmp_path / "metadata.json").write_text("old")
    _engine.inject_fault(operation, "enospc", path_contains=str(tmp_path))
    with pytest.raises(StorageError, match="No space left on device"):
        commit.replace_file(str(tmp_path), "metadata.json", b"new", "0" * 16)
    assert (tmp_path / "metadata.json").read_text() == "old"


def test_damaged_or_missing_common_state_is_corruption(old):
    index = index_module.read_index(str(old))
    wanted = (str(old), index.save_id, index.common_length, index.common_crc32c)
    path = old / f"common-{index.save_id}.pt"
    path.write_bytes(b"Common 1")
    with pytest.raises(CorruptionError, match="read common state"):
        commit.read_common(*wanted)
    path.write_bytes(b"common 1 and more")
    with pytest.raises(CorruptionError, match="found 17 bytes"):
        commit.read_common(*wanted)
    path.unlink()
    with pytest.raises(CorruptionError, match="no such file"):
        commit.read_common(*wanted)


def test_save_ids_do_not_repeat():
    ids = {commit.new_save_id() for _ in range(1000)}
    assert len(ids) == 1000 and all(len(i) == 16 and int(i, 16) >= 0 for i in ids)


# -------------------------------------------------------------------------------------------------
# the newest one


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Iterations 10 and 20 committed, 30 not."""
    from megatron_uring.comm import SingleCommunicator

    root = tmp_path_factory.mktemp("root")
    config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2)
    world = SingleCommunicator(30.0, "test", "host")
    for iteration in (10, 20):
        directory = root / f"iter_{iteration:07d}"
        megatron_uring.save(
            {"i": torch.tensor(iteration)}, directory, config=config, communicator=world
        )
    (root / "iter_0000030").mkdir()
    (root / "iter_0000030" / "data-0123456789abcdef-00000.bin").write_bytes(b"half")
    (root / "iter_bad").mkdir()
    return root


@pytest.mark.parametrize(
    ("tracker", "iteration"),
    [
        ("10", 10),
        ("20\n", 20),
        ("", 20),
        (None, 20),
        ("25", 20),
        ("30", 20),
        ("release", 20),
        ("\0\0", 20),
    ],
    ids=["older", "newest", "empty", "missing", "missing directory", "ahead", "word", "zeros"],
)
def test_the_tracker_is_believed_if_what_it_names_is_committed(root, posix, tracker, iteration):
    path = root / "latest_checkpointed_iteration.txt"
    path.unlink(missing_ok=True)
    if tracker is not None:
        path.write_text(tracker)
    assert roots.resolve_latest(str(root)) == str(root / f"iter_{iteration:07d}")
    assert int(megatron_uring.restore(root, config=posix)["i"]) == iteration


def test_a_checkpoint_itself_is_resolved_to_itself(root):
    assert roots.resolve_latest(str(root / "iter_0000010")) == str(root / "iter_0000010")


def test_longer_iteration_numbers_are_compared_as_numbers(tmp_path, save):
    for name in ("iter_9999999", "iter_10000000"):
        save({"a": 1}, tmp_path / name)
    assert roots.resolve_latest(str(tmp_path)).endswith("iter_10000000")


def test_where_nothing_is_committed_the_error_says_what_was_there(root, tmp_path):
    with pytest.raises(NotACheckpointError, match=r"0 iter_\* directories, none committed"):
        roots.resolve_latest(str(tmp_path))
    with pytest.raises(NotACheckpointError):
        roots.resolve_latest(str(tmp_path / "missing"))


def test_a_damaged_index_is_reported_as_damage_not_as_no_checkpoint(old, config):
    path = old / "index.h5"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"index\.h5"):
        megatron_uring.restore(old, config=config)
    assert commit.committed_save_id(str(old)) is None
    with pytest.raises(CheckpointError):
        roots.resolve_latest(str(old / "missing"))


def test_debris_of_failed_saves_is_swept_before_the_next_one_needs_the_space(tmp_path, posix):
    megatron_uring.save({"x": torch.ones(3)}, tmp_path, config=posix)
    committed = commit.committed_save_id(str(tmp_path))
    debris = tmp_path / "data-00000000000000aa-00000.bin"
    debris.write_bytes(b"x")
    (tmp_path / "other.bin").write_bytes(b"x")
    commit.sweep_debris(str(tmp_path))
    assert not debris.exists() and (tmp_path / "other.bin").exists()
    assert commit.committed_save_id(str(tmp_path)) == committed
    assert megatron_uring.restore(tmp_path, config=posix)["x"].tolist() == [1, 1, 1]


def test_a_save_gives_way_to_one_that_committed_meanwhile(tmp_path, posix):
    megatron_uring.save({"x": torch.ones(3)}, tmp_path, config=posix)
    committed = commit.committed_save_id(str(tmp_path))
    with pytest.raises(StorageError, match="another run saves into the same directory"):
        commit.publish(str(tmp_path), "00000000000000aa", b"late", replaces=None)
    assert commit.committed_save_id(str(tmp_path)) == committed
    assert megatron_uring.restore(tmp_path, config=posix)["x"].tolist() == [1, 1, 1]


def test_a_committed_save_is_kept_when_the_directory_cannot_be_synced(tmp_path, posix):
    megatron_uring.save({"x": torch.ones(3)}, tmp_path, config=posix)
    _engine.inject_fault("sync_directory", "eio", skip=2)
    try:
        with pytest.raises(StorageError):
            megatron_uring.save({"x": torch.zeros(3)}, tmp_path, config=posix)
    finally:
        _engine.clear_faults()
    assert megatron_uring.restore(tmp_path, config=posix)["x"].tolist() == [0, 0, 0]
