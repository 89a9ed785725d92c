"""Probing: a short measurement that chooses among sizes, remembers, and never does harm."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import megatron_uring
from megatron_uring import (
    Config,
    StorageError,
    _engine,
    checkpoint,
    cli,
    layout,
    probing,
    profiles,
    read,
    stage,
)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(profiles, "_remembered", {})


@pytest.fixture
def timed(monkeypatch):
    """Pretend that candidates take these seconds, by slab size in MiB, the POSIX engine as long as
    the default, and that reads are so fast; returns what was timed.
    """

    def pretend(seconds, reads=None, posix=None):
        asked = []

        def time_one(directory, config, source, file_bytes):
            asked.append(config.slab_bytes >> 20)
            slow = posix is None or config.engine != "posix"
            return seconds[config.slab_bytes >> 20] if slow else posix

        monkeypatch.setattr(probing, "_time_write", time_one)
        large = 128 << 20
        rates = {(mode, large): rate for mode, rate in (reads or {}).items()}
        monkeypatch.setattr(probing, "_read_rates", lambda *_: rates)
        return asked

    return pretend


def rounds():
    """How often candidates are timed: twice each, the POSIX engine once more beside a ring."""
    return 8 if stage.open_engine(Config()).kind == "io_uring" else 6


def test_a_real_probe_measures_each_candidate_and_leaves_nothing(tmp_path):
    config = Config()
    found = probing.probe(str(tmp_path), config)
    first = stage.open_engine(config).kind
    names = [probing.label(first, size) for size in (16, 4, 32)]
    assert list(found.gb_per_s)[:3] == names and found.chosen in found.gb_per_s
    assert set(found.gb_per_s) == {*names, probing.label("posix", 16)}
    assert all(rate > 0 for rate in found.gb_per_s.values())
    assert found.slab_bytes * found.slab_count == config.slab_bytes * config.slab_count
    assert os.listdir(tmp_path) == []


def test_reads_are_measured_both_ways_where_files_are_direct(tmp_path, save):
    found = probing.probe(str(tmp_path), Config())
    direct = save({"a": 1}, str(tmp_path / "save")).direct
    both = {"direct, 128 MiB", "buffered, 128 MiB"}
    assert set(found.read_gb_per_s) == (both if direct else set())
    assert all(rate > 0 for rate in found.read_gb_per_s.values())
    assert not probing.probe(str(tmp_path), Config(direct="off")).read_gb_per_s


@pytest.mark.parametrize(
    ("reads", "answer"),
    [
        ({"direct": 1.0, "buffered": 1.2}, "off"),
        ({"direct": 1.0, "buffered": 1.1}, "on"),
        ({"direct": 1.0}, "on"),  # there was no time for the other
        ({}, "on"),
    ],
)
def test_large_reads_are_buffered_where_that_was_clearly_faster(
    tmp_path, timed, monkeypatch, reads, answer
):
    timed({16: 1.0, 4: 1.0, 32: 1.0}, reads)
    large = read.DIRECT_FROM_BYTES
    assert probing.direct_reads(str(tmp_path), Config(), large) == "auto"
    probing.probe(str(tmp_path), Config())
    for _ in range(2):
        assert probing.direct_reads(str(tmp_path), Config(), large) == answer
        assert probing.direct_reads(str(tmp_path), Config(), large - 1) == "off"
        assert probing.direct_reads(str(tmp_path), Config(direct="on"), large) == "on"
        assert probing.direct_reads(str(tmp_path), Config(probe="off"), large) == "auto"
        monkeypatch.setattr(profiles, "_remembered", {})  # as in another process


@pytest.mark.parametrize("buffered_gb_per_s", [9.0, 1.0])
def test_a_large_restore_reads_as_the_probe_found_and_probes_nothing(
    tmp_path, timed, save, buffered_gb_per_s
):
    asked = timed({16: 1.0, 4: 1.0, 32: 1.0}, {"direct": 1.0, "buffered": buffered_gb_per_s})
    report = save({"a": torch.ones(17 << 20)}, str(tmp_path))
    probing.probe(str(tmp_path), Config())
    assert bool(megatron_uring.restore(str(tmp_path))["a"].all())
    restored = checkpoint.last_reports()["restore"]
    assert restored.direct == (report.direct and buffered_gb_per_s < 2)
    assert len(asked) == rounds()


def test_a_clearly_faster_candidate_is_chosen(tmp_path, timed):
    timed({16: 1.0, 4: 0.5, 32: 0.8})
    found = probing.probe(str(tmp_path), Config())
    assert (found.slab_bytes >> 20, found.slab_count, found.queue_depth) == (4, 32, 32)
    assert found.apply(Config(engine="posix")) == Config(
        engine="posix", slab_bytes=4 << 20, slab_count=32, queue_depth=32
    )


def test_a_little_faster_is_not_enough(tmp_path, timed):
    timed({16: 1.0, 4: 0.95, 32: 0.9})
    assert probing.probe(str(tmp_path), Config()).apply(Config()) == Config()


def test_a_slow_disk_ends_the_probe_early_with_the_defaults(tmp_path, timed, monkeypatch):
    asked = timed({16: 1.0, 4: 0.1, 32: 0.1})
    hurried = replace(probing.SHORT, budget_s=-1.0)
    assert probing.probe(str(tmp_path), Config(), hurried).apply(Config()) == Config()
    assert asked == []
    assert profiles._read_store() == {}


def test_it_is_asked_once_for_each_file_system_and_kept_for_other_processes(
    tmp_path, timed, monkeypatch
):
    asked = timed({16: 1.0, 4: 1.0, 32: 0.1})
    first = probing.tune(str(tmp_path), Config(probe="on"), 0)
    assert first.slab_bytes == 32 << 20
    monkeypatch.setattr(profiles, "_remembered", {})  # as in another process
    assert probing.tune(str(tmp_path), Config(), 0).slab_bytes == 32 << 20
    assert len(asked) == rounds()


@pytest.mark.parametrize(
    "config",
    [Config(probe="off"), Config(slab_bytes=1 << 20), Config(slab_count=2), Config(queue_depth=3)],
)
def test_what_the_user_chose_stays(tmp_path, timed, config):
    asked = timed({16: 1.0, 4: 0.1, 32: 0.1})
    assert probing.tune(str(tmp_path), config, 1 << 50) == config
    assert asked == []


@pytest.mark.parametrize(("state_bytes", "count"), [(probing.FROM_BYTES - 1, 0), (1 << 40, 1)])
def test_by_itself_it_probes_before_large_saves_alone(tmp_path, timed, state_bytes, count):
    asked = timed({16: 1.0, 4: 1.0, 32: 1.0})
    assert probing.tune(str(tmp_path), Config(), state_bytes) == Config()
    assert len(asked) == count * rounds()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"x": 1}', '{"x": {"slab_bytes": 1}}', None],
)
def test_a_store_that_makes_no_sense_is_as_good_as_none(tmp_path, timed, text):
    timed({16: 1.0, 4: 1.0, 32: 0.1})
    store = profiles.store_path()
    store.parent.mkdir()
    if text is None:
        sizes = {"slab_bytes": 5, "slab_count": 1, "queue_depth": 1, "gb_per_s": {}}
        text = json.dumps({profiles._key(str(tmp_path), Config()): sizes})
    store.write_text(text)
    assert probing.tune(str(tmp_path), Config(), 0) == Config()
    assert probing.tune(str(tmp_path), Config(probe="on"), 0).slab_bytes == 32 << 20


def test_a_cache_that_cannot_be_written_keeps_the_answer_in_this_process(
    tmp_path, timed, monkeypatch
):
    asked = timed({16: 1.0, 4: 1.0, 32: 0.1})
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    for _ in range(2):
        assert probing.tune(str(tmp_path), Config(probe="on"), 0).slab_bytes == 32 << 20
    assert len(asked) == rounds()


def test_a_probe_that_fails_changes_nothing_and_leaves_nothing(tmp_path, save):
    _engine.inject_fault("write", "enospc", count=-1, path_contains=".probe-")
    with pytest.raises(StorageError):
        probing.probe(str(tmp_path), Config())
    assert os.listdir(tmp_path) == []
    assert probing.tune(str(tmp_path), Config(probe="on"), 0) == Config(probe="on")


def test_what_a_killed_probe_left_is_swept_by_the_next_save(tmp_path, save):
    left = tmp_path / layout.temporary_name("probe", "00000000000000aa")
    left.write_bytes(b"x" * 4096)
    save({"a": 1}, str(tmp_path))
    assert not left.exists()


def test_the_command_prints_what_it_found(tmp_path, timed):
    timed({16: 1.0, 4: 1.0, 32: 0.1})
    plain = CliRunner().invoke(cli.main, ["probe", str(tmp_path)])
    assert plain.exit_code == 0
    assert "chosen" in plain.output
    as_json = CliRunner().invoke(cli.main, ["probe", "--json", str(tmp_path)])
    assert json.loads(as_json.output)["slab_bytes"] == 32 << 20


def test_a_save_uses_what_was_found(tmp_path, timed, save):
    timed({16: 1.0, 4: 1.0, 32: 0.1})
    report = save({"a": 1}, str(tmp_path), config=Config(engine="posix", probe="on"))
    assert report.staging == "4 slabs of 32 MiB, depth 4"


def test_another_ranks_sizes_are_taken_unless_this_rank_has_its_own():
    faster = Config(slab_bytes=4 << 20, slab_count=32, queue_depth=32)
    changed = probing.difference(Config(), faster)
    assert changed == {"slab_bytes": 4 << 20, "slab_count": 32, "queue_depth": 32}
    assert probing.adopt(Config(engine="posix"), changed) == replace(faster, engine="posix")
    assert probing.adopt(Config(slab_count=2), changed) == Config(slab_count=2)
    assert probing.adopt(Config(), {}) == Config()


def test_the_posix_engine_is_taken_where_it_is_clearly_faster_and_none_was_named(
    tmp_path, timed, save
):
    if stage.open_engine(Config()).kind == "posix":
        pytest.skip("no ring here")
    timed({16: 1.0, 4: 1.0, 32: 1.0}, posix=0.5)
    report = save({"a": 1}, str(tmp_path), config=Config(probe="on"))
    assert report.engine == "posix: a probe found it faster here"
    report = save({"a": 1}, str(tmp_path), config=Config(engine="io_uring", probe="on"))
    assert report.engine == "io_uring: asked for"
    tuned = Config(engine="posix")
    changed = probing.difference(Config(), tuned)
    assert probing.adopt(Config(), changed) == tuned
    assert probing.adopt(Config(engine="io_uring"), changed) == Config(engine="io_uring")


def test_the_answer_does_not_depend_on_sizes_that_somebody_set(tmp_path, timed):
    timed({16: 1.0, 4: 1.0, 32: 1.0})
    found = probing.probe(str(tmp_path), Config(slab_count=64, queue_depth=3))
    assert found.apply(Config()) == Config()


def test_where_the_answer_cannot_be_kept_it_is_said(tmp_path, timed, monkeypatch, caplog):
    timed({16: 1.0, 4: 1.0, 32: 1.0})
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    probing.probe(str(tmp_path), Config())
    assert "this process only" in caplog.text


MIB = 1 << 20


@pytest.mark.parametrize(
    ("rates", "answer"),
    [
        # direct by size, buffered by size
        ({256: (2.0, 1.0), 64: (2.0, 1.0), 16: (2.0, 1.0), 4: (1.0, 1.0)}, (16 * MIB, False)),
        ({256: (2.0, 1.0), 64: (1.0, 1.1), 16: (1.1, 1.0), 4: (9.0, 1.0)}, (64 * MIB, False)),
        ({256: (2.0, 1.0), 64: (1.0, 1.2), 16: (1.0, 2.0)}, (256 * MIB, False)),
        ({256: (1.0, 1.2), 64: (2.0, 1.0), 16: (2.0, 1.0)}, (64 * MIB, True)),
        ({256: (1.0, 1.0)}, (64 * MIB, False)),
        ({}, (64 * MIB, False)),
    ],
)
def test_reads_are_direct_from_where_that_is_clearly_faster(rates, answer):
    measured = {}
    for size, (direct, buffered) in rates.items():
        measured[("direct", size * MIB)] = direct
        measured[("buffered", size * MIB)] = buffered
    assert probing._direct_threshold(measured) == answer


def test_a_threshold_found_by_a_probe_decides_how_a_restore_reads(tmp_path, save):
    report = save({"a": torch.ones(2 << 20)}, str(tmp_path))
    for threshold, direct in ((4 * MIB, report.direct), (16 * MIB, False)):
        found = profiles.Tuning(16 * MIB, 8, 8, {}, direct_from_bytes=threshold)
        profiles.remember(str(tmp_path), Config(), found)
        megatron_uring.restore(str(tmp_path))
        assert checkpoint.last_reports()["restore"].direct == direct


def test_a_thorough_probe_finds_buffered_writes_to_be_faster(tmp_path, timed, save, monkeypatch):
    timed(dict.fromkeys((16, 1, 4, 32, 64), 1.0))
    plain = probing._time_write
    monkeypatch.setattr(
        probing, "_time_write", lambda d, c, s, n: 0.1 if c.direct == "off" else plain(d, c, s, n)
    )
    found = probing.probe(str(tmp_path), Config(), probing.THOROUGH)
    assert found.chosen == "buffered" and found.buffered_writes
    assert not save({"a": 1}, str(tmp_path / "a"), config=Config()).direct
    assert found.apply(Config(direct="on")).direct == "on"
    assert probing.adopt(Config(direct="on"), {"direct": "off"}) == Config(direct="on")


@pytest.mark.slow
def test_a_thorough_probe_measures_all_within_half_a_minute(tmp_path):
    began = time.monotonic()
    found = probing.probe(str(tmp_path), Config(), probing.THOROUGH)
    assert time.monotonic() - began < 30
    assert {"buffered"} < set(found.gb_per_s) or not found.gb_per_s
    assert os.listdir(tmp_path) == []


def test_status_shows_what_is_remembered(tmp_path):
    found = profiles.Tuning(4 * MIB, 32, 32, {}, direct_from_bytes=4 * MIB, aggregation="shared")
    profiles.remember(str(tmp_path), Config(), found)
    ((key, shown),) = megatron_uring.status()["profiles"].items()
    assert key == profiles._key(str(tmp_path), Config()) and shown["slab_count"] == 32
    printed = CliRunner().invoke(cli.main, ["status"]).output
    assert "32 slabs of 4 MiB, depth 32, direct reads from 4 MiB on" in " ".join(printed.split())


def test_a_save_aggregates_as_a_probe_found_unless_it_is_told_how(tmp_path, save):
    found = profiles.Tuning(16 * MIB, 8, 8, {}, aggregation="shared")
    profiles.remember(str(tmp_path), Config(), found)
    report = save({"a": 1}, str(tmp_path / "a"), config=Config())
    assert "shared: auto, a probe found it" in report.aggregation
    report = save({"a": 1}, str(tmp_path / "b"), config=Config(aggregation="rank"))
    assert report.aggregation == "rank: asked for"
