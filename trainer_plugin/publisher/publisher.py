"""One rank's publisher: what it compares with, what it hands over, and what becomes of a step.

It works in a thread of its own. Owns two invariants: training waits for nothing but the reading of its own live
weights, and only where it asked to; and the copy of what was published moves by what the daemon said is durable, so
that whatever fails before that is compared again.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from deltad.client import Client
from deltad.client.handover import HandedOver, HandOver, HandOverReply, JoinReply, JoinRequest, body
from deltad.client.messages import FleetView, VersionInfo
from deltad.delta.backend import Backend, Mode, choose
from deltad.delta.digest import U64, pack_sums
from deltad.delta.frame import Rect
from deltad.delta.layout import FILE_NAMES, Layout, decode_layout
from deltad.delta.shards import ArraySource, ShardCopy, ShardEncoder
from deltad.errors import (
    BaseMismatchError,
    ConflictError,
    DeltadError,
    NotFoundError,
    UsageError,
)
from deltad.types import Version, parse_version
from trainer_plugin.publisher.shards import GivenUpError, Held, LiveShards, room_for

OnLate = Literal["wait", "copy", "abandon"]
"""What becomes of a step whose weights are not all read when the optimizer is about to change them: training waits,
they are copied, or the step is not published."""
OnBusy = Literal["skip", "wait"]
"""What becomes of a step while the one before is on its way: it is not published, or training waits."""
PublishAs = Literal["source", "bf16"]

_JOIN_SECONDS = 60.0
_AUDITED_STEPS = 8
"""In so many steps all of the copy of what was published is summed once; see `ShardEncoder.audits`."""
_PATIENCE_SECONDS = 10.0
"""How long a fence waits for a step that has not begun to be read."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: the version that all ranks made, or why there is none.

    `already`: the same weights were published under that number before. `seconds` are those from `publish` to the
    daemon's answer, and `read_seconds` those until the live weights had been read.
    """

    version: VersionInfo | None
    reason: str = ""
    already: bool = False
    chunk_bytes: int = 0
    whole: bool = False
    seconds: float = 0.0
    read_seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """What a publisher has done. `skipped` counts steps without a version by the kind of their reason."""

    published: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    copies: int = 0
    fence_seconds: float = 0.0


class Handle:
    """A step that is being published."""

    def __init__(self, publisher: Publisher, number: int) -> None:
        self.number = number
        self._publisher = publisher
        self._done = threading.Event()
        self._outcome: Outcome | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Outcome:
        """What became of it. Raises TimeoutError where that is not known in `timeout` seconds."""
        if not self._done.wait(timeout) or self._outcome is None:
            raise TimeoutError(f"step {self.number} is neither durable nor given up after {timeout} s")
        return self._outcome

    def fleet(self, *, verified: int = 0, wait: float = 0.0) -> FleetView:
        """The run's replicas, and how many have verified this version; see `Client.fleet`.

        A step that was skipped has no version: then it is the fleet as it stands, and nothing is waited for.
        """
        outcome = self.wait()
        if outcome.version is None:
            return self._publisher.client.fleet(self._publisher.run)
        return self._publisher.client.fleet(
            self._publisher.run, version=outcome.version.version, verified=verified, wait=wait
        )

    def _set(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._done.set()


class Publisher:
    """Publishes a run from this rank's memory. Used by one thread; its own thread does the work."""

    def __init__(
        self,
        run: str,
        *,
        socket: Path | str = "/run/deltad/deltad.sock",
        client: Client | None = None,
        files: Path | str | Mapping[str, bytes] | None = None,
        publish_as: PublishAs = "source",
        on_late: OnLate = "wait",
        on_busy: OnBusy = "skip",
        resume_from: str = "",
        new_epoch: bool = False,
        rank: int | None = None,
        world: int | None = None,
        session: str = "",
        baseline: Path | str | None = None,
        threads: int = 1,
        agree: Callable[[bool], bool] | None = None,
        backend: Backend | None = None,
    ) -> None:
        """Opening one sends nothing.

        `socket` is that of this host's daemon; `client` talks to another one, such as a `[local]` over TLS.
        `files`: the directory of the model's config and tokenizer, or the files themselves; some rank has to have
        them. `baseline`: a directory for the copy of what was published; in memory without it. `rank`, `world`,
        `session` (a name that all ranks share) and `agree` (whether any rank says so) are those of
        torch.distributed where it is initialised.
        """
        self.run = run
        self.client = client or Client(socket)
        self.counters = Counters()
        self._told: Counter[str] = Counter()
        self._files = _read_files(files)
        self._publish_as = publish_as
        self._on_late, self._on_busy = on_late, on_busy
        self._resume_from, self._new_epoch = resume_from, new_epoch
        self._baseline = None if baseline is None else Path(baseline)
        self._threads = threads
        self._backend = backend
        self._ranks = _Ranks.of(rank, world, session, agree)
        self._joined: _Joined | None = None
        self._copy: _Copy | None = None
        self._epoch = 0
        self._uncertain = False
        self._working: _Work | None = None
        self._thread: threading.Thread | None = None

    def publish(self, number: int, tensors: Any, *, identity: str = "") -> Handle:
        """Hand over this rank's shards as version `number`; returns before they are read: see `fence`.

        `tensors`: a module, a mapping from names to tensors or DTensors, or a sequence of `Held`. Names are those
        of the published checkpoint. Every rank has to call it for the same step. While an earlier step is on its
        way on any rank, this one is skipped, or waits for it (`on_busy`).
        """
        handle = Handle(self, number)
        if self._on_busy == "wait":
            self.close()
        busy = self._thread is not None and self._thread.is_alive()
        if self._ranks.agree(busy):
            self._skip(handle, "busy", "the step before is still on its way")
            return handle
        shards = tensors if _is_held(tensors) else _collect(tensors, self._publish_as)
        self._working = _Work(handle, cast("Sequence[Held]", shards), identity, time.monotonic())
        self._thread = threading.Thread(target=self._work, args=(self._working,), name="deltad-publish", daemon=True)
        self._thread.start()
        return handle

    def fence(self) -> None:
        """Return once live weights may change: what is not read by then is waited for, copied or given up.

        How fast the daemon is makes no difference, but for what a publisher has to ask first: where the other ranks
        and the daemon do not answer within seconds, the step is given up.
        """
        work = self._working
        if work is None or work.read.is_set():
            return
        began = time.monotonic()
        if not work.begun.wait(_PATIENCE_SECONDS) or self._on_late == "abandon":
            work.give_up()
        elif self._on_late == "copy" and work.live is not None:
            work.live.copy()
            self.counters.copies += 1
        else:
            self.counters.waits += 1
            work.read.wait()
        self.counters.fence_seconds += time.monotonic() - began

    def attach(self, optimizer: Any) -> None:
        """Put the fence before every step of a torch optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def wait_for(self, *, verified: float = 1.0, max_staleness: int = 0, timeout: float = 60.0) -> bool:
        """Wait until that share of the fleet has verified a version at most `max_staleness` published ones old.

        False where it has not within `timeout` seconds, or where there is nobody to wait for.
        """
        ends = time.monotonic() + timeout
        while True:
            versions = self.client.versions(self.run)
            if not versions:
                return False
            oldest = versions[max(0, len(versions) - 1 - max_staleness)]
            view = self.client.fleet(self.run)
            if not view.replicas:
                return False
            enough = int(np.ceil(verified * view.replicas))
            left = ends - time.monotonic()
            found = self.client.fleet(self.run, version=oldest.version, verified=enough, wait=max(0.0, min(left, 5.0)))
            if found.verified >= enough:
                return True
            if left <= 0:
                return False

    def close(self) -> None:
        """Wait for the step that is on its way."""
        if self._thread is not None:
            self._thread.join()

    # The thread's side.

    def _work(self, work: _Work) -> None:
        try:
            reply, share = self._hand_over(work)
        except GivenUpError:
            self._skip(work.handle, "abandoned", "the optimizer's next step came before the weights had been read")
        except (DeltadError, OSError, MemoryError) as error:
            if isinstance(error, BaseMismatchError):
                self._copy = None  # it is not what was published, so the next step goes whole
            self._uncertain = self._uncertain or work.sent
            if isinstance(error, ConflictError | NotFoundError):
                self._joined = None
            kind = error.kind if isinstance(error, DeltadError) else type(error).__name__
            self._skip(work.handle, kind, str(error))
        else:
            self.counters.published += 1
            now = time.monotonic()
            work.handle._set(
                Outcome(
                    reply.version,
                    already=reply.already,
                    chunk_bytes=share.bytes,
                    whole=share.whole,
                    seconds=now - work.began,
                    read_seconds=work.read_at - work.began,
                )
            )
        finally:
            work.finish_reading()

    def _hand_over(self, work: _Work) -> tuple[HandOverReply, _Share]:
        joined = self._join(work.shards)
        backend = self._backend = self._backend or choose()
        held = [work.shards[i] for i in joined.owned]
        base = self._base(joined)
        if self._resume_from or self._new_epoch:
            base = None
        keep = room_for(held, self._baseline) if base is None else None
        if base is None:
            self._copy = None  # its memory is needed for the next
        live = LiveShards(held)
        work.begin_reading(live)
        if keep is not None:
            live.copy_to(keep)
            work.finish_reading()
        encoder = ShardEncoder(
            joined.layout,
            joined.rects,
            live.sources if keep is None else [ArraySource(lanes) for lanes in keep],
            backend,
            base=None if base is None else base.copy.sources,
            base_sums=None if base is None else base.sums,
            mode=joined.mode,
            threads=self._threads,
            reading=live.reading,
            audits=lambda shard: shard % _AUDITED_STEPS == self.counters.published % _AUDITED_STEPS,
        )
        share = _Share(base is None)
        if base is not None:
            # All of them before the first is sent: what is live must not be waited for by a slow daemon.
            share.chunks = [chunk.data for chunk in encoder.chunks()]
            work.finish_reading()

        def chunks() -> Iterator[bytes]:
            for data in share.chunks if base is not None else (chunk.data for chunk in encoder.chunks()):
                share.bytes += len(data)
                yield data

        def tail() -> HandedOver:
            work.sent = True
            sums = b"" if base is None else pack_sums(base.sums)
            return HandedOver(pack_sums(encoder.sums), sums, encoder.changed, encoder.coders)

        skipped = self.counters.skipped - self._told
        head = HandOver(
            session=self._ranks.session,
            rank=self._ranks.rank,
            number=work.handle.number,
            base=None if base is None else base.version,
            identity=work.identity,
            new_epoch=self._new_epoch,
            resume_from=self._resume_from,
            epoch=0 if self._new_epoch or self._resume_from else self._epoch,
            skipped=dict(skipped),
        )
        reply = self.client.hand_over(self.run, body(head, chunks(), tail))
        version = parse_version(reply.version.version)
        if base is not None:
            base.copy.apply(share.chunks)
            base.sums, base.version = encoder.sums, version
        elif keep is not None:
            self._copy = _Copy(joined, ShardCopy(joined.layout, joined.rects, keep, backend), encoder.sums, version)
        self._told += skipped
        joined.mode = cast("Mode", reply.mode)
        self._uncertain = False
        self._resume_from, self._new_epoch, self._epoch = "", False, version.epoch
        return reply, share

    def _base(self, joined: _Joined) -> _Copy | None:
        """What to compare with; None where this step has to go whole."""
        base = self._copy
        if base is None or base.joined.rects != joined.rects or base.joined.layout.digest != joined.layout.digest:
            return None
        if self._uncertain:
            # The answer to a step was lost, or was an error: has it become a version all the same?
            try:
                latest = self.client.latest(self.run)
            except NotFoundError:
                latest = None  # this host's daemon hands on, and does not pull the run
            if latest is None or parse_version(latest.version) != base.version:
                return None
            self._uncertain = False
        return base

    def _join(self, shards: Sequence[Held]) -> _Joined:
        specs = tuple(shard.spec for shard in shards)
        if self._joined is not None and self._joined.specs == specs:
            return self._joined
        if self._joined is not None:
            before, after = ({spec.name for spec in known} for known in (self._joined.specs, specs))
            names = sorted(before ^ after) or sorted({a.name for a in set(specs) ^ set(self._joined.specs)})
            raise UsageError(
                f"the tensors of run {self.run}",
                expected="those of the first publish",
                found=f"others: {', '.join(repr(name) for name in names[:3])}" + (" …" if len(names) > 3 else ""),
                hint="another layout is published by a new publisher",
            )
        ranks = self._ranks
        reply = self.client.join(
            self.run,
            JoinRequest(
                ranks.session, ranks.rank, ranks.world, specs, tuple(sorted(self._files.items())), _JOIN_SECONDS
            ),
        )
        self._joined = _Joined.of(reply, specs)
        return self._joined

    def _skip(self, handle: Handle, kind: str, reason: str) -> None:
        self.counters.skipped[kind] += 1
        handle._set(Outcome(None, reason=reason))


@dataclass(slots=True)
class _Share:
    whole: bool
    chunks: list[bytes] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class _Joined:
    """What all ranks hold together, and what of it is this rank's to hand over."""

    specs: tuple[Any, ...]
    layout: Layout
    owned: tuple[int, ...]
    rects: tuple[Rect, ...]
    mode: Mode

    @classmethod
    def of(cls, reply: JoinReply, specs: tuple[Any, ...]) -> _Joined:
        layout = decode_layout(reply.layout)
        owned = [specs[i] for i in reply.owned]
        rects = tuple(Rect(layout.index[spec.name], spec.offset, spec.extent) for spec in owned)
        return cls(specs, layout, reply.owned, rects, cast("Mode", reply.mode))


@dataclass(slots=True)
class _Copy:
    """What this rank held at the version that was published last."""

    joined: _Joined
    copy: ShardCopy
    sums: U64
    version: Version


@dataclass(slots=True)
class _Work:
    """A step on its way, as its thread and the trainer's both see it."""

    handle: Handle
    shards: Sequence[Held]
    identity: str
    began: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    given_up: bool = False
    sent: bool = False
    read: threading.Event = field(default_factory=threading.Event)
    read_at: float = 0.0
    live: LiveShards | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def begin_reading(self, live: LiveShards) -> None:
        """Raises GivenUpError where the trainer has gone on meanwhile."""
        with self.lock:
            if self.given_up:
                raise GivenUpError
            self.live = live
        self.begun.set()

    def finish_reading(self) -> None:
        if not self.read.is_set():
            self.read_at = time.monotonic()
        self.begun.set()
        self.read.set()

    def give_up(self) -> None:
        """Nothing is read any more on return."""
        with self.lock:
            self.given_up = True
        if self.live is not None:
            self.live.give_up()


@dataclass(frozen=True, slots=True)
class _Ranks:
    rank: int
    world: int
    session: str
    agree: Callable[[bool], bool]

    @classmethod
    def of(cls, rank: int | None, world: int | None, session: str, agree: Callable[[bool], bool] | None) -> _Ranks:
        if rank is None and world is None and not session:
            from trainer_plugin.publisher.torch_shards import distributed

            if (found := distributed()) is not None:
                return cls(found.rank, found.world, found.session, agree or found.agree)
        if (world or 1) > 1 and not session:
            raise UsageError("a publisher of several ranks", expected="a session, which names them all", found="none")
        return cls(rank or 0, world or 1, session or uuid.uuid4().hex, agree or (lambda busy: busy))


def _is_held(tensors: Any) -> bool:
    return isinstance(tensors, Sequence) and all(isinstance(shard, Held) for shard in tensors)


def _collect(tensors: Any, publish_as: PublishAs) -> Sequence[Held]:
    from trainer_plugin.publisher.torch_shards import collect

    return collect(tensors, publish_as)


def _read_files(files: Path | str | Mapping[str, bytes] | None) -> dict[str, bytes]:
    if files is None:
        return {}
    if isinstance(files, Mapping):
        return dict(files)
    return {path.name: path.read_bytes() for path in sorted(Path(files).iterdir()) if path.name in FILE_NAMES}
