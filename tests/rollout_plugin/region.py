"""A region for replicas to live in: the local API on a real Unix socket, a real store, real versions.

Versions of a tiny model are encoded, and exports written, by the product's own code; only the daemon
around them is small. It runs in a thread, and can be killed and started again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web

from deltad.checkpoint import CheckpointWriter, open_checkpoint
from deltad.client import Client
from deltad.client.messages import (
    ExportReply,
    ExportRequest,
    FleetView,
    NextReply,
    ReplicaReport,
    ReplicaState,
    Step,
    VersionInfo,
)
from deltad.delta import FORMAT
from deltad.delta.backend import Mode, choose
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.digest import pack_sums, root_of
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout
from deltad.delta.manifest import EdgeKind, Manifest, State, make_pages
from deltad.limits import Limits
from deltad.local.binding import bind_unix_socket
from deltad.local.fleet import Fleet
from deltad.local.server import LocalServer
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version, parse_version
from tests.kit.operations import MemoryOperations
from tests.kit.weights import ArrayWeights

RUN = RunId("policy")
QUIET_FOR = 120.0
SMALL = Limits(chunk_bytes=32 << 10, frame_lanes=16 << 10)


@dataclass
class Held:
    """A version that the region holds. `manifest` leads to it from the one before; empty for the first."""

    info: VersionInfo
    layout: Layout
    weights: ArrayWeights
    files: dict[str, bytes]
    manifest: Digest = field(default=Digest(b""))


class Region(MemoryOperations):
    """One region's daemon. Versions come from `publish_checkpoint` and `publish_changed`."""

    def __init__(self, home: Path) -> None:
        super().__init__(RUN)
        self.home = home
        home.mkdir(exist_ok=True)
        self.socket = home / "deltad.sock"
        self.store = Store.open(home / "store")
        self.history: list[Held] = []
        self.exports: list[Path] = []
        self.offers: Callable[[NextReply | None], NextReply | None] = lambda reply: reply
        """What becomes of an offer before it is answered."""
        self.before_export: Callable[[], None] = lambda: None
        self.objects_read: list[Digest] = []
        self.mode: Mode = "blind"
        """The coder of the deltas to come."""
        self.ahead = 0.0
        """Seconds that have passed for the daemon beyond those that passed."""

    @property
    def client(self) -> Client:
        return Client(self.socket)

    # Publishing.

    def publish_checkpoint(self, directory: Path) -> Held:
        """The next version: the tensors of a checkpoint."""
        with open_checkpoint(directory) as checkpoint:
            layout = checkpoint.layout
            arrays = [np.array(checkpoint.lanes(i, 0, spec.lanes)) for i, spec in enumerate(layout.tensors)]
            files = {spec.name: checkpoint.file_bytes(spec.name) for spec in layout.files}
        return self.publish(layout, ArrayWeights(arrays), files)

    def publish_changed(self, density: float = 0.01, *, seed: int = 1) -> Held:
        """The next version: the newest one with some of its weights changed a little."""
        before = self.history[-1]
        return self.publish(before.layout, _nudged(before.weights, density, seed), before.files)

    def publish(self, layout: Layout, weights: ArrayWeights, files: dict[str, bytes]) -> Held:
        """Encode, store and announce a version; a delta if the tensors are those of the one before."""
        number = len(self.history)
        before = self.history[-1] if self.history else None
        root = root_of(layout, sum_weights(layout, weights))
        self.store.put(layout.encode())
        for data in files.values():
            self.store.put(data)
        info = VersionInfo(
            run=RUN,
            version=str(Version(1, number)),
            parent=before.info.version if before else "",
            identity="",
            source="",
            variant="bf16",
            kind="delta" if before else "anchor",
            reason="",
            root=root.hex(),
            layout=layout.digest.hex(),
            density=0.0,
            elements=layout.elements,
            changed=0,
            full_bytes=layout.weight_bytes,
            delta_bytes=0,
            chunks=0,
            created=time.time(),
        )
        held = Held(info, layout, weights, files)
        if before is not None and before.layout.table_digest == layout.table_digest:
            held.manifest = self.put_delta(before, held)
        self.history.append(held)
        self.held[RUN].append(info)
        self.announce()
        return held

    def put_delta(self, before: Held, after: Held, **changes: object) -> Digest:
        """Store the delta between two versions, with changes to its manifest; returns the manifest's digest."""
        layout = after.layout
        base_sums = sum_weights(layout, before.weights)
        encoder = EdgeEncoder(
            layout,
            after.weights,
            choose(),
            base=before.weights,
            base_sums=base_sums,
            limits=SMALL,
            mode=self.mode,
        )
        chunks = list(encoder.chunks())
        for chunk in chunks:
            self.store.put(chunk.data)
        pages = list(make_pages([chunk.ref for chunk in chunks], limits=SMALL))
        for _, data in pages:
            self.store.put(data)
        manifest = Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=EdgeKind.DELTA,
            run=RUN,
            variant="bf16",
            layout=layout.digest,
            base=State(parse_version(before.info.version), bytes.fromhex(before.info.root)),
            target=State(parse_version(after.info.version), bytes.fromhex(after.info.root)),
            sums=pack_sums(encoder.sums),
            pages=tuple(ref for ref, _ in pages),
            coders=encoder.coders,
            changed=int(encoder.changed.sum()),
            elements=layout.elements,
            chunk_bytes=sum(chunk.ref.size for chunk in chunks),
        )
        return self.store.put(encode(msgspec.structs.replace(manifest, **changes)))

    # The port that LocalServer calls.

    def next_for(self, run: RunId, variant: Variant, served: Version | None) -> NextReply | None:
        return self.offers(self._next(served))

    def _next(self, served: Version | None) -> NextReply | None:
        versions = [parse_version(held.info.version) for held in self.history]
        if not versions or served == versions[-1]:
            return None
        if served is None or served not in versions:
            return NextReply(str(versions[-1]), reload=True)
        newer = self.history[versions.index(served) + 1 :]
        if not all(held.manifest for held in newer):
            return NextReply(str(versions[-1]), reload=True)
        return NextReply(str(versions[-1]), tuple(self.step(held) for held in newer))

    def step(self, held: Held) -> Step:
        """The step from the version before to this one."""
        before = self.history[self.history.index(held) - 1]
        return Step(held.info.version, held.info.root, before.info.version, before.info.root, held.manifest.hex())

    async def export(self, run: RunId, request: ExportRequest) -> ExportReply:
        self._maybe_refuse()
        await asyncio.to_thread(self.before_export)
        held = self.history[-1]
        if request.version:
            (held,) = (h for h in self.history if h.info.version == request.version)
        directory = self.home / "exports" / f"{len(self.exports)}"
        self.exports.append(directory)
        await asyncio.to_thread(write_export, held, directory)
        return ExportReply(str(directory), held.info.version, held.info.root)

    # Life and death.

    def start(self) -> None:
        """Serve on the socket, knowing no replica."""
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="daemon", daemon=True)
        self._thread.start()
        assert started.wait(30)

    def kill(self) -> None:
        """Cut all connections and forget all replicas; what is stored stays."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def announce(self) -> None:
        """Wake all long polls, if the daemon runs."""
        if hasattr(self, "_thread") and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._announcements.announce)

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._announcements = Announcements()
        fleet = Fleet("region-2", f"boot-{time.monotonic_ns()}", quiet_for=QUIET_FOR)
        server = LocalServer(self.store, self, fleet, self._announcements, clock=lambda: time.monotonic() + self.ahead)
        runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0)
        await runner.setup()
        try:
            await web.SockSite(runner, bind_unix_socket(self.socket)).start()
            started.set()
            await self._end.wait()
            # asyncio loses a connection that it has accepted when the server closes, so nobody may come any more.
            self.socket.unlink()
            for _ in range(5):
                await asyncio.sleep(0)
            # Like SIGKILL, as far as a client can tell: sockets close in mid-answer.
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        finally:
            await runner.cleanup()

    # What replicas say.

    def await_replica(self, accept: Callable[[ReplicaReport], bool], name: str = "r1") -> ReplicaReport:
        """The replica's report, once it is as wished; long-polls in between."""
        until = time.monotonic() + 60
        last: ReplicaReport | None = None
        while time.monotonic() < until:
            for report in _replicas(self.client.fleet(RUN)):
                if report.replica == name:
                    last = report
                    if accept(report):
                        return report
            time.sleep(0.02)
        raise AssertionError(f"the replica did not get there; last it said {last}")

    def await_verified(self, held: Held, name: str = "r1") -> ReplicaReport:
        """The replica's report, once it says that it serves this version, verified."""
        return self.await_replica(
            lambda r: r.state is ReplicaState.VERIFIED and r.version == held.info.version and r.root == held.info.root,
            name,
        )


def write_export(held: Held, directory: Path) -> None:
    """A version as a loadable checkpoint."""
    directory.parent.mkdir(exist_ok=True)
    with CheckpointWriter(directory, held.layout) as writer:
        for i, spec in enumerate(held.layout.tensors):
            if spec.lanes:
                writer.lanes(i, 0, spec.lanes)[:] = held.weights.arrays[i]
        for name, data in held.files.items():
            writer.write_file(name, data)
        writer.finish()


@contextmanager
def running(home: Path) -> Iterator[Region]:
    region = Region(home)
    region.start()
    try:
        yield region
    finally:
        region.kill()
        region.store.close()


def _replicas(view: FleetView) -> Iterator[ReplicaReport]:
    for region in view.regions:
        for run in region.report.runs.values():
            yield from run.replicas


def _nudged(weights: ArrayWeights, density: float, seed: int) -> ArrayWeights:
    """Another pattern in about `density` of the lanes, one step away, so that the model stays a sane one."""
    rng = np.random.default_rng(seed)
    after = weights.copy()
    for array in after.arrays:
        if array.size:
            at = rng.choice(array.size, max(1, int(array.size * density)), replace=False)
            array[at] ^= array.dtype.type(8)
    return after
