"""Options: defaults, variables, refusals."""

import copy
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import megatron_uring
from megatron_uring.config import Config, switched_off
from megatron_uring.errors import UnsupportedError

SAMPLES = {
    "engine": ("posix", "posix"),
    "communicator": ("gloo", "gloo"),
    "aggregation": ("shared", "shared"),
    "aggregators_per_node": ("3", 3),
    "direct": ("off", "off"),
    "stripe_bytes": ("4194304", 4194304),
    "slab_bytes": (" 2097152 ", 2097152),
    "slab_count": ("5", 5),
    "queue_depth": ("6", 6),
    "posix_threads": ("7", 7),
    "copy_threads": ("2", 2),
    "gap_bytes": ("0", 0),
    "timeline": ("off", False),
    "timeout_s": ("1.5", 1.5),
    "node_sharing": ("off", "off"),
    "probe": ("on", "on"),
    "staging_bytes": ("1048576", 1048576),
    "verify_staging": ("full", "full"),
    "drain_bytes_per_s": ("2000000", 2000000),
    "drain_priority": ("idle", "idle"),
    "on_save_error": ("warn", "warn"),
    "save_errors_maximum": ("0", 0),
    "staging_directory": ("/dev/shm", "/dev/shm"),
    "staging_keep": ("2", 2),
    "verify_first": ("on", True),
    "allow_dtype_conversion": ("TRUE", True),
    "allowed_globals": ("a.B, c.D,", ("a.B", "c.D")),
}


def test_every_option_has_a_sample_here_and_a_help_text():
    fields = dataclasses.fields(Config)
    assert {field.name for field in fields} == set(SAMPLES)
    assert all(field.metadata["help"] for field in fields)


@pytest.mark.parametrize("name", SAMPLES)
def test_each_option_is_read_from_its_variable(name):
    text, value = SAMPLES[name]
    config = Config.from_environment({f"MEGATRON_URING_{name.upper()}": text})
    assert getattr(config, name) == value
    assert config == dataclasses.replace(Config(), **{name: value})


def test_a_variable_wins_over_the_program():
    assert Config.from_environment({"MEGATRON_URING_ENGINE": "posix"}, engine="auto").engine == (
        "posix"
    )


def test_without_a_variable_the_program_wins_over_the_default():
    assert Config.from_environment({}, slab_count=3).slab_count == 3


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("MEGATRON_URING_GAP_BYTES", "17")
    assert Config.from_environment().gap_bytes == 17


def test_a_config_is_frozen_and_hashable():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.engine = "posix"
    assert hash(config) == hash(Config())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "aio"),
        ("communicator", "nccl"),
        ("aggregation", "node"),
        ("direct", "maybe"),
        ("slab_bytes", (1 << 20) + 1),
        ("slab_bytes", 0),
        ("slab_count", 0),
        ("slab_count", -1),
        ("queue_depth", True),
        ("queue_depth", "8"),
        ("gap_bytes", -1),
        ("stripe_bytes", -4096),
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
        ("slab_count", 1.5),
        ("staging_directory", "relative/path"),
        ("staging_directory", 1),
        ("staging_keep", -1),
    ],
)
def test_an_unusable_value_is_refused_naming_option_and_value(name, value):
    with pytest.raises(UnsupportedError) as caught:
        Config(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slab_count", "many"),
        ("slab_count", "1.5"),
        ("timeout_s", "soon"),
        ("verify_first", "maybe"),
        ("engine", ""),
    ],
)
def test_an_unusable_variable_is_refused_naming_the_variable(name, text):
    with pytest.raises(UnsupportedError, match=f"MEGATRON_URING_{name.upper()}"):
        Config.from_environment({f"MEGATRON_URING_{name.upper()}": text})


def test_an_unknown_option_is_refused_naming_it_and_the_known_ones():
    meant = r"found 'slabcount' \(did you mean slab_count\? known are .*engine.*verify_staging"
    for make in (lambda **o: Config.from_environment({}, **o), Config, megatron_uring.enable):
        with pytest.raises(UnsupportedError, match=meant):
            make(slabcount=1)
    with pytest.raises(UnsupportedError, match=r"found 'x' \(known are aggregation, "):
        dataclasses.replace(Config(), x=1)


def test_a_config_says_which_options_it_takes():
    names = list(inspect.signature(Config).parameters)
    assert names == [field.name for field in dataclasses.fields(Config)]
    assert Config("posix") == Config(engine="posix") == copy.copy(Config(engine="posix"))


@pytest.mark.parametrize("name", ["timeline", "verify_first", "allow_dtype_conversion"])
@pytest.mark.parametrize(
    ("value", "means"), [("off", False), ("On", True), ("no", False), (True, True), (False, False)]
)
def test_a_switch_may_be_a_word_or_a_truth_value(name, value, means):
    assert getattr(Config(**{name: value}), name) is means
    assert getattr(Config.from_environment({}, **{name: value}), name) is means


@pytest.mark.parametrize("name", ["direct", "probe", "node_sharing"])
@pytest.mark.parametrize(
    ("value", "means"), [(True, "on"), (False, "off"), ("TRUE", "on"), ("0", "off"), ("auto",) * 2]
)
def test_a_choice_with_on_and_off_may_be_a_truth_value(name, value, means):
    assert getattr(Config(**{name: value}), name) == means
    if isinstance(value, str):
        variable = f"MEGATRON_URING_{name.upper()}"
        assert getattr(Config.from_environment({variable: value}), name) == means


def test_only_what_can_be_off_is_switched_off():
    assert Config(verify_staging=False).verify_staging == "off"
    for options in ({"verify_staging": True}, {"engine": False}, {"slab_count": "on"}):
        with pytest.raises(UnsupportedError, match="read option"):
            Config(**options)


def test_a_staging_directory_may_be_a_path():
    assert Config(staging_directory=Path("/dev/shm")) == Config(staging_directory="/dev/shm")
    for path in (Path("relative"), b"/dev/shm"):
        with pytest.raises(UnsupportedError, match=r"staging_directory.*an absolute path"):
            Config(staging_directory=path)


@pytest.mark.parametrize("text", ["2GB", "2e9", "2_0.5"])
def test_bytes_in_other_units_are_refused_with_an_example(text):
    example = r"a whole number of bytes, e\.g\. 2000000000, found " + re.escape(repr(text))
    for name in ("staging_bytes", "drain_bytes_per_s", "stripe_bytes"):
        with pytest.raises(UnsupportedError, match=example):
            Config.from_environment({f"MEGATRON_URING_{name.upper()}": text})
    with pytest.raises(
        UnsupportedError,
        match=r"number of bytes from 0 to \d+, e\.g\. 2000000000, found 2000000000\.0",
    ):
        Config(staging_bytes=2e9)
    with pytest.raises(UnsupportedError, match=r"slab_bytes.* from 1048576 to.*e\.g\. 16777216, f"):
        Config(slab_bytes="16MB")


@pytest.mark.parametrize(
    "call",
    [
        lambda path, config: megatron_uring.save({"a": 1}, path, config=config),
        lambda path, config: megatron_uring.save_async({"a": 1}, path, config=config),
        lambda path, config: megatron_uring.restore(path, config=config),
        lambda path, config: megatron_uring.open_checkpoint(path, config=config),
    ],
    ids=["save", "save_async", "restore", "open_checkpoint"],
)
@pytest.mark.parametrize("config", [{"engine": "posix"}, {}, "posix"])
def test_what_is_no_config_is_refused(save, tmp_path, call, config):
    save({"a": 1}, tmp_path)
    with pytest.raises(UnsupportedError, match=r"expected a Config, found (dict|str) \(config=meg"):
        call(tmp_path, config)


@pytest.mark.parametrize("text", ["off", "OFF", " 0 ", "false", "no"])
def test_the_main_switch_turns_off(text):
    assert switched_off({"MEGATRON_URING": text})


@pytest.mark.parametrize("environment", [{}, {"MEGATRON_URING": "on"}])
def test_the_main_switch_stays_on(environment):
    assert not switched_off(environment)


@pytest.mark.parametrize("text", ["of", "", "2"])
def test_a_main_switch_that_is_neither_on_nor_off_is_refused(text):
    with pytest.raises(UnsupportedError, match=r"MEGATRON_URING.*expected on or off"):
        switched_off({"MEGATRON_URING": text})


def test_a_mistyped_variable_is_refused_with_the_one_that_was_meant():
    with pytest.raises(UnsupportedError, match="did you mean MEGATRON_URING_ENGINE"):
        Config.from_environment({"MEGATRON_URING_ENGIN": "posix"})


@pytest.mark.parametrize(
    "options",
    [
        {"verify_first": "maybe"},
        {"verify_first": 1},
        {"allowed_globals": "a.B"},
        {"posix_threads": 10**5},
        {"slab_count": 10**7},
    ],
)
def test_a_value_of_another_kind_or_out_of_bounds_is_refused(options):
    (name,) = options
    with pytest.raises(UnsupportedError, match=name):
        Config(**options)
