"""Every option, in one frozen `Config`; the only reader of `MEGATRON_URING_*` variables.

Guarantees
----------
- A variable that is set wins over what the program passed to `enable` (`from_environment`): the
  operator has the last word. A `Config` that is made directly is taken as it is.
- A variable of ours that nobody knows, a mistyped one, is refused.
- A value that cannot be used is refused when the `Config` is made, naming option, value and what is
  allowed; a name that nobody knows, with the one that was meant.
- Switches may be given as words or as True and False, paths as text or `os.PathLike`; what a
  `Config` holds is one of each.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_uring.errors import UnsupportedError

KIBIBYTE, MEBIBYTE, GIBIBYTE = 1 << 10, 1 << 20, 1 << 30
_SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}
# Smallest and largest value that makes sense; the native engine holds to the same bounds.
_BOUNDS: dict[str, tuple[float, float]] = {
    "aggregators_per_node": (1, 4096),
    "stripe_bytes": (0, 1 << 40),
    "slab_bytes": (MEBIBYTE, 1 << 30),
    "slab_count": (1, 65536),
    "queue_depth": (1, 4096),
    "posix_threads": (1, 256),
    "copy_threads": (1, 64),
    "gap_bytes": (0, 1 << 40),
    "staging_bytes": (0, 1 << 50),
    "drain_bytes_per_s": (0, 1 << 50),
    "save_errors_maximum": (0, 1 << 20),
    "staging_keep": (0, 1024),
    "timeout_s": (1e-3, 1e9),
}
_OTHER_VARIABLES = ("MEGATRON_URING", "MEGATRON_URING_NODE_OF_RANK")
_Value = TypeVar("_Value")


def _option(default: _Value, help_text: str, choices: tuple[str, ...] = ()) -> _Value:
    option: _Value = field(default=default, metadata={"help": help_text, "choices": choices})
    return option


_Class = TypeVar("_Class", bound=type)


def _names_checked(options: _Class) -> _Class:
    """The same dataclass; a mistyped field is an error of ours, and no TypeError."""
    made = options.__init__  # type: ignore[misc]  # no instance, and wanted as it is here

    @functools.wraps(made)
    def checked(self: object, *values: object, **named: object) -> None:
        known = [option.name for option in dataclasses.fields(options)]
        _refuse_unknown("make a Config", named, known)
        made(self, *values, **named)

    options.__init__ = checked  # type: ignore[misc]
    return options


@_names_checked
@dataclass(frozen=True)
class Config:
    """How checkpoints are written and read. Each field `x` is also the variable
    ``MEGATRON_URING_X``.

    Raises
    ------
    UnsupportedError
        For a value outside the allowed ones.
    """

    engine: str = _option(
        "auto",
        "native engine; auto takes io_uring where a ring can be set up",
        ("auto", "io_uring", "posix"),
    )
    communicator: str = _option(
        "auto",
        "how ranks talk; auto takes MPI where it spans the same ranks as torch.distributed",
        ("auto", "mpi", "gloo"),
    )
    aggregation: str = _option(
        "auto",
        "a subfile for each rank, or one shared by a group of a node's ranks",
        ("auto", "rank", "shared"),
    )
    aggregators_per_node: int = _option(1, "subfiles for each node in shared mode")
    direct: str = _option(
        "auto",
        "O_DIRECT; auto uses it where the file system allows it",
        ("auto", "on", "off"),
    )
    stripe_bytes: int = _option(0, "stripe size; 0 asks the file system")
    slab_bytes: int = _option(16 * MEBIBYTE, "size of a staging slab, a multiple of 1 MiB")
    slab_count: int = _option(8, "slabs of a rank's staging pool, its bound in memory")
    queue_depth: int = _option(8, "most reads or writes in flight")
    probe: str = _option(
        "auto",
        "choose slab size, depth and engine, and direct or buffered reads, by a short probe of the "
        "file system, once; auto does so before the first save of 4 GiB or more on rank 0",
        ("auto", "on", "off"),
    )
    posix_threads: int = _option(4, "threads of the POSIX engine")
    copy_threads: int = _option(1, "threads that fill, verify and scatter slabs")
    gap_bytes: int = _option(4 * MEBIBYTE, "unneeded bytes read to join two ranges")
    staging_bytes: int = _option(
        0,
        "host memory in which each rank stages an asynchronous save; 0: as much as its state, "
        "within a quarter of what the node has free for each of its ranks; never less than "
        "slab_count slabs",
    )
    verify_staging: str = _option(
        "sampled",
        "of an asynchronous save, compare checksums taken at the call with those of what was "
        "copied later: of 16 MiB, of everything (reads all of it once more), or of nothing",
        ("off", "sampled", "full"),
    )
    drain_bytes_per_s: int = _option(
        0,
        "most bytes that each rank writes in a second of an asynchronous save, at least 1 MiB; 0: "
        "no limit",
    )
    drain_priority: str = _option(
        "normal",
        "I/O priority of an asynchronous save, where the system's scheduler knows any",
        ("normal", "low", "idle"),
    )
    staging_directory: str = _option(
        "",
        "folder of the node (NVMe, /dev/shm) that takes an asynchronous save first and from which "
        "it drains to the checkpoint directory; a restore on the node reads from it; empty: none",
    )
    staging_keep: int = _option(
        1, "copies of committed checkpoints of a run that stay in staging_directory"
    )
    on_save_error: str = _option(
        "raise",
        "an asynchronous save of Megatron that failed is raised on all ranks, or logged on all; "
        "neither metadata.json nor a tracker is written",
        ("raise", "warn"),
    )
    save_errors_maximum: int = _option(
        3, "with on_save_error=warn: the error that follows so many in a row is raised"
    )
    timeline: bool = _option(
        True, "keep with each checkpoint where the time of its save went, for megatron-uring trace"
    )
    timeout_s: float = _option(600.0, "longest wait without any progress, in seconds")
    node_sharing: str = _option(
        "auto",
        "on load, read what several ranks of a node need once, through shared memory",
        ("auto", "on", "off"),
    )
    verify_first: bool = _option(
        False, "on load, check every needed block before the first tensor is touched"
    )
    allow_dtype_conversion: bool = _option(
        False, "on load, convert to the dtype of the destination instead of refusing"
    )
    allowed_globals: tuple[str, ...] = _option(
        (), "classes (module.name) that objects of a checkpoint may hold beyond torch's safe ones"
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            default, choices = option.default, option.metadata["choices"]
            value = _as_meant(getattr(self, option.name), default, choices)
            object.__setattr__(self, option.name, value)
            if choices and value not in choices:
                raise _refused(option.name, value, "one of " + ", ".join(choices))
            if isinstance(default, bool) and not isinstance(value, bool):
                raise _refused(option.name, value, "on or off, True or False")
            if isinstance(default, tuple) and not _is_text_sequence(value):
                raise _refused(option.name, value, "a list of module.name")
            if option.name in _BOUNDS:
                _check_number(option.name, value, default)
        staging = self.staging_directory
        if not isinstance(staging, str) or (staging and not os.path.isabs(staging)):
            raise _refused("staging_directory", staging, "an absolute path, or nothing")
        if 0 < self.drain_bytes_per_s < MEBIBYTE:
            allowed = f"0, or at least {MEBIBYTE}"
            raise _refused("drain_bytes_per_s", self.drain_bytes_per_s, allowed)
        if self.slab_bytes % MEBIBYTE:
            raise _refused("slab_bytes", self.slab_bytes, f"a multiple of {MEBIBYTE}")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **options: object
    ) -> Config:
        """`options` under the ``MEGATRON_URING_*`` variables of `environment` (default:
        `os.environ`).
        """
        environment = os.environ if environment is None else environment
        known = {option.name: option for option in dataclasses.fields(cls)}
        _refuse_unknown("read options", options, known)
        variables = [name for name in environment if name.startswith("MEGATRON_URING")]
        spelled = [f"MEGATRON_URING_{name.upper()}" for name in known]
        _refuse_unknown("read variables", variables, [*spelled, *_OTHER_VARIABLES])
        for name, option in known.items():
            text = environment.get(f"MEGATRON_URING_{name.upper()}")
            if text is not None:
                options[name] = _parse(name, text, option.default)
        return cls(**options)  # type: ignore[arg-type]


def config_or_default(config: Config | None) -> Config:
    """`config`, or what the variables say; raises `UnsupportedError` for what is no `Config`."""
    if config is None:
        return Config.from_environment()
    if not isinstance(config, Config):
        raise UnsupportedError(
            "read options",
            expected="a Config",
            found=type(config).__name__,
            cause="config=megatron_uring.Config(name=value, ...)",
        )
    return config


def parse_options(texts: Iterable[str]) -> dict[str, object]:
    """Fields of `Config` from texts of the form ``name=value``, as the variables spell values."""
    known = {option.name: option.default for option in dataclasses.fields(Config)}
    pairs = [text.partition("=") for text in texts]
    _refuse_unknown("read options", [name for name, _, _ in pairs], known)
    return {name: _parse(name, value, known[name]) for name, _, value in pairs}


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Whether ``MEGATRON_URING=off`` (or 0, false, no) asks for plain Megatron."""
    environment = os.environ if environment is None else environment
    word = environment.get("MEGATRON_URING", "on").strip().lower()
    if word not in _SWITCH_WORDS:
        raise UnsupportedError(
            "read variable MEGATRON_URING", expected="on or off", found=repr(word)
        )
    return not _SWITCH_WORDS[word]


def faked_topology(environment: Mapping[str, str] | None = None) -> str:
    """Node of each rank (``"0,0,1,1"``), if ``MEGATRON_URING_NODE_OF_RANK`` fakes it for tests."""
    environment = os.environ if environment is None else environment
    return environment.get("MEGATRON_URING_NODE_OF_RANK", "")


def _parse(name: str, text: str, default: object) -> object:
    text = text.strip()
    try:
        if isinstance(default, bool):
            return _SWITCH_WORDS[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
    except (KeyError, ValueError):
        kind = "on or off" if isinstance(default, bool) else "a number"
        if "_bytes" in name:
            kind = f"a whole number of bytes, {_example(default)}"
        raise _refused(name, text, kind) from None
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _as_meant(value: object, default: object, choices: tuple[str, ...]) -> object:
    """`value` as this option has it: a switch given in another way, a path that is an object."""
    switch = value if isinstance(value, bool) else None
    if isinstance(value, str) and value not in choices:
        switch = _SWITCH_WORDS.get(value.strip().lower())
    if switch is not None and isinstance(default, bool):
        return switch
    if switch is not None and choices:
        word = "on" if switch else "off"
        return word if word in choices else value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _example(default: object) -> str:
    return f"e.g. {default or 2_000_000_000}"


def _is_text_sequence(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _check_number(name: str, value: object, default: object) -> None:
    least, most = _BOUNDS[name]
    fraction = isinstance(default, float)
    kinds = (int, float) if fraction else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        if fraction:
            raise _refused(name, value, f"a number from {least:g} to {most:g}")
        unit, example = " of bytes", f", {_example(default)}"
        if "_bytes" not in name:
            unit = example = ""
        raise _refused(name, value, f"a whole number{unit} from {least} to {most}{example}")


def _refuse_unknown(operation: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in sorted(set(given) - set(known)):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        all_known = "known are " + ", ".join(sorted(known))
        raise UnsupportedError(operation, found=repr(name), cause=hint + all_known)


def _refused(name: str, value: object, allowed: str) -> UnsupportedError:
    return UnsupportedError(
        f"read option {name} (MEGATRON_URING_{name.upper()})", expected=allowed, found=repr(value)
    )
