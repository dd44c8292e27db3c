"""What the store takes, known at every look without walking the disk for it.

Owns one invariant: what is told is what was last measured and what has come since; measuring, which walks all of the
store, takes a small share of the time.
"""

from __future__ import annotations

import time

from deltad.store.store import Store

MEASURE_SECONDS = 30.0
"""How often the store is measured where nothing is known to have changed."""
MEASURE_SHARE = 0.02
"""How much of the time may go into that."""


class StoreSize:
    """The size of one store, on the monotonic clock. Told and asked on one thread; `measure` may run on another."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due = 0.0
        self._due_if_changed = 0.0
        self._changed = False
        self.bytes = 0

    def came(self, count: int) -> None:
        """About `count` bytes have come."""
        self.bytes += count
        self._changed = True

    def went(self) -> None:
        """Something has gone."""
        self._changed = True

    def is_due(self, now: float) -> bool:
        """Whether to measure now."""
        return now >= (self._due_if_changed if self._changed else self._due)

    def measure(self) -> None:
        """Walk the store. Blocks."""
        began = time.monotonic()
        self._changed = False
        self.bytes = self._store.used_bytes()
        rests = (time.monotonic() - began) / MEASURE_SHARE
        self._due, self._due_if_changed = began + max(MEASURE_SECONDS, rests), began + rests
