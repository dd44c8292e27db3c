"""Lets decoding steps pass one at a time, or holds them while weights are written.

Owns one invariant: inside `hold` no step runs, and none starts. A holder goes before waiting steps, so
a pause lasts as long as the step that is running plus what the holder does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltad.errors import UnavailableError


class Gate:
    """All methods may be called from any thread; `hold` by one at a time."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._busy = False
        self._holders = 0
        self._fenced = ""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step alone. Raises UnavailableError if fenced, also while it waits."""
        with self._turn:
            self._turn.wait_for(lambda: self._fenced or not (self._busy or self._holders))
            if self._fenced:
                raise UnavailableError("replica", found=f"fenced: {self._fenced}", hint="sample elsewhere, or wait")
            self._busy = True
        with self._ending():
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run what is no step, but may not run beside one; also while fenced."""
        with self._turn:
            self._turn.wait_for(lambda: not (self._busy or self._holders))
            self._busy = True
        with self._ending():
            yield

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the running step, and keep all others out until the end."""
        with self._turn:
            self._holders += 1
            self._turn.wait_for(lambda: not self._busy)
            self._busy = True
        try:
            yield
        finally:
            with self._turn:
                self._busy = False
                self._holders -= 1
                self._turn.notify_all()

    def fence(self, reason: str) -> None:
        """Refuse every step from now on."""
        with self._turn:
            self._fenced = reason or "no reason given"
            self._turn.notify_all()

    def unfence(self) -> None:
        """Let steps pass again."""
        with self._turn:
            self._fenced = ""
            self._turn.notify_all()
