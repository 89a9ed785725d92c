"""Options: defaults, variables, refusals."""

import dataclasses

import pytest

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
    with pytest.raises(
        UnsupportedError, match=r"slab_count.*found 'slabcount' .did you mean slab_count"
    ):
        Config.from_environment({}, slabcount=1)


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
        {"verify_first": "off"},
        {"allowed_globals": "a.B"},
        {"posix_threads": 10**5},
        {"slab_count": 10**7},
    ],
)
def test_a_value_of_another_kind_or_out_of_bounds_is_refused(options):
    (name,) = options
    with pytest.raises(UnsupportedError, match=name):
        Config(**options)
