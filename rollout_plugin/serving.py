"""What an endpoint may serve at this moment: written by the replica loop, read by request threads.

Owns two invariants: nothing is served before the first version is verified or while the replica is
fenced; and every answer that a version gave before it was verified can be named, should it fail, or is
not given at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from deltad.errors import DeltadError, ReplicaError, UnavailableError
from deltad.types import Version
from rollout_plugin.engines import Engine

_SUSPECTS = 10_000


class Serving:
    """All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        self._fenced = ""
        self._fences = 0
        self._unproven: Version | None = None
        self._coming: Version | None = None
        self._suspects: list[str] = []

    # The replica loop's side.

    def expect(self, version: Version | None) -> None:
        """This version is on its way (None: nothing is)."""
        with self._changed:
            self._coming = version

    def doubt(self, version: Version | None) -> None:
        """Remember all answers that this version has a share in, until it is verified; wakes who waits for it.

        Called before its first step and, to wake, after its commit; with None where it was rolled back.
        """
        with self._changed:
            self._unproven = version
            self._changed.notify_all()

    def verified(self, engine: Engine) -> None:
        """The engine's weights were read back and are right: serve."""
        with self._changed:
            self._engine, self._fenced = engine, ""
            self._unproven = self._coming = None
            self._suspects.clear()
            self._changed.notify_all()

    def fence(self, reason: str) -> tuple[str, ...]:
        """Serve nothing from here on. Returns the ids of answers that weights gave which were never verified."""
        with self._changed:
            suspects = tuple(self._suspects)
            self._fenced = reason or "no reason given"
            self._fences += 1
            self._unproven = self._coming = None
            self._suspects.clear()
            self._changed.notify_all()
            return suspects

    # The endpoint's side.

    def engine(self, least: Version | None = None, wait: float = 0.0) -> Engine:
        """The engine, once it has `least` or newer. Waits up to `wait` seconds for that, or for any.

        Raises UnavailableError where nothing is served, and a retryable ReplicaError where it is older.
        """
        deadline = time.monotonic() + wait
        with self._changed:
            while True:
                if self._fenced:
                    raise _refused(self._fenced)
                if self._engine is not None and (least is None or self._engine.version >= least):
                    return self._engine
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise self._too_old(least)

    def _too_old(self, least: Version | None) -> DeltadError:
        if self._engine is None:
            return UnavailableError("replica", found="no version has been verified yet", hint="try again")
        coming = f"{self._coming} is coming" if self._coming else "nothing newer is coming yet"
        error = ReplicaError(
            "replica", expected=f"{least} or newer", found=f"{self._engine.version}", hint=f"{coming}; try again"
        )
        error.retryable = True
        return error

    @property
    def fences(self) -> int:
        """How often it was fenced until now."""
        with self._changed:
            return self._fences

    def note(self, answer: str, versions: Collection[Version], fences: int) -> None:
        """Remember an answer if a version had a share in it that is not verified.

        `fences`: those before the answer was begun. Raises UnavailableError if there was one since: the list
        of what failed is closed, and this answer may belong on it.
        """
        with self._changed:
            if self._fences != fences:
                raise _refused(self._fenced or "while this was sampled")
            if self._unproven in versions and len(self._suspects) < _SUSPECTS:
                self._suspects.append(answer)

    def view(self) -> tuple[Version | None, bool, Version | None]:
        """The version served, whether it is verified, and the one that is coming."""
        with self._changed:
            served = self._engine.version if self._engine and not self._fenced else None
            return served, served is not None and self._unproven is None, self._coming


def _refused(reason: str) -> UnavailableError:
    return UnavailableError("replica", found=f"fenced: {reason}", hint="sample elsewhere, or wait")
