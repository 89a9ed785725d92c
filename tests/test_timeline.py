"""Timelines: what is kept of a save, that the save never fails for it, the trace that shows it."""

import dataclasses
import json
import logging
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import megatron_uring
from megatron_uring import Config, _engine, pending, progress, timeline, verify
from megatron_uring.cli import main
from megatron_uring.errors import CorruptionError, NotACheckpointError, StorageError
from megatron_uring.layout import timeline_name
from megatron_uring.report import Report

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import run_mpi

CALLER = ["collect", "begin", "plan", "engine", "begin to write", "drain wait", "footer", "commit"]
SMALL_POOL = Config(
    engine="posix", slab_bytes=1 << 20, slab_count=2, staging_bytes=2 << 20, posix_threads=1
)


def rows(one):
    """(name, begin, end) of a rank's spans, in seconds after its first one began."""
    columns = zip(one.name, one.begin_us, one.end_us, strict=True)
    first = one.begin_us[0]
    return [(name, (begin - first) / 1e6, (end - first) / 1e6) for name, begin, end in columns]


def spans(one):
    """The same by name; of those that come often, the last."""
    return {name: (begin, end) for name, begin, end in rows(one)}


def require_trace(made):
    """What viewers ask of a trace, and that no two spans of a track overlap halfway."""
    made = json.loads(json.dumps(made))
    tracks = {}
    named = {"process_name": set(), "thread_name": set()}
    for event in made["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            key = event["pid"] if event["name"].startswith("process") else event["tid"]
            named.setdefault(event["name"], set()).add(key)
            continue
        assert event["ph"] == "X" and event["name"] and event["cat"]
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int)
        assert event["ts"] >= 0 and event["dur"] >= 0
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert {pid for pid, _ in tracks} <= named["process_name"]
    assert {tid for _, tid in tracks} <= named["thread_name"]
    assert len({tid for _, tid in tracks}) == len(tracks)
    for events in tracks.values():
        open_ends = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)
    return tracks


def lazy_state(elements):
    """A parameter that an optimizer steps, so that an asynchronous save copies it later."""
    parameter = torch.nn.Parameter(torch.ones(elements))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(elements)
    return {"w": parameter}, optimizer


@pytest.fixture(scope="module")
def in_memory():
    """A folder in memory: what else uses the disk would decide who is slow, and for how long."""
    with tempfile.TemporaryDirectory(prefix="megatron_uring-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def slow_save(world, in_memory):
    """An asynchronous save of 8 MiB through a pool of 2 MiB to a disk that takes 20 ms a MiB."""
    state, optimizer = lazy_state(2 << 20)
    warm = {"x": torch.ones(1)}  # from here on the fence stands before steps
    megatron_uring.save_async(warm, in_memory / "x", config=SMALL_POOL, communicator=world).wait()
    optimizer.step()
    _engine.inject_fault("write", "delay", delay_s=0.02, count=-1, path_contains="data-")
    began = time.perf_counter()
    directory = str(in_memory / "c")
    one = megatron_uring.save_async(state, directory, config=SMALL_POOL, communicator=world)
    return SimpleNamespace(pending=one, step=optimizer.step, directory=directory, began=began)


# -------------------------------------------------------------------------------------------------
# what is kept


def test_phases_of_a_save_follow_each_other_and_add_up_to_its_duration(save, config, tmp_path):
    report = save({"w": torch.arange(500_000), "step": 3}, tmp_path, config)
    kept = timeline.read(str(tmp_path))
    (one,) = kept.ranks
    assert kept.save_id == report.save_id and not kept.asynchronous
    assert kept.state_bytes == report.state_bytes and len(kept.hosts) == 1
    phases = [row for row in rows(one) if row[0] in CALLER]
    assert [name for name, _, _ in phases] == CALLER
    assert all(a[2] == b[1] for a, b in pairwise(phases))
    assert sum(end - begin for _, begin, end in phases) == pytest.approx(report.seconds, abs=1e-4)
    assert report.seconds == pytest.approx(sum(report.phases_s.values()))
    assert abs(one.met_us / 1e6 - time.time()) < 60


def test_native_spans_lie_within_the_save_in_their_order(save, config, tmp_path):
    report = save({"w": torch.arange(500_000), "step": 3}, tmp_path, config)
    (one,) = timeline.read(str(tmp_path)).ranks
    found = spans(one)
    assert found["begin to write"][0] <= found["write"][0] == found["staging"][0]
    assert found["staging"][1] <= found["write"][1] <= found["drain wait"][1]
    assert found["footer"][0] <= found["sync"][0] <= found["sync"][1] <= found["footer"][1]
    commit = found["commit"]
    assert commit[0] <= found["index"][0] <= found["index"][1] <= found["publish"][0]
    assert found["publish"][1] <= found["sweep"][0] <= found["sweep"][1] <= commit[1]
    moved = dict(zip(one.name, one.moved_bytes, strict=True))
    assert moved["write"] == moved["staging"] >= 4_000_000 and moved["index"] > 0
    assert found["staging"][1] == pytest.approx(report.staged_s, abs=1e-4)
    assert found["write"][1] == pytest.approx(report.drained_s, abs=1e-4)


def test_an_asynchronous_save_shows_its_fence_and_when_threads_were_through(slow_save):
    slow_save.step()
    fenced_s = time.perf_counter() - slow_save.began
    time.sleep(0.5)  # nobody asks, and yet it is known when the last block was written
    asked_s = time.perf_counter() - slow_save.began
    report = slow_save.pending.wait()
    kept = timeline.read(slow_save.directory)
    found = spans(kept.ranks[0])
    assert kept.asynchronous and report.asynchronous and report.lazy_bytes == 8 << 20
    begin, end = found["fence wait"]
    assert end - begin == pytest.approx(report.fence_s, abs=1e-3) and report.fence_s > 0.05
    assert found["staging"][1] <= end + 1e-3 and end <= fenced_s + 1e-3
    assert 0.1 < found["write"][1] < asked_s - 0.2
    assert found["staging"][1] + 0.01 < found["write"][1]
    assert report.staged_s == pytest.approx(found["staging"][1], abs=1e-3)
    assert found["drain wait"][0] >= asked_s - 1e-2  # what lies before was the caller's
    syncs = [row for row in rows(kept.ranks[0]) if row[0] == "sync"]
    assert len(syncs) == 2 and all(found["write"][1] <= begin for _, begin, _ in syncs)
    assert report.drained_s == pytest.approx(syncs[0][2], abs=1e-3)
    require_trace(timeline.trace(kept))


def test_a_save_in_two_tiers_shows_them_beside_the_caller(world, tmp_path, in_memory):
    staging = str(in_memory / "staging")
    config = dataclasses.replace(SMALL_POOL, staging_directory=staging)
    _engine.inject_fault("write", "delay", delay_s=0.01, count=-1, path_contains="data-")
    state, _ = lazy_state(2 << 20)
    directory = str(tmp_path / "c")
    one = megatron_uring.save_async(state, directory, config=config, communicator=world)
    while not one.poll():  # the caller's spans lie within those of the thread
        time.sleep(0.01)
    report = one.wait()
    made = timeline.trace(timeline.read(directory))
    require_trace(made)
    native = {e["name"]: e for e in made["traceEvents"] if e.get("cat") == "native"}
    assert {"write to node", "staging", "forward"} <= set(native) and "write" not in native
    moved = [native[name]["args"] for name in ("write to node", "forward")]
    assert moved[0]["bytes"] == moved[1]["bytes"] >= 8 << 20
    assert moved[0]["GB/s"] > 0 < moved[1]["GB/s"] < 0.2  # of 10 ms a MiB
    assert f" MB on the node after {report.acknowledged_s:.2f} s, durable after " in report.line()


def test_spans_of_a_name_are_few_however_often_it_happens(slow_save, monkeypatch):
    monkeypatch.setattr(pending, "_SLOW_POLL_S", 0.0)
    for _ in range(100):
        slow_save.pending.poll()
        megatron_uring.fence()
    slow_save.pending.wait()
    (one,) = timeline.read(slow_save.directory).ranks
    assert one.name.count("poll") <= 16 and one.name.count("fence wait") <= 16
    assert "poll" in one.name and "commit" in one.name


def test_saves_onto_each_other_leave_the_timeline_of_the_last(save, tmp_path):
    for step in range(3):
        report = save({"step": step, "x": torch.ones(10)}, tmp_path)
    names = [path.name for path in tmp_path.glob("timeline-*")]
    assert names == [timeline_name(report.save_id)]
    assert timeline.read(str(tmp_path)).save_id == report.save_id


def test_it_can_be_switched_off(save, tmp_path, posix):
    save({"x": torch.ones(10)}, tmp_path, Config(**{**vars(posix), "timeline": False}))
    assert list(tmp_path.glob("timeline-*")) == []
    with pytest.raises(StorageError, match=r"timeline-.*no such file.*TIMELINE=off"):
        timeline.read(str(tmp_path))


@pytest.mark.fault
@pytest.mark.parametrize(("operation", "fault"), [("write", "enospc"), ("open", "eio")])
def test_a_save_never_fails_for_its_timeline(
    save, tmp_path, posix, world, caplog, operation, fault
):
    _engine.inject_fault(operation, fault, path_contains="timeline-")
    save({"x": torch.arange(10)}, tmp_path)
    assert "has no timeline" in caplog.text and str(tmp_path) in caplog.text
    assert list(tmp_path.glob("timeline-*")) == []
    assert verify.verify(str(tmp_path), world, posix).good
    assert megatron_uring.restore(tmp_path, config=posix)["x"].tolist() == list(range(10))


def test_a_rank_that_does_not_answer_after_the_commit_is_logged(save, tmp_path, world, caplog):
    def gather(data, root=0):
        if b'"met_us"' in bytes(data):
            raise megatron_uring.CommunicationError("gather", cause="no progress for 1 s")
        return type(world).gather(world, data, root)

    world.gather = gather
    save({"x": torch.arange(10)}, tmp_path)
    assert "no progress for 1 s" in caplog.text


def test_no_timeline_is_waited_for_or_verified(save, tmp_path, posix, world):
    _engine.trace_start()
    save({"x": torch.arange(10)}, tmp_path)
    trace = [row[0] for row in _engine.trace_stop() if "timeline-" in row[1]]
    assert "write" in trace and "sync" not in trace
    (path,) = tmp_path.glob("timeline-*")
    path.write_bytes(b"\0")
    assert verify.verify(str(tmp_path), world, posix).good
    path.unlink()
    assert verify.verify(str(tmp_path), world, posix).good


def test_a_job_knows_when_it_was_staged_and_done(tmp_path):
    engine = _engine.Engine("posix", _engine.SlabPool(1 << 20, 2), queue_depth=2)
    file = _engine.File.create(str(tmp_path / "f"), direct=False)
    _engine.inject_fault("write", "delay", delay_s=0.2, path_contains=str(tmp_path))
    began = time.perf_counter()
    job = engine.write(file, 0, 1 << 20, megatron_uring.tables.no_pieces())
    assert job.done_at_s == 0
    assert job.wait(20.0)
    ended = time.perf_counter()
    assert began < job.staged_at_s < job.done_at_s - 0.1 and job.done_at_s <= ended
    sync = engine.sync(file)
    assert sync.wait(20.0) and sync.staged_at_s == sync.done_at_s >= ended
    failing = tmp_path / "g"
    _engine.inject_fault("write", "eio", path_contains=str(failing))
    file = _engine.File.create(str(failing), direct=False)
    job = engine.write(file, 0, 1 << 20, megatron_uring.tables.no_pieces())
    with pytest.raises(OSError, match="Input/output"):
        job.wait(20.0)
    assert job.staged_at_s > 0 and job.done_at_s > 0
    engine.close()


# -------------------------------------------------------------------------------------------------
# two ranks

PROGRAM = """
import logging, os, sys, time
import numpy as np
import torch
import megatron_uring
from megatron_uring import Config, Shard, _engine, comm, progress

root = sys.argv[1]
world = comm.connect(30.0, "mpi")
rank = world.rank
config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2, staging_bytes=2 << 20)
if rank == 1:  # on the other "host" the clock is an hour ahead
    real = time.time
    progress.Clock.__dataclass_fields__["began_at_s"].default_factory = None
    init = progress.Clock.__init__
    def ahead(self, *arguments):
        init(self, *arguments, began_at_s=real() + 3600.0)
    progress.Clock.__init__ = ahead
    _engine.inject_fault("write", "delay", delay_s=0.05, count=-1, path_contains="data-")

handler = logging.StreamHandler(sys.stdout)
logging.getLogger("megatron_uring").addHandler(handler)
logging.getLogger("megatron_uring").setLevel(logging.INFO)

parameter = torch.nn.Parameter(torch.full((1 << 20,), float(rank)))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.grad = torch.zeros(1 << 20)

def state():
    return {"w": Shard(parameter, (2 << 20,), (rank << 20,)), "step": 3}

for aggregation in ("rank", "shared"):
    time.sleep(0.3 * (1 - rank))  # who comes late is not slow
    chosen = Config(**{**vars(config), "aggregation": aggregation})
    where = os.path.join(root, "sync_" + aggregation)
    report = megatron_uring.save(state(), where, config=chosen, communicator=world)
    assert report.slowest_rank == 1 and report.slowest_s >= 0.1, report
    assert report.durable_s == report.seconds > report.slowest_s, report

where = os.path.join(root, "warm")
megatron_uring.save_async(state(), where, config=config, communicator=world).wait()
optimizer.step()
where = os.path.join(root, "async")
pending = megatron_uring.save_async(state(), where, config=config, communicator=world)
optimizer.step()
while not pending.poll():
    time.sleep(0.01)
report = pending.wait()
assert report.slowest_rank == 1 and report.asynchronous and report.fence_s >= 0, report
status = megatron_uring.status()["last_save"]
assert status["slowest_rank"] == 1 and status["blocked_ms"] == report.blocked_s * 1e3
assert report.durable_s == report.slowest_s + report.phases_s["collect"] < report.seconds
assert status["gigabytes_per_s"] == report.gigabytes_per_s > 0

# what one rank is told counts for all
off = Config(**{**vars(config), "timeline": rank == 1})
megatron_uring.save(state(), os.path.join(root, "off"), config=off, communicator=world)
print("rank", rank, "is through", flush=True)
"""


@pytest.fixture(scope="module")
def two_ranks(in_memory):
    root = in_memory / "ranks"
    root.mkdir()
    program = root / "program.py"
    program.write_text(PROGRAM)
    env = {"MEGATRON_URING_NODE_OF_RANK": "0,1"}
    done = run_mpi(2, program, str(root), env=env, timeout_s=240.0)
    assert done.output.count("is through") == 2, done.output
    return SimpleNamespace(root=root, output=done.output)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["sync_rank", "sync_shared", "async"])
def test_ranks_are_shown_beside_each_other_whatever_their_clocks_say(two_ranks, name):
    kept = timeline.read(str(two_ranks.root / name))
    assert [one.rank for one in kept.ranks] == [0, 1] and [o.node for o in kept.ranks] == [0, 1]
    assert kept.ranks[1].met_us - kept.ranks[0].met_us > 3_500_000_000
    made = timeline.trace(kept)
    tracks = require_trace(made)
    assert set(tracks) == {(1, 1000), (1, 1001), (2, 1002), (2, 1003)}
    for track in ((1, 1000), (2, 1002)):
        assert {event["name"] for event in tracks[track]} >= set(CALLER)
    for track in ((1, 1001), (2, 1003)):
        assert {event["name"] for event in tracks[track]} >= {"staging", "write"}
    ends = [max(e["ts"] + e["dur"] for e in tracks[track]) for track in ((1, 1000), (2, 1002))]
    assert abs(ends[0] - ends[1]) < 500_000  # both leave the last collective
    shifts = list(made["otherData"]["clock_shift_us"].values())
    assert shifts[0] == 0 and abs(shifts[1] - 3_600_000_000) < 1_000_000
    assert abs(datetime.fromisoformat(made["otherData"]["began"]).timestamp() - time.time()) < 600


@pytest.mark.mpi
def test_the_fence_of_the_slow_rank_is_the_longer_one(two_ranks):
    fast, slow = (spans(one) for one in timeline.read(str(two_ranks.root / "async")).ranks)
    assert slow["fence wait"][1] - slow["fence wait"][0] > 0.01
    assert slow["write"][1] - slow["write"][0] > 0.09  # four blocks, two at a time
    assert fast["write"][1] < slow["write"][1]


@pytest.mark.mpi
def test_each_save_logs_one_line_on_rank_0(two_ranks):
    lines = [line for line in two_ranks.output.splitlines() if line.startswith("saved ")]
    assert len(lines) == 5, two_ranks.output
    assert all("B/s" in line and "blocked for" in line for line in lines)
    assert sum("rank 1 slowest" in line for line in lines) >= 3


@pytest.mark.mpi
def test_rank_0_decides_for_all_whether_there_is_a_timeline(two_ranks):
    assert list((two_ranks.root / "off").glob("timeline-*")) == []


# -------------------------------------------------------------------------------------------------
# many ranks


class Many:
    """As rank 0 of 10,000 ranks on 1,250 nodes sees it."""

    rank, size = 0, 10_000
    node_of_rank = np.arange(10_000, dtype=np.int32) // 8
    hosts = tuple(f"node{n:04d}" for n in range(1250))

    def gather(self, data):
        return [
            np.frombuffer(
                data.replace(b'"rank":0,"node":0', b'"rank":%d,"node":%d' % (n, n // 8)), np.uint8
            )
            for n in range(self.size)
        ]


def test_ten_thousand_ranks_are_written_and_shown_fast(save, tmp_path, monkeypatch):
    clocks = []
    monkeypatch.setattr(timeline, "keep", lambda *a, **k: clocks.append(a[3]))
    report = save({"x": torch.ones(10)}, tmp_path)
    monkeypatch.undo()
    many = Many()
    gathered = many.gather(bytes(timeline._line(many, clocks[0])))
    many.gather = lambda data: gathered
    began = time.process_time()
    facts = {"asynchronous": False, "state_bytes": 1}
    timeline.keep(many, str(tmp_path), report.save_id, clocks[0], **facts)
    assert time.process_time() - began < 1.0
    (path,) = tmp_path.glob("timeline-*")
    assert path.stat().st_size < 10_000 * 1000
    began = time.process_time()
    kept = timeline.read(str(tmp_path))
    made = timeline.trace(kept)
    assert time.process_time() - began < 20.0
    assert len(kept.ranks) == 10_000
    pids = {event["pid"] for event in made["traceEvents"]}
    tids = {event["tid"]: event["args"]["name"] for event in made["traceEvents"]
            if event["name"] == "thread_name"}  # fmt: skip
    assert pids == set(range(1, 1251)) and not pids & set(tids)
    tracks = [tids[tid] for tid in sorted(tids)]
    assert tracks[:3] == ["rank 0", "rank 0 native threads", "rank 1"] and len(tracks) == 20_000
    assert sum(event["ph"] == "X" for event in made["traceEvents"]) == 10_000 * len(
        kept.ranks[0].name
    )


# -------------------------------------------------------------------------------------------------
# reading and the command


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_prints_a_trace_or_writes_it_to_a_file(save, tmp_path):
    save({"x": torch.arange(1000), "step": 3}, tmp_path / "c")
    done = run("trace", tmp_path / "c")
    assert done.exit_code == 0 and done.stderr == ""
    require_trace(json.loads(done.stdout))
    done = run("trace", tmp_path / "c", "--output", tmp_path / "t.json")
    assert done.exit_code == 0 and "events in" in done.stdout
    tracks = require_trace(json.loads((tmp_path / "t.json").read_text()))
    assert {event["name"] for event in tracks[1, 1000]} >= set(CALLER)
    assert done.stdout.index("perfetto") < done.stdout.index("chrome")
    done = run("trace", tmp_path / "c", "--output", tmp_path / "missing" / "t.json")
    assert done.exit_code == 1 and "write trace" in done.stderr and "missing" in done.stderr


def test_of_a_save_root_the_newest_checkpoint_is_shown(save, tmp_path):
    for iteration in (1, 2):
        report = save({"x": torch.ones(1)}, tmp_path / f"iter_{iteration:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    made = json.loads(run("trace", tmp_path).stdout)
    assert made["otherData"]["save_id"] == report.save_id


def test_a_directory_without_a_checkpoint_or_timeline_is_said_so(save, tmp_path):
    done = run("trace", tmp_path)
    assert done.exit_code == 1 and str(tmp_path) in done.stderr
    with pytest.raises(NotACheckpointError):
        timeline.read(str(tmp_path))
    save({"x": torch.ones(1)}, tmp_path)
    (path,) = tmp_path.glob("timeline-*")
    path.unlink()
    done = run("trace", tmp_path)
    assert done.exit_code == 1 and path.name in done.stderr and "no such file" in done.stderr
    (tmp_path / "index.h5").write_bytes(b"damaged")
    assert run("trace", tmp_path).exit_code == 1


def edited(change):
    """The lines of a timeline, as objects, after `change` of them."""

    def edit(data):
        lines = [json.loads(line) for line in data.splitlines()]
        change(lines)
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    return edit


DAMAGES = {
    "empty": lambda data: b"",
    "no JSON": lambda data: b"\x80\x04cos\nsystem\n(S'touch x'\ntR.",
    "cut": lambda data: data[:-10],
    "a rank is missing": lambda data: data.splitlines(keepends=True)[0],
    "a list": lambda data: b"[]\n",
    "deep": lambda data: b"[" * 100_000,
    "long number": lambda data: b"1" * 10_000,
    "another format": edited(lambda lines: lines[0].update(format="x")),
    "another version": edited(lambda lines: lines[0].update(version=2)),
    "another save": edited(lambda lines: lines[0].update(save_id="0" * 16)),
    "no hosts": edited(lambda lines: lines[0].update(hosts=[])),
    "hosts are numbers": edited(lambda lines: lines[0].update(hosts=[1])),
    "no rank": edited(lambda lines: lines[1].pop("rank")),
    "another rank": edited(lambda lines: lines[1].update(rank=1)),
    "rank is text": edited(lambda lines: lines[1].update(rank="0")),
    "rank is a truth": edited(lambda lines: lines[1].update(rank=False)),
    "a short column": edited(lambda lines: lines[1]["end_us"].pop()),
    "a fraction": edited(lambda lines: lines[1]["end_us"].__setitem__(0, 0.5)),
    "huge": edited(lambda lines: lines[1].update(met_us=1 << 60)),
    "not a number": edited(lambda lines: lines[1].update(met_us=float("nan"))),
    "backwards": edited(lambda lines: lines[1]["end_us"].__setitem__(0, -(1 << 40))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_timeline_is_refused_by_name(save, tmp_path, damage):
    save({"x": torch.ones(1)}, tmp_path)
    (path,) = tmp_path.glob("timeline-*")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CorruptionError, match=path.name) as caught:
        timeline.read(str(tmp_path))
    assert len(str(caught.value)) < 1000
    done = run("trace", tmp_path)
    assert done.exit_code == 1 and path.name in done.stderr and "Traceback" not in done.output


def test_a_file_that_is_too_large_or_no_file_is_not_read(save, tmp_path):
    save({"x": torch.ones(1)}, tmp_path)
    (path,) = tmp_path.glob("timeline-*")
    with open(path, "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptionError, match="at most 536870912 bytes"):
        timeline.read(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptionError, match="no file"):
        timeline.read(str(tmp_path))


# -------------------------------------------------------------------------------------------------
# numbers and the log


def test_a_synchronous_save_tells_its_numbers_and_one_line(save, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "megatron_uring"):
        report = save({"x": torch.arange(100_000)}, tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.name == "megatron_uring"]
    assert lines == [report.line()]
    last = megatron_uring.status()["last_save"]
    assert last["blocked_ms"] == report.blocked_s * 1e3 >= report.seconds * 1e3
    assert last["durable_s"] == report.seconds >= report.slowest_s > 0
    assert last["gigabytes_per_s"] == pytest.approx(report.state_bytes / 1e9 / report.seconds)
    assert last["slowest_rank"] == 0
    json.dumps(last)


@pytest.mark.parametrize(
    ("state_bytes", "text"),
    [
        (25e9, "25.00 GB durable after 2.00 s (12.50 GB/s)"),
        (1e8, "0.10 GB durable after 2.00 s (50.00 MB/s)"),
        (4e6, "4.00 MB durable after 2.00 s (2.00 MB/s)"),
        (1000, "1.00 kB durable after 2.00 s (0.50 kB/s)"),
    ],
)
def test_the_line_of_a_small_save_is_no_row_of_zeros(state_bytes, text):
    report = Report("c", "id", int(state_bytes), 0, 1, 2.0)
    assert text in report.line() and "on the node" not in report.line()


def test_a_clock_that_is_set_back_changes_no_span(monkeypatch):
    clock = progress.Clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock.lap("collect")
    with clock.span("inner"):
        clock.lap("plan")
    clock.lap("away", "")
    assert [span.name for span in clock.spans] == ["collect", "plan", "inner"]
    assert all(span.begin <= span.end for span in clock.spans)
    assert clock.lapped_s == pytest.approx(sum(clock.phases_s.values()))
