"""Requests take turns, first come first served, as `Admission` allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rollout_plugin.gateway.admission import Admission, BusyError


class Turns:
    """`sequence` says how many versions the run has now. All in one event loop."""

    def __init__(self, admission: Admission, sequence: Callable[[], int]) -> None:
        self.admission = admission
        self._sequence = sequence
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, rollouts: int, seconds: float) -> None:
        """Wait for a turn. Raises BusyError after so many seconds. `give_back` follows, once."""
        if not self._queue and not self.admission.why_not(self._sequence()):
            self.admission.begin(rollouts)
            return
        turn = asyncio.get_running_loop().create_future()
        place = (turn, rollouts)
        self._queue.append(place)
        try:
            await asyncio.wait([turn], timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(rollouts, answered=False)
            raise
        finally:
            if not turn.done():
                self._queue.remove(place)
        if not turn.done():
            why = self.admission.why_not(self._sequence()) or "others came first"
            raise BusyError("gateway", expected="a turn", found=why, hint="try again later")

    def give_back(self, rollouts: int, *, answered: bool) -> None:
        """The turn is over."""
        self.admission.end(rollouts, answered=answered)
        self.grant()

    def grant(self) -> None:
        """Give turns to those that wait, as many as there are."""
        while self._queue and not self.admission.why_not(self._sequence()):
            turn, rollouts = self._queue.popleft()
            self.admission.begin(rollouts)
            turn.set_result(None)
