"""Who reads what, for how much longer; and what work is under way. All on a monotonic clock, all in memory.

A lease that is not renewed ends by itself. A restart forgets all of them, so for as long as a lease may last
after a start no version is let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deltad.types import RunId, Version

LEASE_SECONDS = 60.0
"""How long a lease lasts unless it is renewed."""
READ_SECONDS = 24 * 3600.0
"""How long one read of a version may take, at most."""


@dataclass(frozen=True, slots=True)
class _Lease:
    run: RunId
    version: Version
    ends: float


class Leases:
    """One lease a holder. Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._works: dict[str, float] = {}
        self.opened = clock()

    def renew(self, holder: str, run: RunId, version: Version, seconds: float = LEASE_SECONDS) -> None:
        """`holder` needs this version, and the way from it to the newest, for `seconds` from now; nothing else."""
        with self._lock:
            self._leases[holder] = _Lease(run, version, self._clock() + seconds)

    def release(self, holder: str) -> None:
        """The holder needs nothing any more."""
        with self._lock:
            self._leases.pop(holder, None)

    def of(self, run: RunId) -> dict[Version, str]:
        """The versions of a run that are leased, each with its holders and the time that is left, in words."""
        now = self._clock()
        found: dict[Version, list[str]] = {}
        with self._lock:
            self._leases = {holder: lease for holder, lease in self._leases.items() if lease.ends > now}
            for holder, lease in sorted(self._leases.items()):
                if lease.run == run:
                    found.setdefault(lease.version, []).append(f"{holder} for {lease.ends - now:.0f} s")
        return {version: ", ".join(holders) for version, holders in found.items()}

    def settling(self) -> float:
        """For how many seconds a reader from before the start may still come back for its version."""
        return max(0.0, self.opened + LEASE_SECONDS - self._clock())

    def set_work(self, name: str, *, running: bool) -> None:
        """Work that fills the store begins, or has ended: what it asks for in between is in use."""
        with self._lock:
            if running:
                self._works.setdefault(name, self._clock())
            else:
                self._works.pop(name, None)

    @contextmanager
    def work(self, name: str) -> Iterator[None]:
        """Work that lasts as long as this context."""
        self.set_work(name, running=True)
        try:
            yield
        finally:
            self.set_work(name, running=False)

    def oldest_work(self) -> tuple[float, str] | None:
        """When the longest-running work began, and its name."""
        with self._lock:
            return min(((began, name) for name, began in self._works.items()), default=None)
