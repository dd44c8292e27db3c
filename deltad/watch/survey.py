"""One look at a watched directory: every checkpoint in it, as it is now. Reads names and file statuses.

Decides nothing: what a sighting means is for `deltad.watch.settle`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from deltad.checkpoint.files import fingerprint, is_weights, list_names, unreadable
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.watch.pattern import Pattern
from deltad.watch.settle import Sighting

TRAINER_STATE = "trainer_state.json"


def survey(directory: Path, pattern: Pattern, *, limits: Limits = DEFAULT_LIMITS) -> list[Sighting] | None:
    """All checkpoints of `pattern` below `directory`; None where there is no such directory.

    Raises CheckpointError or LimitError if it cannot be listed.
    """
    try:
        if not directory.is_dir():
            return None
        if pattern.numbered:
            return list(_numbered(directory, pattern, limits))
        return [_overwritten(directory, pattern.before, limits)] if (directory / pattern.before).is_dir() else []
    except OSError as error:
        raise unreadable(directory, error) from error


def _numbered(directory: Path, pattern: Pattern, limits: Limits) -> Iterator[Sighting]:
    for name in list_names(directory / pattern.before, limits=limits):
        number = pattern.number(name)
        if number is None:
            continue
        path = pattern.path(name)
        if (directory / path).is_dir():
            yield Sighting(path, number, fingerprint(directory / path, limits=limits))


def _overwritten(directory: Path, path: str, limits: Limits) -> Sighting:
    """The directory that is overwritten. Its number is the trainer's step, where the trainer writes that down.

    A trainer writes its state after the weights, so a state that is older than they are is the one of the
    save before: the number to these weights is still to come.
    """
    home = directory / path
    state = home / TRAINER_STATE
    weights = fingerprint(home, limits=limits)
    try:
        written = os.stat(state).st_mtime_ns
    except FileNotFoundError:
        return Sighting(path, None, weights)
    newest = max((stamp.mtime_ns for stamp in weights.files if is_weights(Path(stamp.name).name)), default=0)
    if written < newest:
        return Sighting(path, None, weights, f"{TRAINER_STATE} is older than the weights: the save is not finished")
    step = _global_step(state, limits)
    if step is None:
        return Sighting(path, None, weights, f"{TRAINER_STATE} has no global_step, or is not written to its end")
    return Sighting(path, step, weights)


def _global_step(path: Path, limits: Limits) -> int | None:
    with suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            state = json.loads(file.read(limits.file_bytes))
        step = state.get("global_step") if isinstance(state, dict) else None
        if type(step) is int and 0 <= step < 10**15:
            return step
    return None
