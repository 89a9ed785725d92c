"""The benchmarks: real runs at a tiny size, and the arithmetic of their tables and figures."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import click
import pytest
import torch

from megatron_uring.bench import cache, limit, measure, peers, report, scale, state, summary
from megatron_uring.bench.measure import (
    LIMIT,
    OURS,
    PEER,
    DifferentError,
    Row,
    UnavailableError,
    Variant,
)
from megatron_uring.bench.speed import SECTIONS, failures, release_memory

DEFAULT = "ours, default"
MEASURED = {
    "save_large_to_best_peer",
    "save_small_to_best_peer",
    "save_cpu_s_per_gb",
    "save_cpu_to_best_peer",
    "save_peak_mb",
    "restore_to_best_peer",
    "posix_to_uring",
    "sharing_to_alone",
    "tiny_to_large_first",
    "tiny_to_large_second",
}
WITH_FIO = {
    "save_large_to_limit",
    "restore_to_limit",
    "limit_to_best_peer_large",
    "limit_to_best_peer_small",
    "limit_to_best_peer_restore",
}
OF_A_MILLION = {
    "index_1m_save_s",
    "index_1m_load_s",
    "index_1m_peak_gb",
    "index_1m_peak_above_import_gb",
    "index_1m_mb",
}


def mpirun(module, *options):
    return launch("-m", module, *options)


def launch(*arguments):
    """Python with these arguments, on two ranks."""
    running = launched(*arguments)
    try:
        out, error = running.communicate(timeout=240)
    except BaseException:
        running.kill()
        raise
    return subprocess.CompletedProcess(arguments, running.returncode, out, error)


def launched(*arguments):
    """The same, running."""
    launchers = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MEGATRON_URING")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")
    launcher = Path(sys.executable).with_name("mpirun")
    words = [launcher, "--oversubscribe", "--bind-to", "none", "-n", 2, sys.executable]
    return subprocess.Popen(
        [str(word) for word in [*words, *arguments]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


@pytest.mark.mpi
@pytest.mark.slow
def test_speed_measures_every_section(tmp_path):
    path = tmp_path / "speed.json"
    options = {
        "--directory": tmp_path,
        "--gigabytes-per-rank": 0.05,
        "--tensors-per-rank": 40,
        "--tiny-tensors-per-rank": 100,
        "--trials": 1,
        "--peers": "torch_save",
        "--sections": "all",
        "--scale-shards": 1000,
        "--json": path,
    }
    done = mpirun(
        "megatron_uring.bench.speed", *(word for pair in options.items() for word in pair)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert list(found) == ["machine", "options", "rows", "table", "scale", "figures"]
    assert found["machine"]["ranks"] == 2 and found["machine"]["cold"]
    options = {"options, save", "options, restore"}
    assert set(found["table"]) == (set(SECTIONS) - {"scale", "options"}) | options
    assert DEFAULT in found["table"]["large"] and "torch.load" in found["table"]["restore"]
    wanted = MEASURED | (WITH_FIO if shutil.which("fio") else set())
    figures = found["figures"]
    assert {name for name, value in figures.items() if value is not None} == wanted
    assert all(figures[name] > 0 for name in wanted)
    assert set(figures) == MEASURED | WITH_FIO | OF_A_MILLION
    if not shutil.which("fio"):
        assert found["table"]["large"]["fio"]["reason"] == "fio not installed"
    assert [point["reason"] for point in found["scale"]] == ["", ""]
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    assert "large: trial 1 of 1 done" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["speed.json"]


@pytest.mark.mpi
def test_durable_measures_ours_and_torch_save(tmp_path):
    path = tmp_path / "durable.json"
    options = ("--directory", tmp_path, "--gigabytes-per-rank", 0.01, "--tensor-mebibytes", 4)
    done = mpirun("megatron_uring.bench.durable", *options, "--trials", 1, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert {DEFAULT, "torch.save + fsync"} < set(found["table"])
    assert found["total_gb"] == pytest.approx(2 * 2 * (4 << 20) / 1e9)


def test_scale_measures_a_size_in_a_process_of_its_own(tmp_path):
    for point in scale.measure(str(tmp_path), [1000]):
        assert not point["reason"]
        assert point["save_s"] > 0 and point["load_s"] > 0 and point["index_bytes"] > 0
        assert point["peak_bytes"] >= point["import_bytes"] > 0
        assert sum(point["phases_s"].values()) == pytest.approx(point["save_s"] + point["load_s"])
    assert list(tmp_path.iterdir()) == []


def test_scale_gives_a_reason_for_a_size_that_fails(tmp_path):
    point = scale.measure_apart("no such shape", 1000, str(tmp_path))
    assert "KeyError" in point["reason"]
    report.print_scale([point])


# -------------------------------------------------------------------------------------------------
# one trial, and trials in turn


def nothing():
    return None


def variant(what, kind=PEER, run=nothing, **options):
    return Variant(what, kind, run, options.pop("prepare", nothing), **options)


def measured(world, variants, trials=2):
    return measure.interleave(world, "large", variants, trials=trials, gigabytes=1.0)


def test_what_fails_is_a_row_with_its_reason_and_is_not_tried_again(world):
    calls = []

    def fail():
        calls.append(1)
        raise RuntimeError("no luck\nand more")

    rows = measured(world, [variant("good"), variant("bad", run=fail)])
    (bad,) = [row for row in rows if row.what == "bad"]
    assert bad.reason == "RuntimeError: no luck" and not bad.different and len(calls) == 1
    assert [row.trial for row in rows if row.what == "good"] == [0, 1, 2]


def test_a_variant_that_cannot_be_prepared_is_not_run(world):
    def absent():
        raise UnavailableError("not installed")

    def run():
        raise AssertionError("was run")

    (row,) = measured(world, [variant("absent", run=run, prepare=absent)])
    assert row.reason == "not installed"


def test_other_bytes_than_were_saved_are_told_apart(world):
    def check():
        raise DifferentError("key came back different")

    (row,) = measured(world, [variant("liar", check=check)])
    assert row.different and row.reason == "key came back different"
    rows = [vars(row), vars(Row("large", DEFAULT, OURS, 0, 1.0, 0.0, 0.0, 0.0, 0, "broken"))]
    assert failures({"rows": rows}) == [
        "large: liar: key came back different",
        "large: ours, default: broken",
    ]


def test_checks_run_in_the_warm_up_or_always(world):
    once, always = [], []
    measured(
        world,
        [
            variant("a", check=lambda: once.append(1)),
            variant("b", check=lambda: always.append(1), check_always=True),
        ],
    )
    assert (len(once), len(always)) == (1, 3)


def test_each_round_begins_with_another_variant(world):
    order = []
    names = ["a", "b", "c"]
    measured(world, [variant(name, run=lambda name=name: order.append(name)) for name in names])
    assert "".join(order) == "abcbcacab"


def test_the_fastest_limits_of_the_warm_up_stay(world):
    seconds = {"slow": 3.0, "fast": 1.0, "middle": 2.0}
    variants = [variant(name, LIMIT, lambda s=s: s) for name, s in seconds.items()]
    rows = measured(world, variants, trials=1)
    assert {row.what for row in rows if row.trial} == {"fast", "middle"}
    assert list(summary.summarize(rows)) == ["fast", "middle"]
    assert {row.seconds for row in rows if row.what == "fast"} == {1.0}


def test_peak_memory_is_what_the_call_added(world):
    def touch():
        torch.ones(64 << 20, dtype=torch.uint8)

    release_memory()  # else the call is served by what earlier tests have freed
    rows = measured(world, [variant("touch", run=touch), variant("none")], trials=1)
    peaks = {row.what: row.peak_bytes for row in rows if row.trial}
    assert peaks["touch"] >= 60 << 20 and peaks["none"] < 8 << 20


# -------------------------------------------------------------------------------------------------
# tables and figures


def rows_of(section, what, kind, *seconds, cpu=1.0, gigabytes=4.0):
    return [
        Row(section, what, kind, trial, gigabytes, value, cpu, cpu, trial * 1_000_000)
        for trial, value in enumerate([99.0, *seconds])
    ]


LARGE = [
    *rows_of("large", "fio a", LIMIT, 1.0, 1.0, 4.0),
    *rows_of("large", "fio b", LIMIT, 2.0, 2.0, 2.0),
    *rows_of("large", "torch.save + fsync", PEER, 4.0, 4.0, 8.0, cpu=8.0),
    *rows_of("large", "DCP", PEER, 5.0, 5.0, 5.0, cpu=4.0),
    *rows_of("large", DEFAULT, OURS, 2.0, 1.0, 2.0, cpu=2.0),
    *rows_of("large", "ours, rank io_uring", OURS, 2.0),
    *rows_of("large", "ours, rank posix", OURS, 2.5),
    Row("large", "TorchSnapshot", PEER, 0, 4.0, 0.0, 0.0, 0.0, 0, "not installed"),
]


def test_summary_leaves_the_warm_up_out_and_compares_medians():
    table = summary.summarize(LARGE)
    assert list(table)[:3] == ["fio a", "fio b", DEFAULT]
    ours = table[DEFAULT]
    assert (ours.trials, ours.median_s, ours.fastest_s, ours.slowest_s) == (3, 2.0, 1.0, 2.0)
    assert (ours.gb_per_s, ours.process_cpu_s_per_gb, ours.peak_mb) == (2.0, 0.5, 3.0)
    assert (ours.to_limit, ours.to_best_peer) == (0.5, 2.0)
    assert (ours.drift_limit, ours.drift_peer) == (1.0, 4.0)
    assert table["TorchSnapshot"].reason == "not installed"
    assert table["TorchSnapshot"].to_limit is None


def test_figures_are_those_of_the_default_and_none_where_nothing_was_measured():
    figures = summary.figures({"large": summary.summarize(LARGE)}, [])
    assert set(figures) == MEASURED | WITH_FIO | OF_A_MILLION
    assert {name: value for name, value in figures.items() if value is not None} == {
        "save_large_to_limit": 0.5,
        "save_large_to_best_peer": 2.0,
        "save_cpu_s_per_gb": 0.5,
        "save_cpu_to_best_peer": 0.5,
        "save_peak_mb": 3.0,
        "posix_to_uring": 0.8,
        "limit_to_best_peer_large": 4.0,
    }


def test_figures_of_tiny_tensors_and_of_a_million_shards():
    tiny = [
        *rows_of("tiny", "tiny, first save", OURS, 4.0),
        *rows_of("tiny", "large, first save", OURS, 1.0),
        *rows_of("tiny", "tiny, second save", OURS, 2.0),
        *rows_of("tiny", "large, second save", OURS, 1.0),
    ]
    shape, other = scale.SHAPES
    points = [
        vars(scale.Point(other, 1_000_000, 9.0, 9.0)),
        vars(scale.Point(shape, 1_000_000, 2.0, 1.0, 10**9, 0, 3 * 10**9, 5 * 10**6)),
    ]
    figures = summary.figures({"tiny": summary.summarize(tiny)}, points)
    assert (figures["tiny_to_large_first"], figures["tiny_to_large_second"]) == (0.25, 0.5)
    assert (figures["index_1m_save_s"], figures["index_1m_load_s"]) == (2.0, 1.0)
    assert (figures["index_1m_peak_gb"], figures["index_1m_peak_above_import_gb"]) == (3.0, 2.0)
    assert figures["index_1m_mb"] == 5.0


def test_memory_of_small_tensors_is_given_back_between_sections():
    script = """
import torch
from megatron_uring.bench import speed

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

before, tensors, kept = resident_mb(), [], []
for number in range(3000):
    tensors.append(torch.zeros(100_000, dtype=torch.uint8))
    if number % 100 == 0:
        kept.append(torch.zeros(100))
del tensors
left = resident_mb()
speed.release_memory()
print(left - before, resident_mb() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    left, after = map(float, done.stdout.split())
    assert after < 100 < left, "the first says whether there was something to give back"


def test_tables_fit_100_columns_and_say_why_a_row_is_empty(capsys):
    report.print_section("large", summary.summarize(LARGE), 4.0, 3)
    report.print_figures({"a": 1.0, "b": None})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "TorchSnapshot: not installed" in lines and any("not measured" in x for x in lines)


def test_no_figure_of_a_slow_peer_is_cut_off(capsys):
    slow = summary.Summary(
        what="ours, shared io_uring",
        kind="peer",
        trials=5,
        median_s=136.549,
        fastest_s=128.059,
        slowest_s=247.509,
        gb_per_s=12.34,
        process_cpu_s_per_gb=10.464,
        machine_cpu_s_per_gb=10.655,
        peak_mb=2081.0,
        to_limit=10.08,
        to_best_peer=10.2,
        drift_limit=10.07,
        drift_peer=10.23,
    )
    report.print_section("small", {slow.what: slow}, 5.33, 5)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split()[3:] == (
        "136.549 128.06 247.51 12.34 10.08 10.07 10.20 10.23 10.464 10.65 2081".split()
    )


# -------------------------------------------------------------------------------------------------
# limit, peers, states


def test_fio_time_is_that_of_the_slowest_job_scaled_to_the_bytes_asked_for():
    jobs = [{"write": {"runtime": ms, "io_bytes": 100}} for ms in (500, 2000)]
    assert limit.slowest_job_s({"jobs": jobs}, "write", 150) == pytest.approx(3.0)
    with pytest.raises(UnavailableError, match="no bytes"):
        limit.slowest_job_s({"jobs": [{"read": {"runtime": 0, "io_bytes": 0}}]}, "read", 1)


def test_without_fio_the_limit_is_a_row_that_says_so(world, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = measured(world, limit.Fio(world, str(tmp_path), 1 << 20).variants("write", print))
    assert [(row.what, row.reason) for row in rows] == [("fio", "fio not installed")]


def test_a_peer_without_its_package_or_process_group_says_so(world, monkeypatch, tmp_path):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
    (snapshot,) = peers.peers(["torchsnapshot"], world, "")
    with pytest.raises(UnavailableError, match=r"^not installed$"):
        snapshot.saver(state.small_state(0, 1))
    (dcp,) = peers.peers(["dcp"], world, "no port")
    with pytest.raises(UnavailableError, match="not initialised: no port"):
        dcp.saver(state.small_state(0, 1))
    with pytest.raises(UnavailableError, match="there are torch_save"):
        peers.peers(["torch"], world, "")


def test_requirements_of_peers_that_are_missing_are_named(monkeypatch):
    requires = [
        'pytest; extra == "peers"',
        'no-such-package-of-ours>=1; extra == "peers"',
        'no-such-linter; extra == "dev"',
        "numpy",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requires)
    assert peers.missing_requirements() == ["no-such-package-of-ours>=1"]


def test_states_are_alike_in_every_run_and_tell_bytes_apart():
    small, again = state.small_state(1, 60), state.small_state(1, 60)
    small.check_equal(again)
    sizes = [t.numel() * t.element_size() for t in small.tensors.values()]
    assert min(sizes) >= 4 << 10 and max(sizes) <= 256 << 10 and any(s % 64 for s in sizes)
    again.tensors["rank1/layer0/weight5"].view(torch.uint8)[7] += 1
    with pytest.raises(DifferentError, match="rank1/layer0/weight5"):
        small.check_equal(again)


def test_tiny_and_large_states_hold_the_same_bytes():
    tiny, large = state.tiny_and_large_state(0, 50, 4)
    assert len(tiny.tensors) == 50 and len(large.tensors) == 4
    assert tiny.total_bytes == large.total_bytes
    tiny.wipe()
    assert not any(tensor.any() for tensor in large.tensors.values())


def test_caches_can_be_dropped_without_being_root(world, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(cache, "_DROP_CACHES", str(tmp_path / "missing" / "drop_caches"))
    assert cache.drop_caches(world, str(tmp_path)).startswith("posix_fadvise")


def test_memory_comes_to_rest_or_is_waited_for_no_longer(world):
    began = time.monotonic()
    assert cache.settle(world, 1 << 20)
    assert time.monotonic() - began < 1
    cache.settle(world, 1 << 30, 4.0)
    assert cache._QUIET_S <= time.monotonic() - began < 7
    assert not cache.settle(world, 1 << 30, 0.1)


@pytest.mark.parametrize("end", ["killed", "failed", "done"])
def test_the_folder_is_removed_however_the_run_ends(tmp_path, end):
    program = textwrap.dedent("""
        import os, signal, sys
        from megatron_uring import comm
        from megatron_uring.bench.sections import removed_in_the_end
        world = comm.connect(30.0, "auto")
        with removed_in_the_end(world, sys.argv[1]):
            os.makedirs(sys.argv[1] + "/save")
            if sys.argv[2] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            assert sys.argv[2] == "done"
    """)
    folder = tmp_path / "a folder"
    done = subprocess.run([sys.executable, "-c", program, folder, end], check=False, timeout=60)
    assert (done.returncode == 0) == (end == "done")
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_memory_of_the_page_cache_is_touched_and_given_back(world, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(cache, "_CHUNK_BYTES", 1000)
    unlink = os.unlink
    monkeypatch.setattr(
        os, "unlink", lambda path: (written.append(os.path.getsize(path)), unlink(path))
    )
    cache.touch(world, str(tmp_path), 2500)
    assert written == [2500] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["1000,abc", "0", "-5", "", "99"])
def test_sizes_that_cannot_be_measured_are_refused_in_words(text):
    with pytest.raises(click.BadParameter, match="--shards"):
        scale.parse_sizes(text, "--shards")


@pytest.mark.mpi
def test_asynchronous_saves_are_measured_beside_other_libraries(tmp_path):
    place, found = tmp_path / "place", tmp_path / "async.json"
    place.mkdir()
    options = ("--gigabytes-per-rank", 0.07, "--trials", 1, "--loop-trials", 1, "--iterations", 1)
    done = launch(
        "-m", "megatron_uring.bench.asynchronous", "--directory", place, *options,
        "--compute-factor", 0.5, "--json", found,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())
    figures = result["figures"]
    assert figures["children"] == 0 and figures["shm_left"] == 0
    for name in ("blocking_to_memcpy", "blocking_and_fence_to_memcpy", "loop_to_none"):
        assert figures[name] > 0, figures
    for name in ("megatron", "dcp"):
        assert figures[f"loop_{name}_to_none"] or name in result["notes"], result["notes"]
    assert figures["step_slowdown"] > 0 and figures["step_slowdown_limited"] > 0
    assert "least" in done.stdout and os.listdir(place) == []
