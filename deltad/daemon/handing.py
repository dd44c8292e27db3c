"""Publishing from the memory of a trainer's ranks: their shares come in here and leave as one version.

A share against the newest version is stored as it comes, chunk by chunk, and its record follows once all ranks have
delivered. Whole shares are written into a checkpoint that is published like any other, which compares it with what is
held: so a first version, a new epoch or a trainer that has lost its place needs no path of its own. Owns one invariant:
a step that any rank leaves behind makes no version, and says so to all.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Unpack

import numpy as np
import structlog

from deltad.checkpoint.writer import CheckpointWriter
from deltad.client.handover import HandedOver, HandOver, HandOverReply, JoinReply, JoinRequest
from deltad.client.messages import PublishReply
from deltad.daemon.origin import Handed, Origin, PublishOptions
from deltad.delta.backend import Backend
from deltad.delta.codec import apply_chunks
from deltad.delta.digest import SUM_BYTES, U64, unpack_sums
from deltad.delta.encoding import sha256
from deltad.delta.frame import stored_frames
from deltad.delta.manifest import ChunkRef
from deltad.errors import ConflictError, DeltadError, IntegrityError, LimitError, UnavailableError, UsageError
from deltad.protocol.assembly import Arrangement, Session, Share, Step, Territory
from deltad.protocol.mode import ModeChoice
from deltad.store.disk import remove_tree
from deltad.store.store import Store
from deltad.types import RunId, Version, VersionId

log = structlog.get_logger()

SESSIONS = 8
"""How many sessions of one run are kept: a trainer that starts again leaves one behind."""
STEP_SECONDS = 120.0
"""How long a rank that has delivered its share waits for the others."""


class Publishes(Protocol):
    """What a daemon does with what was handed over."""

    def origin(self, run: RunId) -> Origin:
        """See `Node.origin`."""

    def coding(self, run: RunId) -> ModeChoice:
        """See `Node.coding`."""

    def latest(self, run: RunId) -> Version | None:
        """The newest version of a run."""

    async def publish_checkpoint(
        self, run: RunId, directory: Path, number: int, **how: Unpack[PublishOptions]
    ) -> PublishReply:
        """See `Node.publish_checkpoint`."""

    def refused(self, run: RunId, error: DeltadError) -> None:
        """What ranks handed over made no version."""

    def named(self, run: RunId, text: str) -> Version:
        """A version as people write it."""

    async def publish_handed(
        self, run: RunId, handed: Handed, number: int, **how: Unpack[PublishOptions]
    ) -> PublishReply:
        """Publish what was handed over against the newest version."""


@dataclass(slots=True)
class _Work:
    """A step of a session: where its whole shares go, and what all who delivered wait for.

    `coding` is what the ranks were told.
    """

    run: RunId
    step: Step
    done: asyncio.Future[HandOverReply]
    coding: ModeChoice
    writer: CheckpointWriter | None = None
    takers: int = 0
    """Ranks whose request is still open."""
    until: ExitStack = field(default_factory=ExitStack)


class HandOvers:
    """All sessions of a daemon. Methods belong to the event loop's thread; disk and arithmetic go to others."""

    def __init__(
        self, store: Store, backend: Backend, publishes: Publishes, *, step_seconds: float = STEP_SECONDS
    ) -> None:
        self._store = store
        self._backend = backend
        self._publishes = publishes
        self._step_seconds = step_seconds
        self._sessions: dict[RunId, dict[str, Session]] = {}
        self._works: dict[int, _Work] = {}
        self._told: dict[str, ModeChoice] = {}
        """How the ranks of each session were told to code what they hand over next."""
        self._arrived = asyncio.Condition()

    async def join(self, run: RunId, request: JoinRequest) -> JoinReply:
        """A rank joins; answers once all ranks have. Raises UnavailableError where some are missing after `wait`."""
        self._publishes.origin(run)  # refuses a run that is not published here
        session = self._session(run, request)
        async with self._arrived:
            try:
                session.join(request, limits=self._store.limits)
            except DeltadError as error:
                self._publishes.refused(run, error)
                raise
            finally:
                self._arrived.notify_all()
            wait = min(max(request.wait, 0.0), self._store.limits.long_poll_seconds)
            try:
                async with asyncio.timeout(wait):
                    await self._arrived.wait_for(lambda: session.arrangement is not None or not session.joined)
            except TimeoutError:
                raise UnavailableError(
                    f"session {session.name} of run {run}",
                    expected=f"all {session.world} ranks within {wait:g} s",
                    found=f"missing {session.missing()}",
                ) from None
        if session.arrangement is None:
            raise ConflictError(
                f"session {session.name} of run {run}",
                found="what all ranks declared makes no layout; see their errors",
            )
        return JoinReply(
            layout=session.arrangement.layout.encode(),
            owned=session.arrangement.owned[request.rank],
            latest=self._publishes.latest(run),
            mode=self._told.setdefault(session.name, self._publishes.coding(run)).mode,
        )

    def _session(self, run: RunId, request: JoinRequest) -> Session:
        sessions = self._sessions.setdefault(run, {})
        session = sessions.pop(request.session, None)
        if session is None:
            if not 1 <= request.world <= self._store.limits.ranks:
                raise LimitError(f"session of run {run}", expected=f"1 to {self._store.limits.ranks} ranks")
            session = Session(request.session, request.world)
        sessions[request.session] = session  # the last one is the newest
        while len(sessions) > SESSIONS:
            self._told.pop(oldest := next(iter(sessions)), None)
            del sessions[oldest]
        return session

    async def hand_over(
        self, run: RunId, head: HandOver, chunks: AsyncIterator[bytes], tail: Callable[[], Awaitable[HandedOver]]
    ) -> HandOverReply:
        """Take a rank's share of a step; answers once the version is durable that all ranks' shares make.

        Raises what makes no version of it, to all ranks that have begun the step.
        """
        session = self._sessions.get(run, {}).get(head.session)
        if session is None or session.arrangement is None:
            raise ConflictError(
                f"session {head.session[:80]} of run {run}",
                expected="one that all ranks have joined",
                found="none",
                hint="the daemon has started again since: join again",
            )
        if head.base is not None and (head.resume_from or head.new_epoch):
            raise UsageError(f"step {head.number}", expected="a new epoch to be handed over whole", found="a base")
        try:
            work = self._begin(run, session, head)
        except DeltadError as error:
            # Ranks that are not of one mind make no version: the others need not wait for this one.
            if (step := session.step) is not None and step.head.number == head.number:
                self._fail(session, self._works[id(step)], error, head.rank)
            raise
        work.takers += 1
        try:
            share = await self._take(session, work, head.rank, chunks, tail)
            if session.deliver(work.step, head.rank, share):
                reply = await self._publish(run, session, work)
                work.done.set_result(reply)
            return await self._outcome(session, work)
        except (DeltadError, asyncio.CancelledError, OSError) as error:
            self._fail(session, work, error, head.rank)
            raise
        finally:
            work.takers -= 1
            if work.done.done() and not work.takers:
                self._end(session, work)

    def _begin(self, run: RunId, session: Session, head: HandOver) -> _Work:
        before = session.step
        step = session.begin(head)
        if step is not before:
            if before is not None and (left := self._works.get(id(before))):
                self._fail(session, left, session.given_up(before), head.rank)
            coding = self._told.get(session.name) or self._publishes.coding(run)
            work = _Work(run, step, asyncio.get_running_loop().create_future(), coding)
            work.until.enter_context(
                self._store.leases.work(f"step {head.number} of session {session.name} ({uuid.uuid4().hex[:8]})")
            )
            self._works[id(step)] = work
            if head.base is None:
                work.writer = self._writer(work, self._arrangement(session))
        return self._works[id(step)]

    def _writer(self, work: _Work, arrangement: Arrangement) -> CheckpointWriter:
        directory = self._store.scratch / f"handed-{uuid.uuid4().hex}"
        work.until.callback(remove_tree, directory, self._store.files)
        return work.until.enter_context(CheckpointWriter(directory, arrangement.layout, files=self._store.files))

    async def _take(
        self,
        session: Session,
        work: _Work,
        rank: int,
        chunks: AsyncIterator[bytes],
        tail: Callable[[], Awaitable[HandedOver]],
    ) -> Share:
        arrangement = self._arrangement(session)
        territory = session.territory(rank)
        taken: list[ChunkRef] = []
        sums = np.zeros((len(arrangement.layout.tensors), 2), np.uint64)
        async for data in chunks:
            if work.done.done():
                raise session.given_up(work.step)
            if work.writer is None:
                taken.append(await asyncio.to_thread(self._keep, data, arrangement, territory))
            else:
                await asyncio.to_thread(self._write, data, arrangement, territory, work.writer, sums)
        said = await tail()
        if work.writer is not None:
            expected = np.zeros_like(sums)
            tensors = [rect.tensor for rect in arrangement.shards[rank]]
            if len(said.sums) == SUM_BYTES * len(tensors):
                np.add.at(expected, tensors, unpack_sums(said.sums, len(tensors)))
            if not np.array_equal(expected, sums):
                raise IntegrityError(f"share of rank {rank}", expected="the weights that it summed", found="others")
        return Share(tuple(taken), said)

    def _keep(self, data: bytes, arrangement: Arrangement, territory: Territory) -> ChunkRef:
        tensors = self._check(data, arrangement, territory)
        self._store.put_chunk(data)
        return ChunkRef(sha256(data), len(data), min(tensors), max(tensors))

    def _write(
        self,
        data: bytes,
        arrangement: Arrangement,
        territory: Territory,
        writer: CheckpointWriter,
        sums: U64,
    ) -> None:
        self._check(data, arrangement, territory)
        apply_chunks([data], arrangement.layout, writer, sums, self._backend, limits=self._store.limits)

    def _check(self, data: bytes, arrangement: Arrangement, territory: Territory) -> list[int]:
        tensors: list[int] = []
        for frame in stored_frames(data, arrangement.layout, limits=self._store.limits):
            territory.check(frame.header.rects)
            tensors += (rect.tensor for rect in frame.header.rects)
        if not tensors:
            raise LimitError("chunk", expected="at least one frame", found="none")
        return tensors

    async def _publish(self, run: RunId, session: Session, work: _Work) -> HandOverReply:
        head = work.step.head
        how: PublishOptions = {"identity": head.identity, "epoch": head.epoch, "new_epoch": head.new_epoch}
        if work.writer is not None:
            if head.resume_from:
                how["begin_from"] = VersionId(run, self._publishes.named(run, head.resume_from))
            await asyncio.to_thread(_finish, work.writer, self._arrangement(session))
            reply = await self._publishes.publish_checkpoint(run, work.writer.directory, head.number, **how)
        else:
            how["coding"] = work.coding
            reply = await self._publishes.publish_handed(run, self._handed(session, work), head.number, **how)
        told = self._told[session.name] = self._publishes.coding(run)
        return HandOverReply(reply.version, reply.already, told.mode)

    def _handed(self, session: Session, work: _Work) -> Handed:
        arrangement = self._arrangement(session)
        shares = [work.step.shares[rank] for rank in range(session.world)]
        sums = np.zeros((len(arrangement.layout.tensors), 2), np.uint64)
        base_sums = np.zeros_like(sums)
        for share, shards in zip(shares, arrangement.shards, strict=True):
            tensors = [rect.tensor for rect in shards]
            np.add.at(sums, tensors, unpack_sums(share.said.sums, len(tensors)))
            np.add.at(base_sums, tensors, unpack_sums(share.said.base_sums, len(tensors)))
        base = work.step.head.base
        if base is None:
            raise ValueError("what was handed over whole has no base")
        return Handed(
            layout=arrangement.layout,
            files=arrangement.files,
            base=base,
            chunks=tuple(chunk for share in shares for chunk in share.chunks),
            sums=sums,
            base_sums=base_sums,
            coders=tuple(sorted({coder for share in shares for coder in share.said.coders})),
            changed=sum(share.said.changed for share in shares),
        )

    async def _outcome(self, session: Session, work: _Work) -> HandOverReply:
        try:
            async with asyncio.timeout(self._step_seconds):
                return await asyncio.shield(work.done)
        except TimeoutError:
            raise UnavailableError(
                f"step {work.step.head.number} of session {session.name}",
                expected=f"the shares of all {session.world} ranks within {self._step_seconds:g} s",
                found=f"none of {session.missing()}",
                hint="this step makes no version; the next one is compared with the same base",
            ) from None

    def _fail(self, session: Session, work: _Work, error: BaseException, rank: int) -> None:
        """Tell all who wait for this step that it makes no version."""
        session.give_up(work.step)
        if not work.done.done():
            said = (
                error
                if isinstance(error, DeltadError)
                else UnavailableError(
                    f"step {work.step.head.number} of session {session.name}", found=f"rank {rank} broke off: {error!r}"
                )
            )
            work.done.set_exception(said)
            work.done.exception()  # it may be that nobody else waits
            self._publishes.refused(work.run, said)
            log.warning("handover_failed", session=session.name, step=work.step.head.number, rank=rank, error=str(said))

    def _end(self, session: Session, work: _Work) -> None:
        session.give_up(work.step)
        del self._works[id(work.step)]
        work.until.close()

    @staticmethod
    def _arrangement(session: Session) -> Arrangement:
        if session.arrangement is None:
            raise ConflictError(f"session {session.name}", expected="all ranks joined")
        return session.arrangement


def _finish(writer: CheckpointWriter, arrangement: Arrangement) -> None:
    for name, data in arrangement.files.items():
        writer.write_file(name, data)
    writer.finish()
