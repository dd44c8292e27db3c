"""Listening for the heartbeat of one run at one upstream.

It may not decide what silence means; that is `deltad.protocol.heartbeat`. Owns one invariant: only a heartbeat that a
trusted publisher signed is passed on or counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deltad.delta.heartbeat import Heartbeat, decode_heartbeat
from deltad.errors import DeltadError, IntegrityError, NotFoundError
from deltad.limits import Limits
from deltad.protocol.heartbeat import Pulse
from deltad.protocol.trust import TrustList
from deltad.relay.client import RelayClient
from deltad.relay.run_pull import Peer
from deltad.store.runs import RunStore


class HeartbeatPull:
    """One run. `on_heard` is told of each heartbeat that is newer than all before it."""

    def __init__(
        self,
        records: RunStore,
        client: RelayClient,
        peer: Peer,
        *,
        trust: TrustList,
        limits: Limits,
        every: float,
        on_heard: Callable[[Heartbeat], None],
    ) -> None:
        self._records = records
        self._client = client
        self._peer = peer
        self._trust = trust
        self._limits = limits
        self._every = every
        self._on_heard = on_heard
        self._pulse = Pulse(_now())
        self._fault: DeltadError | None = None

    async def follow(self) -> None:
        """Ask again and again, for ever."""
        while True:
            await self._peer.rested()
            if self._trust.demands(self._records.run):
                await self._ask()
            await asyncio.sleep(self._every)

    def trouble(self) -> str:
        """What speaks against the upstream, in words; empty if nothing does, or nobody is trusted for the run."""
        if not self._trust.demands(self._records.run):
            return ""
        if self._fault is not None:
            return str(self._fault)
        latest = self._records.latest()
        return self._pulse.trouble(None if latest is None else latest.version, _now())

    async def _ask(self) -> None:
        try:
            beat = decode_heartbeat(await self._client.heartbeat(self._records.run), limits=self._limits)
            if beat.run != self._records.run:
                raise IntegrityError("heartbeat", expected=f"one of {self._records.run}", found=f"one of {beat.run}")
            self._trust.check_heartbeat(beat)
            if self._pulse.hear(beat, _now()):
                self._on_heard(beat)
            self._fault = None
        except NotFoundError:
            self._fault = None  # silence: the pulse knows for how long
        except DeltadError as error:
            self._fault = error if not error.retryable else None


def _now() -> float:
    return asyncio.get_running_loop().time()
