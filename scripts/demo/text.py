"""A byte-level data set of real text that every machine already has.

Guarantees:

- A batch is a pure function of (text, seed, iteration, data-parallel rank): a resumed run sees the
  batches that an uninterrupted one would have seen, with no reader state to save.
- The held-out batch is the same on every rank and at every layout, and shares no byte of the text
  with a training batch.
- Nothing is downloaded. The text is Debian's licenses; where they are missing, documentation that
  ships with Python.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch

LICENSES = Path("/usr/share/common-licenses")
VOCABULARY_SIZE = 256
HELD_OUT_FRACTION = 0.05


def find_text() -> bytes:
    """Read the text: the licenses in alphabetical order, or what Python ships.

    Returns
    -------
    bytes
        All files, one after the other.
    """
    # Debian links GPL to GPL-3 and so on: following the links would repeat texts.
    licenses = [path for path in _sorted_files(LICENSES, "*") if not path.is_symlink()]
    if licenses:
        return _read(licenses)
    library = Path(sysconfig.get_paths()["stdlib"])
    shipped = [
        path
        for path in (library / "LICENSE.txt", library / "pydoc_data" / "topics.py")
        if path.is_file()
    ]
    return _read(shipped or _sorted_files(library, "*.py"))


class Text:
    """Batches of next-byte prediction.

    Parameters
    ----------
    sequence_length : int
        Bytes in one sample.
    batch_size : int
        Samples in one batch of one data-parallel rank.
    seed : int
        Chooses the samples.
    content : bytes, optional
        The text; `find_text()` if not given.
    """

    def __init__(
        self, sequence_length: int, batch_size: int, seed: int, content: bytes | None = None
    ):
        content = find_text() if content is None else content
        held_out_bytes = max(int(len(content) * HELD_OUT_FRACTION), sequence_length + 1)
        if len(content) < held_out_bytes + sequence_length + 1:
            raise ValueError(
                f"a text of {len(content)} bytes is too short for sequences of {sequence_length}"
            )
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._training = torch.frombuffer(bytearray(content[:-held_out_bytes]), dtype=torch.uint8)
        self._held_out = torch.frombuffer(bytearray(content[-held_out_bytes:]), dtype=torch.uint8)
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, iteration: int, data_rank: int) -> dict[str, torch.Tensor]:
        """Return the training batch of one iteration on one data-parallel rank.

        Returns
        -------
        dict
            `tokens` and `labels`, int64, both of shape (batch size, sequence length).
        """
        name = f"train/{self._seed}/{iteration}/{data_rank}"
        return self._draw(self._training, name, self._batch_size)

    def held_out_batch(self, size: int) -> dict[str, torch.Tensor]:
        """Return the one batch that training never sees, `size` samples large."""
        return self._draw(self._held_out, "held-out", size)

    def _draw(self, source: torch.Tensor, name: str, size: int) -> dict[str, torch.Tensor]:
        starts = source.numel() - self._sequence_length
        rows = []
        for row in range(size):
            # A hash, not a random generator, so that no library's version changes the batches.
            number = int.from_bytes(hashlib.sha256(f"{name}/{row}".encode()).digest()[:8], "little")
            start = number % starts
            rows.append(source[start : start + self._sequence_length + 1])
        sample = torch.stack(rows).long()
        return {"tokens": sample[:, :-1].contiguous(), "labels": sample[:, 1:].contiguous()}


def _sorted_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def _read(paths: list[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in paths)
