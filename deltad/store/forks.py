"""Which versions are the bases of other runs' versions, for as long as those are held. In memory.

A run keeps what forks were made of, and must not look into other runs while it decides: it looks here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltad.delta.record import VersionRecord
from deltad.types import RunId, Version, VersionId


class Forks:
    """The forks of one store. Methods may be called from any thread and wait for nobody."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: dict[VersionId, frozenset[VersionId]] = {}

    def note(self, fork: VersionRecord) -> None:
        """A version is held, or is about to be."""
        if bases := fork.bases_elsewhere:
            with self._lock:
                self._bases[fork.id] = bases

    def forget(self, fork: VersionRecord) -> None:
        """A version is not held, for good."""
        with self._lock:
            self._bases.pop(fork.id, None)

    @contextmanager
    def coming(self, fork: VersionRecord) -> Iterator[None]:
        """A version is to be held, unless what is done meanwhile fails.

        From the beginning on its bases stay, if they are held then.
        """
        self.note(fork)
        try:
            yield
        except BaseException:
            self.forget(fork)
            raise

    def of(self, run: RunId) -> dict[Version, str]:
        """The versions of a run that others were made from, each with what it is needed for, in words."""
        needed: dict[Version, list[str]] = {}
        with self._lock:
            for fork, bases in sorted(self._bases.items()):
                for base in bases:
                    if base.run == run:
                        needed.setdefault(base.version, []).append(str(fork))
        return {version: f"the base of {', '.join(forks)}" for version, forks in needed.items()}
