"""Carrying loads out: from the bucket into the run, and then waiting until the fleet has read it back.

One `HotLoads` for each deployment. Owns two invariants: what a caller is told of a load is durable; and a load is
completed only by replicas that are verified, at least one and all that are known. What a restart of the daemon cuts
short begins again by itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import structlog

from deltad.client.messages import PROVEN, Cache, ReplicaReport, ReplicaState
from deltad.errors import DeltadError, IntegrityError, PreconditionError, UnavailableError, UsageError
from deltad.hotload.ledger import Ledger, Load, LoadState, ReplicaLoad, ReplicaStatus
from deltad.hotload.snapshots import Snapshot, fetch, look
from deltad.limits import Limits
from deltad.store.announce import Announcements
from deltad.store.bucket.port import Bucket
from deltad.store.disk import FileSystem, make_directory, read_file, remove_tree, write_durably
from deltad.types import RunId

log = structlog.get_logger()

T = TypeVar("T")

RETRY_SECONDS = 2.0
_FAILED = frozenset({ReplicaState.ROLLED_BACK, ReplicaState.FENCED})
_UNDER_WAY = frozenset({ReplicaState.STAGING, ReplicaState.READY, ReplicaState.COMMITTING, ReplicaState.COMMITTED})


class Deeds(Protocol):
    """What the daemon does for a load, and tells of its fleet. Versions are texts."""

    announcements: Announcements
    limits: Limits

    async def publish(self, directory: Path, identity: str, base: str, cache: Cache) -> str:
        """Publish a snapshot's directory; the version that it became. `base`: the version that a delta applies to."""

    async def lead(self, version: str, by: str, cache: Cache = "") -> None:
        """Lead the fleet to a version that is held, `cache` being for whoever commits it from here on.

        Raises PreconditionError while somebody else holds it elsewhere.
        """

    def check_free(self) -> None:
        """Raises PreconditionError while the fleet is held at a version by somebody else."""

    def version_of(self, identity: str) -> str:
        """The version of an identity that is held here; empty where there is none."""

    def identity_of(self, version: str) -> str:
        """What a version is called; empty where it has no name."""

    def replicas(self) -> Sequence[tuple[str, ReplicaReport]]:
        """All replicas of the run, each with the name of its region."""

    def free_bytes(self) -> int: ...


class HotLoads:
    """The loads of one deployment. All methods belong to the event loop's thread."""

    def __init__(
        self,
        deployment: str,
        run: RunId,
        bucket: Bucket,
        deeds: Deeds,
        *,
        ledger: Path,
        scratch: Path,
        files: FileSystem,
        timeout: float,
        account: str = "deltad",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ledger` is where the loads are written down, `scratch` where snapshots are brought to; `timeout` is for how
        long a load waits for its replicas, in seconds."""
        self.deployment = deployment
        self.run = run
        self.bucket = bucket
        self._deeds = deeds
        self._path, self._scratch, self._files = ledger, scratch, files
        self._timeout = timeout
        self.account = account
        self._clock = clock
        self._changing = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.ledger = _read(ledger, files)
        self._ready: dict[tuple[str, str, str], float] = {}
        """When a replica was first seen ready, by version, region and name."""

    async def work(self) -> None:
        """Go on with what a restart cut short, and clean up behind tasks, for as long as it is awaited."""
        if (load := self.ledger.active) is not None:
            self._start(load)
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def look(self, identity: str, *, url: str = "") -> Snapshot:
        """What lies in the bucket under an identity. Raises what `snapshots.look` raises."""
        return await look(self.bucket, identity, limits=self._deeds.limits)

    async def begin(self, load_id: str, identity: str, base: str | None, *, cache: Cache = "", by: str = "") -> Load:
        """Begin a load, or find the one that this id began. `base` is None for a full snapshot.

        Raises PreconditionError, UsageError, and what `look` raises; then nothing has changed.
        """
        if known := self.ledger.find(load_id):
            return self.ledger.begin(msgspec.structs.replace(known, identity=identity, base=base or "", cache=cache))[1]
        if self.ledger.active is None:
            self._deeds.check_free()
            snapshot = await self.look(identity)
            _check_kind(snapshot, base)
            found = dict(snapshot.files)
        else:
            found = {}  # refused below
        now = self._clock()
        new = Load(load_id, identity, base or "", found, now, now, cache=cache, by=by)
        load = await self._change(lambda ledger: ledger.begin(new))
        if load is new:
            self._start(load)
        return load

    async def cancel(self, load_id: str, by: str) -> Load:
        """End a load that is under way. Where its version is out already, the fleet is led back.

        Raises PreconditionError for one that has ended.
        """
        load = self.ledger.find(load_id)
        if load is None or load.state.is_end:
            raise PreconditionError(f"hot load {load_id}", expected="one that is under way", found="one that has ended")
        task = self._tasks.get(load_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        load = await self._end(load, LoadState.CANCELED, f"canceled by {by or 'its owner'}")
        served = self.ledger.served
        if load.version and served is not None and load.state is LoadState.CANCELED:
            await self._deeds.lead(served.version, by)
        return load

    async def forget(self) -> None:
        """Forget all loads; the next snapshot must be full. Raises PreconditionError during a load."""

        def forget(ledger: Ledger) -> tuple[Ledger, None]:
            return ledger.forget(self._clock()), None

        await self._change(forget)

    def replicas(self, load: Load) -> tuple[ReplicaStatus, ...]:
        """How far each replica is with a load; for one that has ended, how far it was then. By region and name."""
        if load.state.is_end:
            return load.replicas
        return self.fleet(load.version)

    def fleet(self, version: str) -> tuple[ReplicaStatus, ...]:
        """How far each replica is on the way to a version, by region and name."""
        reports = sorted(self._deeds.replicas(), key=lambda found: (found[0], found[1].replica))
        fleet = tuple(self._status(region, report, version) for region, report in reports)
        return tuple(self._dated(status, version) for status in fleet)

    # How.

    def _status(self, region: str, report: ReplicaReport, version: str) -> ReplicaStatus:
        proven = report.state in PROVEN and bool(report.root)
        identity = self._deeds.identity_of(report.version) if proven else ""
        state, error = ReplicaLoad.PENDING, ""
        if proven and version and report.version == version:
            state = ReplicaLoad.READY
        elif report.state in _FAILED:
            state, error = ReplicaLoad.ERROR, report.error or report.state
        elif report.state in _UNDER_WAY:
            state = ReplicaLoad.UPDATING
        elif report.state is ReplicaState.UNKNOWN:
            error = report.error or "not heard of"
        return ReplicaStatus(region, report.replica, state, identity, error)

    def _dated(self, status: ReplicaStatus, version: str) -> ReplicaStatus:
        if status.state is not ReplicaLoad.READY:
            return status
        at = self._ready.setdefault((version, status.region, status.replica), self._clock())
        return msgspec.structs.replace(status, ready_at=at)

    def _start(self, load: Load) -> None:
        task = asyncio.create_task(self._carry_out(load), name=f"hot load {load.id}")
        self._tasks[load.id] = task
        task.add_done_callback(lambda task: self._tasks.pop(load.id, None))

    async def _carry_out(self, load: Load) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                load = await self._change(
                    lambda ledger: ledger.change(load, self._clock(), state=LoadState.IN_PROGRESS)
                )
                self._ready.clear()
                version = load.version or await self._version(load)
                load = await self._change(lambda ledger: ledger.change(load, self._clock(), version=version))
                await self._deeds.lead(version, load.by, load.cache)
                failed = await self._followed(version)
        except TimeoutError:
            await self._end(load, LoadState.FAILED, f"not all replicas were verified within {self._timeout:g} s")
        except DeltadError as error:
            await self._end(load, LoadState.FAILED, str(error))
        except Exception as error:  # a load that ends without a word would be in progress for ever
            log.exception("hot_load_broke", load=load.id)
            await self._end(load, LoadState.FAILED, f"internal error: {type(error).__name__}")
        else:
            await self._end(load, LoadState.FAILED if failed else LoadState.COMPLETED, failed)

    async def _version(self, load: Load) -> str:
        if held := self._deeds.version_of(load.identity):
            return held
        base = ""
        if load.base:
            base = self._deeds.version_of(load.base)
            if not base:
                raise PreconditionError(f"delta {load.identity!r} on {load.base!r}", found="a base that was let go")
        home = self._scratch / f"hot-load-{uuid.uuid4().hex}"
        name = load.identity if load.identity.isascii() else "snapshot"
        try:
            snapshot = await self._try_again(lambda: self._bring(load, home / name))
            _check_kind(snapshot, load.base or None)
            publishing = asyncio.ensure_future(self._deeds.publish(home / name, load.identity, base, load.cache))
            try:
                return await asyncio.shield(publishing)
            except asyncio.CancelledError:
                # What has begun goes on to its end; whoever canceled has to know that it is out.
                version = await publishing
                await self._change(lambda ledger: ledger.change(load, self._clock(), version=version))
                raise
        finally:
            await asyncio.to_thread(remove_tree, home, self._files)

    async def _bring(self, load: Load, directory: Path) -> Snapshot:
        await asyncio.to_thread(remove_tree, directory.parent, self._files)
        snapshot = await self.look(load.identity)
        if dict(snapshot.files) != load.files:
            raise IntegrityError(
                f"snapshot {load.identity!r}", expected="the files that were announced", found="others"
            )
        await fetch(self.bucket, snapshot, directory, free_bytes=self._deeds.free_bytes())
        return snapshot

    async def _try_again(self, bring: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
        """Until the bucket can be reached, or the load's time is over."""
        while True:
            try:
                return await bring()
            except UnavailableError as error:
                log.warning("hot_load_waits", deployment=self.deployment, error=str(error))
            except BaseExceptionGroup as group:
                errors = [error for error in group.exceptions if not isinstance(error, UnavailableError)]
                if errors:
                    raise errors[0] from None
            await asyncio.sleep(RETRY_SECONDS)

    async def _followed(self, version: str) -> str:
        """Wait until every replica is verified at a version, then empty; or why that will not be."""

        def outcome() -> str | None:
            fleet = self.fleet(version)
            if not fleet or any(status.state not in (ReplicaLoad.READY, ReplicaLoad.ERROR) for status in fleet):
                return None
            return "; ".join(f"{status.replica}: {status.error}" for status in fleet if status.error)

        while True:
            if (found := await self._deeds.announcements.wait_until(outcome, RETRY_SECONDS)) is not None:
                return found

    async def _end(self, load: Load, state: LoadState, reason: str) -> Load:
        replicas = self.fleet(load.version)
        ended = await self._change(
            lambda ledger: ledger.change(load, self._clock(), state=state, reason=reason, replicas=replicas)
        )
        log.info("hot_load_ended", deployment=self.deployment, load=load.id, state=ended.state, reason=ended.reason)
        self._deeds.announcements.announce()
        return ended

    async def _change(self, change: Callable[[Ledger], tuple[Ledger, T]]) -> T:
        """Change the ledger, durably."""
        async with self._changing:
            ledger, told = change(self.ledger)
            if ledger is not self.ledger:
                await asyncio.shield(asyncio.to_thread(self._write, msgspec.json.encode(ledger)))
                self.ledger = ledger
            return told

    def _write(self, data: bytes) -> None:
        make_directory(self._path.parent, self._files)
        write_durably(self._path, data, scratch=self._scratch, files=self._files)


def _check_kind(snapshot: Snapshot, base: str | None) -> None:
    """A delta that is taken for weights would be served as such: the files say themselves what they are."""
    thing = f"snapshot {snapshot.identity!r}"
    if base is None and snapshot.is_delta:
        raise UsageError(
            thing,
            expected="a full snapshot, as the request says",
            found=f"a delta on {snapshot.base!r}, as its index says",
            hint="name the snapshot that it applies to",
        )
    if base is not None and not snapshot.is_delta:
        raise UsageError(
            thing,
            expected=f"a delta on {base!r}, as the request says",
            found="a full snapshot, as its index says",
            hint="load it as a full one",
        )
    if base is not None and snapshot.base != base:
        raise UsageError(
            thing, expected=f"a delta on {base!r}, as the request says", found=f"one on {snapshot.base!r} by its index"
        )


def _read(path: Path, files: FileSystem) -> Ledger:
    """Raises IntegrityError for a ledger that is damaged: which identities were loaded cannot be guessed."""
    try:
        return msgspec.json.decode(read_file(path, files), type=Ledger)
    except FileNotFoundError:
        return Ledger()
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"{path}", expected="the ledger of a deployment", found=str(error), hint="remove it to begin anew"
        ) from None
