"""Save roots: which of the checkpoints under one is the newest.

Guarantees
----------
- Only reads.
- What the tracker names counts if it is committed; a tracker that is empty, stale or ahead of the
  data is said so and not followed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator

from megatron_uring.errors import CheckpointError, NotACheckpointError
from megatron_uring.layout import INDEX_NAME, TRACKER_NAME
from megatron_uring.regular import open_regular

_log = logging.getLogger(__name__)
_TRACKER_BYTES = 64  # more than any number of an iteration has digits
_ITERATION_DIRECTORY = re.compile(r"^iter_(\d{7,})$")


def resolve_latest(root: str) -> str:
    """Directory of the newest committed checkpoint under a save root, or `root` if it is one.

    The tracker file is believed if what it names is committed; else (empty, stale, ahead of the
    data) the highest committed iteration counts, and a warning is logged. A damaged index counts
    as committed: reading it says what is wrong, and nothing older is taken in its place unasked.

    Raises
    ------
    NotACheckpointError
        If there is none.
    """
    if os.path.lexists(os.path.join(root, INDEX_NAME)):
        return root
    named = tracked_iteration(root)
    candidates = sorted(iterations(root), reverse=True)
    if named is not None:
        candidates.sort(key=lambda found: found[0] != named)
    for _, directory in candidates:
        if os.path.lexists(os.path.join(directory, INDEX_NAME)):
            problem = tracker_problem(root, directory)
            if problem is not None:
                _log.warning("%s", problem)
            return directory
    found = f"{len(candidates)} iter_* directories, none committed"
    if not os.path.isdir(root):
        found = "a file" if os.path.exists(root) else "no such directory"
    raise NotACheckpointError(
        "resolve newest checkpoint",
        path=root,
        expected=f"{INDEX_NAME} in it or in one of its iter_* directories",
        found=found,
    )


def tracker_problem(root: str, directory: str) -> str | None:
    """What is wrong with the tracker of `root` if it does not name `directory`; else None."""
    named = tracked_iteration(root)
    taken = _ITERATION_DIRECTORY.match(os.path.basename(directory))
    if named is None or taken is None or int(taken.group(1)) == named:
        return None
    return (
        f"resolve newest checkpoint: {os.path.join(root, TRACKER_NAME)}: names iteration {named}, "
        f"which is not committed, the newest that is: {int(taken.group(1))}"
    )


def tracked_iteration(root: str) -> int | None:
    """The iteration that the tracker of `root` names; None without one that can be read."""
    try:
        with open_regular(os.path.join(root, TRACKER_NAME), "read tracker") as file:
            return int(file.read(_TRACKER_BYTES).strip())
    except (OSError, ValueError, CheckpointError):
        return None


def iterations(root: str) -> Iterator[tuple[int, str]]:
    """Iteration and directory of each ``iter_*`` under `root`, committed or not, in no order."""
    try:
        names = os.listdir(root)
    except OSError:
        return
    for name in names:
        match = _ITERATION_DIRECTORY.match(name)
        if match:
            yield int(match.group(1)), os.path.join(root, name)
