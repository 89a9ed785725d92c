"""The suite: its cases, its runs, its results file, its command; real files at a tiny size."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner

from megatron_uring import _engine, cli
from megatron_uring.bench import measure
from megatron_uring.bench.suite import GROUPS, counting, results, suites, transfers
from megatron_uring.bench.suite.command import bench
from megatron_uring.bench.suite.results import ResultsError, append_record, read_results
from megatron_uring.bench.suite.run import DiskFullError, Run, Watcher
from megatron_uring.bench.suite.suites import FULL, QUICK, Ground
from megatron_uring.comm import SingleCommunicator

MIB = 1 << 20
RECORD = results.Record(
    run="r",
    suite="quick",
    group="size",
    case="a",
    kind=results.PATTERN,
    operation=results.WRITE,
    trial=1,
    ranks=1,
    nodes=1,
    total_bytes=10,
    seconds=0.5,
    process_cpu_s=0.1,
    machine_cpu_s=0.2,
    peak_bytes=0,
    axes={"direct": True},
)
SMALL = dataclasses.replace(
    QUICK, bytes_per_rank=8 * MIB, sizes_per_rank=[MIB, 8 * MIB], depths=[4], slabs=[MIB]
)


class Told(Watcher):
    def __init__(self):
        self.records, self.notes, self.trials = [], [], 0

    def plan(self, trials):
        self.trials = trials

    def end(self, record):
        self.records.append(record)

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def run_of(tmp_path):
    def make(groups, suite=SMALL, trials=1, **options):
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        return Run(
            SingleCommunicator(30.0, "test", "host"),
            str(place),
            str(tmp_path / "results.jsonl"),
            suite,
            groups,
            options.pop("peers", ()),
            trials,
            watcher=options.pop("watcher", Told()),
            **options,
        )

    return make


# -------------------------------------------------------------------------------------------------
# results


def test_records_come_back_as_they_were_appended(tmp_path):
    path = str(tmp_path / "r.jsonl")
    other = dataclasses.replace(RECORD, trial=2, error="why", operations={"open": 3})
    append_record(path, RECORD)
    append_record(path, other)
    found = read_results(path)
    assert found.records == (RECORD, other) and found.torn_lines == 0


def test_a_torn_line_is_counted_and_the_next_record_has_a_line_of_its_own(tmp_path):
    path = tmp_path / "r.jsonl"
    append_record(str(path), RECORD)
    path.write_bytes(path.read_bytes()[:-40])
    append_record(str(path), RECORD)
    found = read_results(str(path))
    assert found.records == (RECORD,) and found.torn_lines == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 1, found 2"),
        ({"seconds": "fast"}, "seconds: expected float, found 'fast'"),
        ({"trial": 1.5}, "trial: expected int"),
        ({"trial": True}, "trial: expected int"),
        ({"axes": []}, "axes"),
        ({"more": 1}, "unknown fields ['more']"),
    ],
)
def test_what_is_no_record_is_refused_by_line(tmp_path, change, words):
    path = tmp_path / "r.jsonl"
    append_record(str(path), RECORD)
    line = json.dumps({**dataclasses.asdict(RECORD), **change})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ResultsError) as caught:
        read_results(str(path))
    assert "line 2" in str(caught.value) and words in str(caught.value)


def test_every_documented_field_and_axis_is_there(run_of):
    run = run_of(["patterns"])
    run.execute()
    record = run.watcher.records[0]
    document = (results.__file__).replace("results.py", "RESULTS.md")
    with open(document, encoding="utf-8") as file:
        text = file.read()
    names = [*dataclasses.asdict(record), *record.axes, *record.environment, *record.phases_s]
    assert [name for name in names if f"`{name}`" not in text] == []


# -------------------------------------------------------------------------------------------------
# suites


def ground(**changes):
    return dataclasses.replace(Ground(0, 2, MIB, True), **changes)


@pytest.mark.parametrize("suite", [QUICK, FULL], ids=lambda suite: suite.name)
def test_cases_have_names_of_their_own_and_every_read_a_write_before_it(suite):
    found = suites.specs(suite, ground(), GROUPS)
    names = [(spec.group, spec.case) for spec in found]
    assert len(set(names)) == len(names)
    assert {spec.group for spec in found} == set(GROUPS) - {"inventory"}
    for before, spec in zip([None, *found], found, strict=False):
        if spec.operation == results.READ and spec.group != "restore":
            assert before.operation == results.WRITE and before.axes == spec.axes


def test_what_has_no_room_is_left_out_and_named():
    every = suites.specs(FULL, ground(), ["size"])
    extents = [spec.extent_bytes for spec in every]
    found, left_out = suites.with_room(every, extents, 3 << 30)
    assert max(spec.workload.total_bytes for spec in found) == 2 << 30
    assert any("11 GiB a rank" in text for text in left_out)


def test_without_direct_io_all_is_buffered():
    found = suites.specs(QUICK, ground(direct=False), GROUPS)
    assert found and not any(spec.options.direct for spec in found)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_realistic_workloads_exist_for_any_number_of_ranks(ranks):
    for rank in {0, ranks - 1}:
        for workload in suites.realistic(FULL, ground(rank=rank, ranks=ranks)):
            assert 0 < workload.total_bytes < 4 << 30


# -------------------------------------------------------------------------------------------------
# runs


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "inventory"])
def test_each_group_runs_and_leaves_nothing(run_of, tmp_path, group):
    suite = dataclasses.replace(SMALL, inventories=[])
    run = run_of([group], suite)
    run.execute()
    records = read_results(run.path).records
    assert records == tuple(run.watcher.records) and len(records) == run.watcher.trials
    assert [one.error for one in records if one.error] == []
    assert {one.trial for one in records} == {0, 1}
    assert os.listdir(tmp_path / "place") == []
    for one in records:
        assert one.seconds > 0 and one.environment["kernel"] and one.axes["bytes_per_rank"]
        assert bool(one.operations) == (one.trial == 0)


def test_counts_are_those_of_the_pattern(run_of):
    run = run_of(["patterns"], dataclasses.replace(SMALL, inventories=[], chunk_bytes=2 * MIB))
    run.execute()
    counts = {one.case: one.operations for one in run.watcher.records if not one.trial}
    for case, files in (("file per tensor", 2), ("chunk per file", 4), ("file per rank", 1)):
        found = counts[f"{case}, write"]
        assert (found["sync"], found["preallocate"], found["close"]) == (files, files, files + 1)
        assert counts[f"{case}, read"]["open"] == files


def test_a_resumed_run_measures_what_is_missing_alone(run_of):
    first = run_of(["engine"], trials=1)
    first.execute()
    done = read_results(first.path).records
    again = run_of(["engine"], trials=2, number=done[0].run)
    again.execute()
    found = read_results(first.path).records
    assert {one.trial for one in again.watcher.records} == {2}
    assert len({one.key for one in found}) == len(found) == len(done) * 3 // 2
    assert {one.run for one in found} == {done[0].run}


def test_a_run_is_resumed_only_as_it_was(run_of):
    first = run_of(["engine"])
    first.execute()
    number = read_results(first.path).records[0].run
    larger = dataclasses.replace(SMALL, bytes_per_rank=16 * MIB)
    with pytest.raises(ResultsError, match=r"cannot resume: engine: .*8388608.*16777216"):
        run_of(["engine"], larger, number=number).execute()
    with pytest.raises(Exception, match=r"cannot resume: expected .*'quick'.*found .*'full'"):
        run_of(["engine"], dataclasses.replace(SMALL, name="full"), number=number).execute()


def test_a_case_that_fails_is_a_record_and_is_not_tried_again(run_of):
    _engine.inject_fault("preallocate", "eio", count=-1, path_contains=".chunk")
    try:
        run = run_of(["patterns"], trials=2)
        run.execute()
    finally:
        _engine.clear_faults()
    failed = [one for one in run.watcher.records if one.error]
    assert {one.case for one in failed} == {"chunk per file, write", "chunk per file, read"}
    assert {one.trial for one in failed} == {0}
    assert "Input/output error" in failed[0].error


def test_a_full_disk_ends_the_run_clearly_and_is_cleaned_up(run_of, tmp_path):
    _engine.inject_fault("write", "enospc", skip=5, count=-1)
    run = run_of(["patterns"])
    try:
        with pytest.raises(DiskFullError) as caught:
            run.execute()
    finally:
        _engine.clear_faults()
    assert "No space left on device" in str(caught.value) and run.path in str(caught.value)
    assert os.listdir(tmp_path / "place") == []
    assert read_results(run.path).records[-1].error


def test_too_little_room_is_said_before_anything_is_written(run_of, tmp_path):
    run = run_of(["patterns"], dataclasses.replace(SMALL, bytes_per_rank=1 << 60))
    with pytest.raises(DiskFullError, match="GB free"):
        run.execute()
    assert os.listdir(tmp_path / "place") == [] and not os.path.exists(run.path)


def test_states_that_memory_has_no_room_for_are_left_out_and_named(run_of, monkeypatch):
    run = run_of(["restore", "inventory"], peers=())
    monkeypatch.setattr("megatron_uring.stage.free_memory_bytes", lambda: 24 * MIB)
    run.execute()
    notes = "\n".join(run.watcher.notes)
    assert "left out: restore: our own: no memory for" in notes
    assert "left out: inventory: 3b" in notes
    records = read_results(run.path).records
    assert records and {one.kind for one in records} == {results.PATTERN}


def test_memory_is_private_so_that_it_can_have_huge_pages():
    memory = transfers.anonymous_memory(8 * MIB, huge=True)
    memory[:] = 1
    address = f"{memory.ctypes.data:x}-"
    with open("/proc/self/smaps", encoding="ascii") as file:
        mapping = [line for line in file if line.startswith(address)]
    assert [line.split()[1] for line in mapping] == ["rw-p"]


def test_no_round_is_begun_that_would_end_too_late(run_of):
    run = run_of(["engine"], trials=50, budget_s=0.001)
    run.execute()
    assert {one.trial for one in run.watcher.records} == {0, 1}
    assert any("no time left" in text for text in run.watcher.notes)


def test_ours_a_peer_and_an_emulation_stand_beside_each_other(run_of, monkeypatch):
    monkeypatch.setattr(suites, "realistic", lambda suite, where: [suites._synthetic(suite)])
    run = run_of(["inventory"], peers=["torch_save"])
    run.execute()
    records = run.watcher.records
    kinds = {one.case: one.kind for one in records}
    assert kinds["ours, default, write"] == results.OURS
    assert kinds["torch.save + fsync, read"] == results.PEER
    assert kinds["DataStates-style (emulation), write"] == results.EMULATION
    errors = {one.case: one.error for one in records if one.error}
    assert set(errors) <= {
        f"TorchSnapshot, a call per tensor (emulation), {operation}"
        for operation in ("write", "read")
    }
    peer = next(one for one in records if one.case == "torch.save + fsync, write")
    if shutil.which("strace"):
        assert (peer.operations["open"], peer.operations["sync"]) == (1, 1)
    emulated = next(one for one in records if one.case.startswith("DataStates-style"))
    assert emulated.operations["write"] == len(suites._synthetic(SMALL).names) + 1


# -------------------------------------------------------------------------------------------------
# counting


def test_lines_of_strace_are_counted_by_file_and_name(tmp_path):
    lines = f"""\
12 openat(AT_FDCWD</x>, "{tmp_path}/a", O_WRONLY) = 3<{tmp_path}/a>
[pid 13] pwrite64(3<{tmp_path}/a>, ""..., 10, 0) = 10
12 write(4</elsewhere/b>, ""..., 10) = 10
12 fsync(3<{tmp_path}/a> <unfinished ...>
12 <... fsync resumed>) = 0
12 fsync(5<{tmp_path}>) = 0
12 futex(0x1, FUTEX_WAKE) = 0
12 renameat2(AT_FDCWD, "{tmp_path}/a", AT_FDCWD, "{tmp_path}/b", 0) = 0
"""
    found = counting.count_lines(lines.splitlines(), str(tmp_path))
    assert found == {"open": 1, "write": 1, "sync": 1, "sync_directory": 1, "rename": 1}


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_what_torch_does_to_a_folder_is_seen(tmp_path):
    with counting.traced(str(tmp_path)) as counted:
        torch.save({"a": torch.ones(10)}, tmp_path / "a.pt")
        os.rename(tmp_path / "a.pt", tmp_path / "b.pt")
    assert counted["open"] == 1 and counted["rename"] == 1 and counted["write"] >= 1


def test_without_strace_nothing_is_counted_and_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with counting.traced(str(tmp_path)) as counted:
        (tmp_path / "a").write_bytes(b"x")
    assert not counted


# -------------------------------------------------------------------------------------------------
# the command


def command(*arguments):
    return [sys.executable, "-m", "megatron_uring", "bench", *arguments]


@pytest.mark.slow
def test_quick_measures_and_reports(tmp_path):
    output = tmp_path / "out"
    done = subprocess.run(
        command(
            *("quick", "--directory", str(tmp_path), "--output", str(output), "--trials", "1"),
            *("--mebibytes-per-rank", "4", "--groups", "patterns,size", "--progress", "lines"),
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (output / "report.html").stat().st_size > 10_000
    assert (output / "findings.md").exists() and list(output.glob("*.png"))
    assert read_results(str(output / "results.jsonl")).records
    assert not (tmp_path / "megatron_uring_bench").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_its_results_and_no_files(tmp_path, how):
    output = tmp_path / "out"
    # who runs the tests in the background of a shell ignores SIGINT, and so would the command
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        command(
            *("quick", "--directory", str(tmp_path), "--output", str(output), "--peers", "none"),
            *("--mebibytes-per-rank", "16", "--groups", "patterns", "--trials", "1000"),
        ),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    signal.signal(signal.SIGINT, before)
    path = output / "results.jsonl"
    try:
        until = time.monotonic() + 120
        while not path.exists() or path.read_text().count("\n") < 12:
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        running.send_signal(how)
        code = running.wait(60)
    finally:
        running.kill()
    assert code == (130 if how == signal.SIGINT else -how)
    assert len(read_results(str(path)).records) >= 12
    until = time.monotonic() + 30
    while (tmp_path / "megatron_uring_bench").exists():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quick", "--groups", "nothing"], "'nothing' is none of patterns"),
        (["quick", "--peers", "gzip"], "'gzip' is none of torch_save"),
        (["run", "--model", "layers=many"], "layers='many' is no int"),
        (["run", "--model", "depth=3"], "'depth' is none of layers"),
        (["run", "--sizes-mebibytes", "1,x"], "invalid literal"),
        (["quick", "--resume"], "nothing to resume"),
        (["report", "no-such-file"], "does not exist"),
    ],
)
def test_mistyped_options_are_named(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_uring.bench.speed.join_torch", lambda world: None)
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code != 0
    assert words in done.output, done.output
    assert not (tmp_path / "megatron_uring_bench").exists()


def test_a_results_file_that_is_damaged_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"schema": 7}\n')
    done = CliRunner().invoke(cli.main, ["bench", "report", str(path)])
    assert done.exit_code == 1 and "results.jsonl, line 1" in done.output


def test_a_model_becomes_a_workload():
    from megatron_uring.bench.suite import command as commands

    text = "layers=2,hidden=64,heads=4,vocabulary=100,tensor_parallel=2,optimizer=adam,swiglu=true"
    (workload,) = commands._model_workloads(text, 0, 1 << 30)
    assert workload.total_bytes > 0 and any("exp_avg" in name for name in workload.names)


ONE_RANK_FAILS = """
import sys
from megatron_uring import _engine, comm
from megatron_uring.bench.suite import suites
from megatron_uring.bench.suite.results import read_results
from megatron_uring.bench.suite.run import DiskFullError, Run
import dataclasses

directory, path, fault, operation = sys.argv[1:]
world = comm.connect(60.0)
small = dataclasses.replace(
    suites.QUICK, bytes_per_rank=8 << 20, sizes_per_rank=[8 << 20], inventories=[]
)
if world.rank == 1:
    _engine.inject_fault(operation, fault, skip=3, count=2 if fault == "eio" else -1,
                         path_contains="megatron_uring_bench/files")
run = Run(world, directory, path, small, ["patterns", "size"], (), 1)
try:
    run.execute()
    print("over")
except DiskFullError as error:
    print("full:", world.rank, str(error).count("No space left"))
"""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "operation"),
    [("eio", "write"), ("eio", "preallocate"), ("eio", "open"), ("eio", "sync"), ("eio", "read"),
     ("enospc", "write"), ("enospc", "preallocate")],
)  # fmt: skip
def test_what_fails_on_one_rank_fails_on_both_and_the_run_goes_on(tmp_path, fault, operation):
    from tests.test_bench import launch

    (tmp_path / "place").mkdir()
    path = tmp_path / "place" / "results.jsonl"  # on the disk that is measured
    arguments = [str(tmp_path / "place"), str(path), fault, operation]
    program = tmp_path / "program.py"
    program.write_text(ONE_RANK_FAILS)
    began = time.monotonic()
    done = launch(program, *arguments)
    assert time.monotonic() - began < 55, "ranks waited for each other"
    assert done.returncode == 0, done.stderr
    records = read_results(str(path)).records
    failed = [one for one in records if one.error]
    assert failed
    if fault == "enospc":
        assert done.stdout.count("full:") == 2
        assert "No space left" in failed[-1].error and failed[-1] == records[-1]
    else:
        assert done.stdout.count("over") == 2 and len(records) > 3 * len(failed)
    assert os.listdir(tmp_path / "place") == ["results.jsonl"]


@pytest.mark.mpi
@pytest.mark.slow
def test_two_ranks_share_files_and_a_full_disk_ends_both(tmp_path, small_disk):
    from tests.test_bench import launched, mpirun

    place = small_disk("96m")
    options = ["--directory", str(place), "--output", str(tmp_path / "out"), "--peers", "none"]
    sizes = ["--mebibytes-per-rank", "8", "--trials", "1", "--progress", "off"]
    good = mpirun("megatron_uring", "bench", "quick", *options, *sizes, "--groups", "patterns")
    assert good.returncode == 0, good.stderr
    records = read_results(str(tmp_path / "out" / "results.jsonl")).records
    assert {one.ranks for one in records} == {2} and not [r for r in records if r.error]
    path = tmp_path / "out" / "results.jsonl"
    lines = path.read_text().count("\n")
    options += ["--mebibytes-per-rank", "8", "--trials", "1000", "--progress", "off"]
    running = launched("-m", "megatron_uring", "bench", "quick", *options, "--groups", "size")
    # somebody else fills the disk while it runs
    until = time.monotonic() + 120
    while path.read_text().count("\n") < lines + 6:
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    with contextlib.suppress(OSError), open(place / "filler", "wb") as file:
        while True:
            file.write(b"x" * 65536)
    _, said = running.communicate(timeout=60)
    assert running.returncode != 0
    assert "bench:" in said and "No space left on device" in said and str(path) in said
    assert os.listdir(place) == ["filler"]
    assert "No space left" in read_results(str(path)).records[-1].error


def test_errors_have_a_line_for_humans():
    assert measure.describe_error(DiskFullError("begin", path="/x", cause="y")).count("\n") == 0
