"""Ways back to an older version: made when the first replica asks, while it waits for a bounded time.

An inverse is small and made in a blink, where loading a whole version takes a replica out of service. Owns the
invariant that nobody waits for longer than `INVERSE_SECONDS`: from then on, or where none can be made, there is none.
Belongs to the event loop's thread; the work is done in another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import structlog

from deltad.errors import DeltadError
from deltad.store.derive import Deriver
from deltad.types import Version

log = structlog.get_logger()

INVERSE_SECONDS = 20.0
"""What a replica waits for an inverse, at most, before it loads a whole version, which takes about as long."""
_REMEMBERED = 1000
"""How many ways that could not be made are remembered; one that is forgotten is tried once more."""

_Way: TypeAlias = tuple[Version, Version]


class Inverses:
    """The inverses of one variant. `on_change` is called when asking again may be answered otherwise."""

    def __init__(self, deriver: Deriver, on_change: Callable[[], None], *, seconds: float = INVERSE_SECONDS) -> None:
        self._deriver = deriver
        self._on_change = on_change
        self._seconds = seconds
        self._making: dict[_Way, asyncio.Task[None]] = {}
        self._given_up: dict[_Way, None] = {}

    def coming(self, served: Version, target: Version) -> bool:
        """Whether an inverse from `served` to `target`, which is older, is worth waiting for; begins to make it."""
        way = (served, target)
        if way in self._given_up:
            return False
        if way not in self._making:
            self._making[way] = asyncio.create_task(self._make(way))
        return True

    async def _make(self, way: _Way) -> None:
        served, target = way
        deed = asyncio.create_task(asyncio.to_thread(self._deriver.make_edge, served, target))
        try:
            made = await asyncio.wait_for(asyncio.shield(deed), self._seconds)
            log.info("inverse_made", base=str(served), target=str(target), how=made.how, bytes=made.edge.total_bytes)
        except (DeltadError, TimeoutError) as error:
            # One that comes late is in the catalogue all the same, and found there.
            log.warning("inverse_given_up", base=str(served), target=str(target), error=str(error) or "it takes long")
            self._given_up[way] = None
            while len(self._given_up) > _REMEMBERED:
                del self._given_up[next(iter(self._given_up))]
        finally:
            del self._making[way]
            self._on_change()
