"""Hearing from one upstream what the fleets of one run should serve, and keeping it.

It may not decide whom a statement concerns. Owns one invariant: what the upstream says is kept whole and durable
before anybody is told of it, and what is malformed changes nothing and is named.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from deltad.errors import ConfigError, DeltadError, DeniedError, NotFoundError, StoreError, UnavailableError
from deltad.protocol.backoff import Backoff
from deltad.protocol.pull import PullPolicy
from deltad.relay.run_pull import Peer
from deltad.relay.source import Source
from deltad.store.runs import RunStore

log = structlog.get_logger()


class TargetPull:
    """One run's target at one upstream. `on_moved` is called in the event loop after each change that is durable."""

    def __init__(
        self,
        records: RunStore,
        client: Source,
        peer: Peer,
        *,
        on_moved: Callable[[], None],
        policy: PullPolicy,
        poll_seconds: float,
        rng: random.Random,
    ) -> None:
        self.problem: DeltadError | None = None
        """Why the last statement was not kept; None once one was, or there is none."""
        self._records = records
        self._client = client
        self._peer = peer
        self._on_moved = on_moved
        self._poll_seconds = poll_seconds
        self._backoff = Backoff(policy.first_delay, policy.longest_delay, rng)

    async def follow(self) -> None:
        """Wait for statements with a higher number than is known here, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._peer.rested()
            started = loop.time()
            try:
                if await self._ask():
                    continue
            except NotFoundError:
                self.problem = None  # no such run yet, or an upstream that does not speak of targets
                self._peer.note_success()
            except (UnavailableError, DeniedError, ConfigError) as error:
                self._peer.note_failure(error)  # nothing was said
            except DeltadError as error:
                self._note(error)
                if not isinstance(error, StoreError):
                    self._peer.note_failure(error)
            if loop.time() - started >= self._poll_seconds / 2:
                self._backoff.succeeded()
            elif not self._peer.link.resting(loop.time()):
                await asyncio.sleep(self._backoff.failed(loop.time()) - loop.time())

    async def _ask(self) -> bool:
        """Whether the target has moved."""
        run, known = self._records.run, self._records.targets().sequence
        said = await self._client.target(run, after=known, wait=self._poll_seconds)
        self._peer.note_success()
        moved = bool(said) and await asyncio.to_thread(self._records.move_target, lambda now: now.hear(said))
        self.problem = None
        if moved:
            self._backoff.succeeded()
            log.info("target_heard", run=run, upstream=self._client.url, sequence=said[-1].sequence)
            self._on_moved()
        return moved

    def _note(self, error: DeltadError) -> None:
        if str(error) != str(self.problem):
            log.warning("target_not_kept", run=self._records.run, upstream=self._client.url, error=str(error))
        self.problem = error
