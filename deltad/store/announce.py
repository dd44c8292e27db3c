"""Waking whoever waits for something new, without losing a wake-up.

One `Announcements` serves a whole daemon. Waiters state what they wait for as a question over durable
state, asked again after every announcement; so a lost or merged announcement only delays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Announcements:
    """All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Event] = set()

    def announce(self) -> None:
        """Something may have changed: every waiter asks its question again."""
        for event in self._waiters:
            event.set()

    async def wait_until(self, answer: Callable[[], T | None], timeout: float) -> T | None:
        """The first answer that is not None, or None after `timeout` seconds."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            async with asyncio.timeout(timeout):
                while (found := answer()) is None:
                    await event.wait()
                    event.clear()
                return found
        except TimeoutError:
            return None
        finally:
            self._waiters.discard(event)
