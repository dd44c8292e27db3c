"""One prompt's answer: sampled by replicas, carried over their swaps and deaths.

Owns the rule of repetition: a token that was given away is never given again. A replica that is cut goes on elsewhere,
after the tokens that came; one that breaks off by itself may have given wrong tokens, so its answer is begun anew
where nothing was given away, and fails where something was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from deltad.errors import DeltadError
from rollout_plugin.gateway.course import Course, Piece
from rollout_plugin.gateway.fleet import Fleet
from rollout_plugin.gateway.metrics import GatewayMetrics
from rollout_plugin.gateway.roster import Member
from rollout_plugin.gateway.upstream import FencedError, Replicas
from rollout_plugin.gateway.wanted import OnSwap, Wanted
from rollout_plugin.messages import GenerateRequest

T = TypeVar("T")

_AGAIN = 0.25
"""Seconds before a replica that failed is tried again, where there is no other."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be sampled. `samples` are its places in the course; their seeds follow from `seed`."""

    token_ids: tuple[int, ...]
    samples: range
    temperature: float
    seed: int
    wanted: Wanted


class Answer:
    """Iterate over `pieces` once. `patience`: seconds that an answer which was begun waits for a replica."""

    def __init__(
        self,
        prompt: Prompt,
        course: Course,
        *,
        fleet: Fleet,
        replicas: Replicas,
        metrics: GatewayMetrics,
        patience: float,
    ) -> None:
        self.prompt = prompt
        self.course = course
        self.replica = ""
        self._fleet = fleet
        self._replicas = replicas
        self._metrics = metrics
        self._patience = patience

    def pieces(self, first: Member) -> AsyncGenerator[list[Piece], None]:
        """All pieces, those of a sample in order; `first` was chosen for it. Raises what no other replica can mend."""
        samples = self.prompt.samples
        if self.prompt.wanted.on_swap is OnSwap.RESUME:
            return merged([self._leg([sample], first) for sample in samples])
        return self._leg(samples, first)

    async def _leg(
        self, samples: Sequence[int], member: Member | None, failed: frozenset[str] = frozenset()
    ) -> AsyncGenerator[list[Piece], None]:
        """Some samples to their end. Several are sampled together until something happens, and then each alone."""
        trials = _Trials(failed, self._patience)
        while True:
            try:
                member = member or await self._next(samples, trials)
                async with aclosing(self._sampled(member, samples)) as batches:
                    async for pieces in batches:
                        trials.forget()
                        yield pieces
            except FencedError as error:
                if self.course.given_away:
                    raise
                if pieces := self.course.forget(samples):
                    yield pieces
                trials.add(member, error)
                self._metrics.resumed.labels("fenced").inc()
            except DeltadError as error:
                if not error.retryable:
                    raise
                trials.add(member, error)
                self._metrics.resumed.labels("failed").inc()
            else:
                if any(self.course.tracks[sample].interrupted for sample in samples):
                    self._metrics.resumed.labels("swapped").inc()
            member = None
            samples = self.course.open(samples)
            if not samples:
                return
            if len(samples) > 1 and any(self.course.tracks[sample].token_ids for sample in samples):
                legs = [self._leg([sample], None, frozenset(trials.failed)) for sample in samples]
                async with aclosing(merged(legs)) as rest:
                    async for batch in rest:
                        yield batch
                return

    async def _next(self, samples: Sequence[int], trials: _Trials) -> Member:
        """Who goes on. Raises what `Fleet.refusal` says once a version was waited for as long as may be."""
        wanted, track = self.prompt.wanted, self.course.tracks[samples[0]]
        prompt = (*self.prompt.token_ids, *track.token_ids)
        now = asyncio.get_running_loop().time()
        if self._fleet.roster.fit(wanted, trials.failed):
            return await self._fleet.choose(wanted, prompt, without=trials.failed, until=now)
        if trials.failed:
            await self._fleet.changed(_AGAIN)  # those that failed are all there is: they may recover
        begun = bool(track.token_ids) or bool(trials.failed)
        return await self._fleet.choose(wanted, prompt, until=now + (self._patience if begun else wanted.wait))

    async def _sampled(self, member: Member, samples: Sequence[int]) -> AsyncGenerator[list[Piece], None]:
        """What one replica adds to these samples."""
        self.replica = member.name
        prompt, course = self.prompt, self.course
        come = course.tracks[samples[0]].token_ids
        request = GenerateRequest(
            prompt_ids=[*prompt.token_ids, *come],
            n=len(samples),
            max_new_tokens=course.left(samples[0]),
            temperature=prompt.temperature,
            seed=(prompt.seed + samples[0] - prompt.samples[0] + len(come)) & (2**63 - 1),
            min_version=str(course.least) if course.least is not None and prompt.wanted.exact is None else "",
            wait=min(self._patience, 60.0),
            stream=True,
        )
        with self._fleet.load(member):
            async with aclosing(self._replicas.stream(member.address, request)) as batches:
                async for lines in batches:
                    pieces: list[Piece] = []
                    for line in lines:
                        pieces += course.take(line, samples)
                    if pieces:
                        yield pieces
                    if course.is_over(samples) and lines[-1].ended is None:
                        return  # early: the replica learns of it by the connection, which is closed


class _Trials:
    """Replicas that failed since the last token, and for how long that may go on."""

    def __init__(self, failed: Collection[str], patience: float) -> None:
        self.failed = set(failed)
        self._patience = patience
        self._since: float | None = None

    def add(self, member: Member | None, error: DeltadError) -> None:
        """One failed; raises its error where it is none of a replica, or where patience is at its end."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        if member is None or now - self._since > self._patience:
            raise error
        self.failed.add(member.name)

    def forget(self) -> None:
        """A token came."""
        self.failed.clear()
        self._since = None


def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What all of these give, as it comes. The first error of one ends all."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[T | None] = asyncio.Queue(64)

    async def drain(source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source) as batches:
            async for batch in batches:
                await queue.put(batch)

    async def drain_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    group.create_task(drain(source))
        finally:
            await queue.put(None)

    work = asyncio.create_task(drain_all())
    try:
        while (got := await queue.get()) is not None:
            yield got
        try:
            await work
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    finally:
        work.cancel()
        await asyncio.wait([work])
