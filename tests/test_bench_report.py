"""The report of the microbenchmarks: from records of known medians to answers, pictures, pages."""

import base64
import html
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace

import pytest

from megatron_uring.bench.pages import findings, plots, recommend
from megatron_uring.bench.pages.answering import (
    AGREES,
    DIFFERS,
    NO_CLAIM,
    NOT_MEASURED,
    PARTLY,
    decide,
)
from megatron_uring.bench.pages.comparing import (
    FASTER,
    NOISE,
    SLOWER,
    UNDECIDED,
    Comparison,
    chance,
    pairs,
)
from megatron_uring.bench.pages.measured import newest_run, summarize
from megatron_uring.bench.pages.page import write_report
from megatron_uring.bench.suite.results import Record, ResultsError
from megatron_uring.bench.summary import size

MIB = 1 << 20
LARGE, SMALL = 16 * MIB, 64 << 10
TOTAL = 512 * MIB
ENVIRONMENT = {
    "host": "node7",
    "cpu": "A Processor",
    "cores": 8,
    "memory_gb": 64.2,
    "kernel": "6.1.0",
    "file_system": "ext4",
    "mount_options": "rw,relatime",
    "stripe_bytes": MIB,
    "file_system_bytes": 10**12,
    "direct": True,
    "offset_alignment_bytes": 512,
    "memory_alignment_bytes": 512,
    "engine": "io_uring: available",
    "python": "3.11",
    "versions": {"torch": "2.4", "torchsnapshot": "0.1.0"},
}
AXES = {
    "workload": "synthetic",
    "bytes_per_rank": TOTAL // 2,
    "pattern": "file per rank",
    "submission_bytes": LARGE,
    "alignment": "packed",
    "direct": True,
    "engine": "io_uring",
    "queue_depth": 8,
    "submission_batch": 0,
    "polled_submission": False,
    "registered_memory": False,
    "registered_files": False,
    "staging": "none",
    "memory": "reused",
}


@dataclass
class Bench:
    """Builds the records of one run; `rates` are GB/s of the trials."""

    run: str = "run-1"
    day: int = 1
    environment: dict = field(default_factory=lambda: ENVIRONMENT)
    records: list = field(default_factory=list)

    def case(
        self,
        group,
        name,
        operation,
        rates,
        kind="pattern",
        operations=None,
        phases=None,
        error="",
        total=TOTAL,
        **axes,
    ):
        all_axes = {**AXES, **axes}
        if kind != "pattern":
            all_axes = {"workload": "3b, 2 layers", "bytes_per_rank": total // 2}
        rates = [rates[0], *rates] if rates else [1.0]
        for trial, rate in enumerate(rates):
            seconds = total / 1e9 / rate
            self.records.append(
                Record(
                    run=self.run,
                    suite="quick",
                    group=group,
                    case=f"{name}, {operation}",
                    kind=kind,
                    operation=operation,
                    trial=trial,
                    ranks=2,
                    nodes=1,
                    total_bytes=total,
                    seconds=0.0 if error else seconds,
                    process_cpu_s=0.1,
                    machine_cpu_s=0.2,
                    peak_bytes=10 * MIB,
                    axes=all_axes,
                    phases_s={k: share * seconds for k, share in (phases or {}).items()},
                    operations=operations or {} if trial == 0 else {},
                    error=error,
                    environment=self.environment,
                    time=f"2026-01-{self.day:02}T10:00:{len(self.records) % 60:02}+00:00",
                )
            )

    def cases(self):
        return summarize(self.records)

    def write(self, path):
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in self.records)
        return str(path)


def around(median, spread=0.02):
    return [median * (1 - spread), median, median * (1 + spread)]


MODES = {True: "direct", False: "buffered"}


def add_patterns(bench, rates=None):
    rates = {**dict.fromkeys(COUNTS, 2.0), "file per tensor": 1.2, **(rates or {})}
    for pattern, files in COUNTS.items():
        for operation, speed in (("write", 1.0), ("read", 1.1)):
            counts = {"open": files, "preallocate": files, "sync": files, "close": files}
            counts |= {operation: 32, "submit": 8}
            bench.case(
                "patterns",
                pattern,
                operation,
                around(rates[pattern] * speed),
                pattern=pattern,
                operations=counts,
            )


COUNTS = {
    "chunk per file": 16,
    "file per tensor": 128,
    "file per rank": 2,
    "file per group": 1,
    "one shared file": 1,
}


def add_coalescing(bench, small=0.9, large=2.0, spread=0.02, tensor_bytes=4 * MIB):
    for direct, mode in MODES.items():
        for operation in ("write", "read"):
            by_size = {SMALL: small, MIB: 1.9, LARGE: large}
            for size_, rate in by_size.items():
                bench.case(
                    "coalescing",
                    f"{size(size_)}, {mode}",
                    operation,
                    around(rate, spread),
                    submission_bytes=size_,
                    direct=direct,
                    queue_depth=max(8, min(64, LARGE * 8 // size_)),
                )
            ways = {
                "a submission for each tensor": (
                    1.6,
                    {"submission_bytes": 0, "alignment": "block"},
                ),
                "16 MiB": (2.0, {}),
                "slabs": (1.9, {"staging": "slabs"}),
                "a file for each tensor": (1.1, {"pattern": "file per tensor"}),
            }
            for way, (rate, axes) in ways.items():
                bench.case(
                    "coalescing",
                    f"3b, 2 layers: {way}, {mode}",
                    operation,
                    around(rate, spread),
                    workload="3b, 2 layers",
                    direct=direct,
                    operations={operation: TOTAL // tensor_bytes},
                    **axes,
                )


def add_alignment(bench):
    for direct, mode in MODES.items():
        for alignment in ("block", "stripe") if direct else ("none", "packed", "block", "stripe"):
            for operation in ("write", "read"):
                name = f"{alignment}, {mode}"
                bench.case(
                    "alignment", name, operation, around(1.7), alignment=alignment, direct=direct
                )


def add_size(bench, buffered=None, direct=1.8):
    """`buffered`: GB/s by MiB of a rank."""
    buffered = buffered or {16: 2.6, 64: 1.9, 256: 1.3, 512: 1.2}
    for mebibytes, rate in buffered.items():
        for is_direct, mode in MODES.items():
            for operation in ("write", "read"):
                bench.case(
                    "size",
                    f"{mebibytes} MiB a rank, {mode}",
                    operation,
                    around(direct if is_direct else rate, 0.04),
                    direct=is_direct,
                    bytes_per_rank=mebibytes * MIB,
                    total=2 * mebibytes * MIB,
                )


def add_engine(bench, posix=1.9):
    for direct, mode in MODES.items():
        for engine, rate in (("io_uring", 2.0), ("posix", posix)):
            for operation in ("write", "read"):
                bench.case(
                    "engine",
                    f"{engine}, {mode}",
                    operation,
                    around(rate, 0.03),
                    engine=engine,
                    direct=direct,
                )


def add_submission(bench):
    ways = {
        "plain": {},
        "SQPOLL": {"polled_submission": True},
        "registered memory": {"registered_memory": True},
        "registered files": {"registered_files": True},
        "SQPOLL, all registered": {"polled_submission": True, "registered_memory": True},
        "batches of 1": {"submission_batch": 1},
        "batches of 8": {"submission_batch": 8},
    }
    for number, (way, axes) in enumerate(ways.items()):
        for operation in ("write", "read"):
            bench.case(
                "submission",
                way,
                operation,
                around(0.8 + 0.05 * number),
                submission_bytes=SMALL,
                queue_depth=64,
                **axes,
            )


def add_pool(bench, depths=None, slabs=None):
    depths = depths or {1: 1.2, 4: 1.8, 8: 1.9, 16: 1.92, 64: 1.93}
    slabs = slabs or {1: 1.5, 4: 1.8, 64: 1.85}
    for depth, rate in depths.items():
        name = f"16 MiB, depth {depth}"
        bench.case("pool", name, "write", around(rate), queue_depth=depth)
    for mebibytes, rate in slabs.items():
        name = f"{mebibytes} MiB, depth 8"
        bench.case("pool", name, "write", around(rate), submission_bytes=mebibytes * MIB)


def add_restore(bench, share=0.25):
    for staging, suffix in (("none", ""), ("slabs", "verified and scattered, ")):
        parts = {"open": 0.02, "transfer": 0.7}
        parts |= {"copy": 0.2, "checksum": 0.1} if suffix else {}
        for memory, rate in (("reused", 2.0), ("new", 1.5)):
            own = {**parts, "allocate": share} if memory == "new" else parts
            name = f"{suffix}memory {memory}"
            bench.case(
                "restore", name, "read", around(rate), phases=own, memory=memory, staging=staging
            )
    ours = {"index": 0.03, "plan": 0.02, "read": 0.6, "copy": 0.15, "checksum": 0.1, "finish": 0.01}
    bench.case("restore", "ours, default", "read", around(1.9), kind="ours", phases=ours)
    ours["allocate"] = share
    bench.case("restore", "ours, new tensors", "read", around(1.5), kind="ours", phases=ours)


INVENTORY = {
    "ours, default": ("ours", 2.0),
    "ours, rank io_uring": ("ours", 1.98),
    "ours, shared io_uring": ("ours", 2.02),
    "ours, rank posix": ("ours", 1.9),
    "ours, rank buffered": ("ours", 1.4),
    "torch.save + fsync": ("peer", 1.0),
    "DCP": ("peer", 1.05),
    "Megatron torch_dist": ("peer", 1.0),
    "torch_checkpointing": ("peer", 1.03),
    "TorchSnapshot": ("peer", 0.4),
    "DataStates-style (emulation)": ("emulation", 1.1),
    "TorchSnapshot, a call per tensor (emulation)": ("emulation", 0.3),
}


def add_inventory(bench, rates=None, failed=None):
    failed = failed or {}
    for name, (kind, rate) in INVENTORY.items():
        for operation in ("write", "read"):
            error = failed.get(name, "")
            trials = () if error else around((rates or {}).get(name, rate), 0.05)
            bench.case("inventory", name, operation, trials, kind=kind, error=error)


def add_everything(bench, **inventory):
    for add in (
        add_patterns,
        add_coalescing,
        add_alignment,
        add_size,
        add_engine,
        add_submission,
        add_pool,
        add_restore,
    ):
        add(bench)
    add_inventory(bench, **inventory)
    return bench


@pytest.fixture
def bench():
    return Bench()


def everything():
    reason = "no <script>alert(1)</script> | here"
    return add_everything(Bench(), failed={"Megatron torch_dist": reason})


@pytest.fixture
def whole():
    return everything()


def answer(bench, key):
    (found,) = [one for one in findings.answers(bench.cases()) if one.key == key]
    return found


def advice(bench, option):
    found = recommend.recommend(bench.cases(), bench.environment)
    (line,) = [one for one in found if one.option == option]
    return line


def compared(rates, others):
    bench = Bench()
    bench.case("engine", "one", "write", rates, engine="io_uring")
    bench.case("engine", "two", "write", others, engine="posix")
    left, right = bench.cases()
    return Comparison("", left, right)


# -------------------------------------------------------------------------------------------------
# medians and comparisons


def test_a_case_has_the_median_of_its_trials_and_their_range(bench):
    bench.case("size", "x", "write", [1.0, 4.0, 2.0])
    (case,) = bench.cases()
    figures = case.gb_per_s, case.slowest_gb_per_s, case.fastest_gb_per_s
    assert figures == pytest.approx((2.0, 1.0, 4.0))
    assert len(case.trials) == 3  # the warm-up counts for nothing
    assert case.title == "x"
    assert case.process_cpu_s_per_gb == pytest.approx(0.1 / (TOTAL / 1e9))


def test_the_last_of_a_repeated_trial_counts(bench):
    bench.case("size", "x", "write", (), error="disk full")
    assert bench.cases()[0].error == "disk full"
    bench.case("size", "x", "write", [1.0, 1.0])
    (case,) = bench.cases()
    assert (case.error, case.gb_per_s) == ("", pytest.approx(1.0))


def test_a_warm_up_alone_is_no_figure(bench):
    bench.case("size", "x", "write", [1.0])
    del bench.records[1]
    assert bench.cases()[0].error == "no trial was over"


@pytest.mark.parametrize(
    ("left", "right", "relation"),
    [
        ([2.0, 2.1], [1.0, 1.9], FASTER),
        ([1.0, 1.1], [1.2, 1.9], SLOWER),
        ([1.0, 2.1], [2.0, 3.0], NOISE),
        ([9.0], [1.0], UNDECIDED),
    ],
)
def test_only_ranges_that_are_apart_differ(left, right, relation):
    assert compared(left, right).relation == relation


def test_clearly_faster_needs_ratio_and_ranges():
    assert compared([1.2, 1.21], [1.0, 1.01]).clearly_faster
    assert not compared([1.1, 1.11], [1.0, 1.01]).clearly_faster
    assert not compared([1.0, 2.0, 2.0], [0.5, 1.0, 1.1]).clearly_faster
    assert compared([1.0, 1.01], [1.2, 1.21]).clearly_slower


def test_chance_of_ranges_apart():
    assert [chance(n) for n in (1, 2, 3)] == pytest.approx([1, 1 / 3, 1 / 10])


def test_pairs_are_equal_in_all_other_axes(bench):
    bench.case("x", "a", "write", [1.0], engine="io_uring", queue_depth=8)
    bench.case("x", "b", "write", [1.0], engine="posix", queue_depth=4)
    bench.case("x", "c", "read", [1.0], engine="posix", queue_depth=8)
    assert not pairs(bench.cases(), "engine", "io_uring", "posix")
    ((left, right),) = pairs(bench.cases(), "engine", "io_uring", "posix", ["queue_depth"])
    assert (left.title, right.title) == ("a", "b")


def test_the_newest_run_is_reported(tmp_path):
    older = Bench("run-1", day=3, environment={**ENVIRONMENT, "host": "elsewhere"})
    newer, failed = Bench("run-0", day=5), Bench("run-2", day=9)
    add_engine(older)
    add_engine(newer)
    failed.case("engine", "x", "write", (), error="no space")
    run = newest_run([*newer.records, *failed.records, *older.records])
    assert (run.name, run.others) == ("run-0", 2)
    assert run.other_machines == ("elsewhere, ext4",)


# -------------------------------------------------------------------------------------------------
# answers


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([], NOT_MEASURED),
        ([""], NOT_MEASURED),
        ([AGREES, AGREES], AGREES),
        ([AGREES, DIFFERS], PARTLY),
        ([NOISE, DIFFERS], DIFFERS),
        ([NOISE, ""], NOISE),
    ],
)
def test_one_verdict_from_many(verdicts, verdict):
    assert decide(verdicts)[0] == verdict


@pytest.mark.parametrize(
    ("small", "spread", "verdict"),
    [(1.0, 0.02, AGREES), (1.7, 0.02, DIFFERS), (1.96, 0.02, DIFFERS), (1.2, 0.4, NOISE)],
)
def test_small_buffers_halve_or_not(bench, small, spread, verdict):
    for size_, rate in ((SMALL, small), (LARGE, 2.0)):
        name = f"{size_}"
        bench.case("coalescing", name, "write", around(rate, spread), submission_bytes=size_)
    found = answer(bench, "coalescing")
    assert found.verdict == verdict
    (support,) = found.supports
    assert support.comparison.ratio == pytest.approx(small / 2)
    assert f"{small / 2:.2f} times" in found.points[0]
    assert "small submissions, buffered read" in found.missing


def test_realistic_tensors_are_compared_over_what_differs_besides(bench):
    add_coalescing(bench)
    ratios = {
        (one.comparison.left.title, one.comparison.right.title): one.comparison.ratio
        for one in answer(bench, "coalescing").supports
        if one.comparison.left.operation == "write"
    }
    prefix = "3b, 2 layers: "
    alone, large = prefix + "a submission for each tensor, direct", prefix + "16 MiB, direct"
    assert ratios[alone, large] == pytest.approx(0.8)
    assert ratios[prefix + "slabs, direct", alone] == pytest.approx(1.9 / 1.6)


@pytest.mark.parametrize(("tensor_bytes", "judged"), [(4 * MIB, 4), (MIB // 4, 8)])
def test_tensors_that_are_large_are_no_small_buffers(bench, tensor_bytes, judged):
    add_coalescing(bench, tensor_bytes=tensor_bytes)
    found = answer(bench, "coalescing")
    assert sum(bool(one.verdict) for one in found.supports) == judged
    assert f"a submission for each tensor ({size(tensor_bytes)} on average)" in found.points[2]
    assert "those of 64 KiB reach 45 %; one for each tensor reach 80 %" in found.lead


def test_aggregation_restores_bandwidth_or_not(bench):
    add_patterns(bench, {"chunk per file": 1.0})
    assert answer(bench, "aggregation").verdict == AGREES
    slower = Bench()
    add_patterns(slower, {"file per tensor": 3.0, "chunk per file": 3.0})
    assert answer(slower, "aggregation").verdict == DIFFERS
    same = Bench()
    add_patterns(same, {"file per tensor": 2.0})
    assert answer(same, "aggregation").verdict == NOISE


def test_the_fastest_pattern_is_named_with_those_in_its_noise(bench):
    add_patterns(bench, {"one shared file": 2.5, "file per group": 2.49})
    lead = answer(bench, "aggregation").lead
    assert "Writes are fastest with one shared file (2.50 GB/s)" in lead
    assert "within the noise of it: file per group." in lead


def test_metadata_is_counted_for_each_gib(bench):
    add_patterns(bench)
    found = answer(bench, "metadata")
    assert found.verdict == AGREES
    rows = {(row[0], row[1]): row for row in found.counts[1:]}
    assert rows["file per tensor", "write"][2:4] == ("512", "1024")
    assert rows["file per rank", "read"][2:4] == ("8", "16")
    assert rows["file per rank", "read"][5:] == ("32", "8")


def test_metadata_that_aggregation_does_not_save_differs(bench, monkeypatch):
    monkeypatch.setitem(COUNTS, "file per rank", 1000)
    add_patterns(bench)
    assert answer(bench, "metadata").verdict == PARTLY


def test_buffered_is_told_by_size(bench):
    add_size(bench)
    point = answer(bench, "buffered").points[0]
    assert "faster at 16 MiB (1.44 times)" in point
    assert "slower at 256 MiB (0.72 times), 512 MiB" in point
    assert "within the noise at 64 MiB" in point
    assert answer(bench, "buffered").verdict == NO_CLAIM


def test_the_share_of_allocation(bench):
    add_restore(bench, share=0.25)
    points = answer(bench, "allocation").points
    assert any("25 %" in one and "memory new" in one for one in points)
    # torch allocates without touching: of ours the two are compared as a whole
    assert not any(one.startswith("ours") for one in points)
    labels = [one.comparison.label for one in answer(bench, "allocation").supports]
    assert "restores by megatron_uring" in labels
    ratios = [one.comparison.ratio for one in answer(bench, "allocation").supports]
    assert ratios == pytest.approx([0.75, 0.75, 1.5 / 1.9])


@pytest.mark.parametrize(
    ("snapshot", "datastates", "verdict"),
    [(0.4, 0.9, AGREES), (0.4, 1.5, PARTLY), (2.9, 3.0, DIFFERS), (2.0, 2.0, NOISE)],
)
def test_the_papers_factors(bench, snapshot, datastates, verdict):
    rates = {"TorchSnapshot": snapshot, "DataStates-style (emulation)": datastates}
    add_inventory(bench, rates)
    found = answer(bench, "inventory")
    assert found.verdict == verdict
    assert sum(bool(one.verdict) for one in found.supports) == 2  # of writes alone


def test_emulations_stand_apart_from_peers(bench):
    add_inventory(bench)
    peers, emulations = answer(bench, "inventory").points[:2]
    assert "emulation" not in peers
    assert "beside emulations" in emulations
    assert "DCP, write" not in answer(bench, "inventory").lead
    assert "1.90 times the throughput of the fastest other library, DCP" in (
        answer(bench, "inventory").lead
    )


def test_all_questions_are_answered_where_nothing_was_measured():
    found = findings.answers([])
    assert len(found) == 10
    assert {one.verdict for one in found} == {NOT_MEASURED}
    assert all(one.missing for one in found)


def test_too_few_trials_decide_nothing(bench):
    for size_, rate in ((SMALL, 0.5), (LARGE, 2.0)):
        bench.case("coalescing", f"{size_}", "write", [rate], submission_bytes=size_)
    found = answer(bench, "coalescing")
    assert (found.verdict, found.lead) == (UNDECIDED, "")
    for engine, rate in (("io_uring", 1.0), ("posix", 9.0)):
        bench.case("engine", engine, "write", [rate], engine=engine)
    assert not advice(bench, "engine").changed
    assert "too few trials" in advice(bench, "engine").why


def test_nothing_is_claimed_for_other_machines():
    text = findings.scope({"file_system": "ext4"}, 2, 1)
    assert "Nothing is claimed for Lustre or another file system, for more than one node" in text
    assert "more than 4 nodes" in findings.scope({"file_system": "lustre"}, 8, 4)


# -------------------------------------------------------------------------------------------------
# recommendation


def test_the_defaults_stay_where_nothing_is_clearly_faster(whole):
    found = recommend.recommend(whole.cases(), ENVIRONMENT)
    assert not [one.option for one in found if one.changed]
    assert all(one.evidence for one in found)
    assert recommend.headline(found).startswith("Keep the defaults: nothing")


def test_nothing_measured_is_said():
    found = recommend.recommend([], ENVIRONMENT)
    assert not any(one.changed for one in found)
    assert recommend.headline(found).startswith("Too little was measured for a recommendation")


def test_an_engine_that_is_clearly_faster_is_recommended(bench):
    add_engine(bench, posix=2.5)
    found = advice(bench, "engine")
    assert found.setting == "engine=posix"
    assert {one.label for one in found.evidence} == {"direct write", "direct read"}
    bench.environment = {**ENVIRONMENT, "engine": "posix: no ring"}
    assert not advice(bench, "engine").changed


def test_what_is_faster_here_and_slower_there_is_not_recommended(bench):
    add_engine(bench, posix=2.5)
    add_inventory(bench, {"ours, rank posix": 1.0})
    found = advice(bench, "engine")
    assert not found.changed
    assert "clearly faster here and clearly slower there" in found.why


def test_buffered_is_recommended_from_the_size_on_where_it_stays_faster(bench):
    add_size(bench, {16: 1.0, 64: 1.0, 256: 2.6, 512: 2.6})
    found = advice(bench, "direct, for saves")
    assert found.setting == "direct=off"
    assert "from 256 MiB a rank on" in found.why
    small = Bench()
    add_size(small, {16: 2.6, 64: 2.6, 256: 2.6, 512: 1.8})
    assert not advice(small, "direct, for saves").changed


def test_reads_below_what_auto_reads_direct_are_no_evidence(bench):
    add_size(bench, {16: 2.6})
    found = advice(bench, "direct, for restores")
    assert not found.changed
    assert not found.evidence


def test_without_direct_io_buffered_is_all_there_is(bench):
    bench.environment = {**ENVIRONMENT, "direct": False}
    assert not advice(bench, "direct, for saves").changed
    assert "no direct I/O" in advice(bench, "direct, for saves").why


def test_shared_files_are_recommended_if_faster(bench):
    add_inventory(bench, {"ours, shared io_uring": 3.0})
    assert advice(bench, "aggregation").setting == "aggregation=shared"
    bench.environment = {**ENVIRONMENT, "file_system": "lustre"}
    assert not advice(bench, "aggregation").changed
    slower = Bench(environment=bench.environment)
    add_inventory(slower, {"ours, shared io_uring": 1.0})
    assert advice(slower, "aggregation").setting == "aggregation=rank"


def test_the_smallest_pool_near_the_fastest_is_recommended(bench):
    add_pool(bench, {1: 1.0, 4: 1.5, 8: 2.0, 16: 2.9, 64: 3.0}, {1: 1.0, 64: 3.0})
    found = advice(bench, "queue_depth")
    assert found.setting == "queue_depth=16, slab_count=16 (a pool of 256 MiB for each rank)"
    assert advice(bench, "slab_bytes").setting.startswith("slab_bytes=67108864 (a pool of 512 MiB")


def test_a_default_depth_that_was_not_measured_is_judged_by_its_neighbours(bench):
    add_pool(bench, {1: 1.0, 4: 1.5, 16: 2.0, 64: 2.05}, {4: 1.0})
    found = advice(bench, "queue_depth")
    assert not found.changed
    assert {one.right.title for one in found.evidence} == {"16 MiB, depth 16"}


# -------------------------------------------------------------------------------------------------
# pictures and pages


def test_every_picture_is_drawn(whole):
    assert set(plots.figures(whole.cases())) == {one.key for one in findings.answers(whole.cases())}


def test_no_picture_without_cases(bench):
    assert plots.figures([]) == {}
    bench.case("inventory", "DCP", "write", (), kind="peer", error="not installed")
    assert plots.figures(bench.cases()) == {}


def test_pictures_of_a_file_system_without_direct_io(bench, whole):
    bench.records = [one for one in whole.records if not one.axes.get("direct")]
    figures = plots.figures(bench.cases())
    labels = [text.get_text() for text in figures["buffered"].legends[0].get_texts()]
    assert labels == ["buffered"]
    for figure in figures.values():
        figure.canvas.draw()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    path = everything().write(folder / "results.jsonl")
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"schema": 1, "run"')
    return write_report(path, str(folder / "out")), folder / "out"


def test_the_report_is_written_with_its_pictures(written):
    paths, folder = written
    assert sorted(paths) == sorted(str(one) for one in folder.iterdir())
    pictures = sorted(folder.glob("*.png"))
    assert len(pictures) == 10
    for path in pictures:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        assert len(data) > 10_000


def test_the_page_is_whole_in_itself(written):
    _, folder = written
    page = (folder / "report.html").read_text("utf-8")
    sources = re.findall(r'\bsrc="([^"]{0,40})', page)
    assert len(sources) == 10
    assert all(one.startswith("data:image/png;base64,") for one in sources)
    assert all(one.startswith("#") for one in re.findall(r'\bhref="([^"]*)"', page))
    assert not re.search(r"https?://|@import|url\(|<link|<iframe|<script", page)
    embedded = {base64.b64decode(one) for one in re.findall(r"base64,([^\"]*)\"", page)}
    assert embedded == {one.read_bytes() for one in folder.glob("*.png")}


def test_reasons_of_failures_are_shown_and_escaped(written):
    _, folder = written
    page = (folder / "report.html").read_text("utf-8")
    assert "no &lt;script&gt;alert(1)&lt;/script&gt; | here" in page
    text = (folder / "findings.md").read_text("utf-8")
    assert r"no &lt;script&gt;alert(1)&lt;/script&gt; \| here" in text
    assert "<script>" not in page + text


def test_page_and_findings_have_all_questions_and_what_is_missing(written, whole):
    _, folder = written
    page = html.unescape((folder / "report.html").read_text("utf-8"))
    text = (folder / "findings.md").read_text("utf-8")
    for one in findings.answers(whole.cases()):
        assert f"\n## {one.question}\n" in text
        assert f"<h2>{one.question}</h2>" in page
        assert one.quote in page
        assert f'"{one.quote}"' in text or not one.quote
    for document in (page, text):
        assert "1 line(s) of the results file were torn" in document
        assert "Nothing is claimed for Lustre" in document
        assert "keep the default" in document
        assert "scripts/bench quick --ranks 2" in document
        assert "0.90 GB/s (0.88 to 0.92, 3 trials)" in document
    assert page.index("Recommendation") < page.index("How much do small buffers cost")
    assert "node7" in page
    assert "node7" not in text  # which is committed


def test_tables_of_the_findings_are_even(written):
    lines = (written[1] / "findings.md").read_text("utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 100
    width = 0
    for line, before in zip(lines, ["", *lines[:-1]], strict=True):
        if line.startswith("|"):
            columns = len(re.findall(r"(?<!\\)\|", line))
            width = columns if not before.startswith("|") else width
            assert columns == width, line


def test_tags_of_the_page_are_closed(written):
    page = (written[1] / "report.html").read_text("utf-8")
    for tag in ("table", "tr", "td", "section", "details", "div", "ul", "figure", "p", "li"):
        opened = len(re.findall(rf"<{tag}[ >]", page))
        assert opened == page.count(f"</{tag}>"), tag


@pytest.mark.parametrize("group", ["patterns", "inventory"])
def test_a_missing_group_is_named(whole, tmp_path, group):
    whole.records = [one for one in whole.records if one.group != group]
    path = whole.write(tmp_path / "results.jsonl")
    write_report(path, str(tmp_path))
    text = (tmp_path / "findings.md").read_text("utf-8")
    assert f"The group {group} was not measured." in text
    assert len(list(tmp_path.glob("*.png"))) == (8 if group == "patterns" else 9)


def test_other_runs_are_counted(whole, tmp_path):
    other = Bench("run-0", day=1, environment={**ENVIRONMENT, "host": "elsewhere"})
    add_engine(other, posix=9.0)
    whole.records = [replace(one, time=one.time.replace("01T", "02T")) for one in whole.records]
    path = other.write(tmp_path / "results.jsonl")
    whole.write(path)
    write_report(path, str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1 more run(s)" in page
    assert "elsewhere, ext4" in page
    assert "9.00" not in page


def test_a_file_without_figures_is_refused(bench, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ResultsError, match=r"empty\.jsonl: no trial with figures"):
        write_report(str(empty), str(tmp_path / "report"))
    bench.case("size", "x", "write", (), error="disk full")
    path = bench.write(tmp_path / "failed.jsonl")
    with pytest.raises(ResultsError, match="1 runs, 1 records of failed trials"):
        write_report(path, str(tmp_path / "report"))
    assert not (tmp_path / "report").exists()


def test_another_schema_is_refused(whole, tmp_path):
    path = whole.write(tmp_path / "results.jsonl")
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"schema": 2}) + "\n")
    with pytest.raises(ResultsError, match="expected a record of schema 1"):
        write_report(path, str(tmp_path))


def test_a_report_of_an_incomplete_environment_comes_out(tmp_path):
    bench = Bench(environment={})
    add_engine(bench)
    write_report(bench.write(tmp_path / "results.jsonl"), str(tmp_path))
    assert "Checkpoint I/O on an unknown file system" in (tmp_path / "findings.md").read_text()


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_what_is_not_installed_is_named(missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from megatron_uring.errors import UnsupportedError\n"
        "try:\n    import megatron_uring.bench.pages.page\n"
        "except UnsupportedError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    assert f"expected {missing}, found not installed" in done.stdout
    assert "pip install 'megatron-uring[bench]'" in done.stdout
