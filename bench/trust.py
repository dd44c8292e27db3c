"""Trust, measured: what signatures add to a version, what TLS adds to the relay, and what the worst attack costs.

A version of 100 MB is what a region pulls: its chunks, which are hashed and compared in any case, and beside them a
record and a manifest, which are signed and checked. The relay serves the same chunks from a store in a
process of its own, in clear or over TLS 1.3 with certificates on both ends, to a client in this one; processor time is
that of both. The attacks are those of `tests.kit.attacks`, against a pulling process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from bench.harness import ROOT, Measurement, Spec, median_of
from bench.timing import OWN_THREAD, RUNS, seconds
from deltad.config import TlsFiles
from deltad.delta.encoding import encode, sha256
from deltad.delta.keys import SigningKey
from deltad.delta.manifest import EdgeKind, decode_manifest
from deltad.delta.record import decode_record
from deltad.delta.signing import sign
from deltad.protocol.access import Doorkeeper, Principal, Right
from deltad.protocol.pull_plan import Kind, Wanted, check_arrival, want
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.relay.client import ClientTls, RelayClient
from deltad.relay.server import RelayServer
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import Digest
from tests.kit.attacks import ATTACKS
from tests.kit.authority import Authority
from tests.kit.hostile import Hostile
from tests.kit.versions import Lineage
from tests.kit.victim import Looked
from tests.relay.test_attacks import Victim, suffers

PATHS = (
    "deltad/config/tls.py",
    "deltad/delta/keys.py",
    "deltad/delta/signing.py",
    "deltad/limits.py",
    "deltad/protocol",
    "deltad/relay",
    "bench/trust.py",
    "tests/kit/attacks.py",
)

MIB = 1 << 20
VERSION_BYTES = 100_000_000
PEERS = 200
_PEER = "rollout-1"

SPECS = (
    Spec(name="signing and checking / hashing a version of 100 MB", unit="%", direction="min", must=1),
    Spec(name="CPU per byte over TLS / in clear", unit="×", direction="min", must=1.6),
    Spec(name="CPU per GiB, in clear", unit="s", direction="min"),
    Spec(name="CPU of 200 handshakes at the relay", unit="s", direction="min", must=5),
    Spec(name="memory of the worst attack", unit="MiB", direction="min", must=64),
    Spec(name="CPU of the worst attack", unit="s", direction="min", must=2),
)


def measure(quick: bool) -> Iterator[Measurement]:
    """All rows."""
    yield _signing()
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as home:
        yield from _relaying(Path(home), 128 * MIB if quick else 1024 * MIB)
    yield from asyncio.run(_attacked())


def _signing() -> Measurement:
    key = SigningKey.new()
    trust = TrustList([TrustedKey(key.public, frozenset(Scope))])
    published = Lineage(tensors=2).publish()
    manifest = msgspec.structs.replace(
        decode_manifest(published.objects[Digest(published.record.variants[0].edges[0].manifest)]), kind=EdgeKind.ANCHOR
    )
    chunks = [os.urandom(min(8 * MIB, VERSION_BYTES - at)) for at in range(0, VERSION_BYTES, 8 * MIB)]
    wanted = [want(Kind.CHUNK, sha256(chunk), len(chunk)) for chunk in chunks]

    def signed() -> None:
        record, edge = sign(published.record, key).encode(), encode(sign(manifest, key))
        trust.check_record(decode_record(record))
        trust.check_derived(decode_manifest(edge))

    def plain() -> None:
        decode_record(published.record.encode())
        decode_manifest(encode(manifest))

    def hashed() -> None:
        for chunk, what in zip(chunks, wanted, strict=True):
            sha256(chunk)
            check_arrival(what, chunk, "bench")

    shares = [
        100 * (seconds(signed, OWN_THREAD) - seconds(plain, OWN_THREAD)) / seconds(hashed, OWN_THREAD)
        for _ in range(RUNS)
    ]
    return median_of(
        SPECS[0].name,
        shares,
        note="a record and an edge, signed and checked, as the chunks are hashed and compared, once each; CPU time",
    )


@dataclass(frozen=True, slots=True)
class _Place:
    home: Path
    server: TlsFiles
    client: TlsFiles
    wanted: tuple[Wanted, ...]


def _prepare(home: Path) -> _Place:
    authority = Authority(home / "ca")
    end, peer = authority.issue("trainer-1"), authority.issue(_PEER)
    store = Store.open(home / "store")
    chunks = [os.urandom(8 * MIB) for _ in range(4)]
    wanted = tuple(want(Kind.CHUNK, store.put_chunk(chunk), len(chunk)) for chunk in chunks)
    store.close()
    ca = authority.certificate
    return _Place(home, TlsFiles(end.certificate, end.key, ca), TlsFiles(peer.certificate, peer.key, ca), wanted)


class _Relay:
    """The other process. `cpu` is what it has used so far."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    def cpu(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def _serving(place: _Place, *, tls: bool) -> Iterator[_Relay]:
    files = [str(place.server.certificate), str(place.server.key), str(place.server.ca)] if tls else []
    command = [sys.executable, "-m", "bench.trust", str(place.home / "store"), *files]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield _Relay(process, json.loads(process.stdout.readline()))
        process.stdin.close()


def _client(place: _Place, relay: _Relay, *, tls: bool) -> RelayClient:
    url = f"{'https' if tls else 'http'}://127.0.0.1:{relay.port}"
    shown = ClientTls(place.client, None) if tls else None
    return RelayClient(url, None if tls else lambda: "token", count=lambda count: None, tls=shown)


def _relaying(home: Path, count: int) -> Iterator[Measurement]:
    place = _prepare(home)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(RUNS):
        for tls in (False, True):
            with _serving(place, tls=tls) as relay:
                spent[tls].append(uvloop.run(_fetch(place, relay, count, tls=tls)))
    ratios = [over / clear for over, clear in zip(spent[True], spent[False], strict=True)]
    yield median_of(
        SPECS[1].name,
        ratios,
        note="both ends, 8 MiB chunks from the page cache, each compared with its SHA-256; one connection",
    )
    yield median_of(SPECS[2].name, [cpu * (1024 * MIB / count) for cpu in spent[False]], note="both ends")
    with _serving(place, tls=True) as relay:
        handshakes = [uvloop.run(_greet(place, relay)) for _ in range(RUNS)]
    yield median_of(SPECS[3].name, handshakes, note="TLS 1.3 with P-256 certificates on both ends, and one question")


async def _fetch(place: _Place, relay: _Relay, count: int, *, tls: bool) -> float:
    """CPU seconds of both ends for that many bytes."""
    async with _client(place, relay, tls=tls) as client:

        async def fetch(wanted: Wanted) -> None:
            into = bytearray()
            await client.fetch(wanted, into, count=lambda count: None)
            check_arrival(wanted, bytes(into), client.url)

        await fetch(place.wanted[0])
        before = relay.cpu() + time.process_time()
        fetched = 0
        while fetched < count:
            for wanted in place.wanted:
                await fetch(wanted)
                fetched += wanted.size
        return (relay.cpu() + time.process_time() - before) * count / fetched


async def _greet(place: _Place, relay: _Relay) -> float:
    """CPU seconds of the relay for as many peers as there may be, each with a connection of its own."""
    before = relay.cpu()
    for _ in range(PEERS):
        async with _client(place, relay, tls=True) as client:
            await client.hello()
    return relay.cpu() - before


async def _attacked() -> list[Measurement]:
    looked: dict[str, Looked] = {}
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as home:
        async with Hostile() as hostile:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.kit.victim",
                home,
                hostile.url,
                stdin=-1,
                stdout=-1,
                limit=1 << 22,
                cwd=ROOT,
            )
            victim = Victim(process)
            await victim.ask("fresh")
            await victim.pulls()
            resting = (await victim.ask("fresh")).peak
            for name, attack in ATTACKS.items():
                looked[name] = await suffers(victim, hostile, attack)
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
    worst = max(looked, key=lambda name: looked[name].peak)
    slowest = max(looked, key=lambda name: looked[name].cpu)
    memory = [max(0.0, (one.peak - resting) / MIB) for one in looked.values()]
    cpu = [one.cpu for one in looked.values()]
    return [
        _most(SPECS[4].name, memory, f"of {len(looked)} attacks: {worst}; resident, above a process at rest"),
        _most(SPECS[5].name, cpu, f"of {len(looked)} attacks: {slowest}; two or more connections"),
    ]


def _most(name: str, values: list[float], note: str) -> Measurement:
    spread = (statistics.median(values), max(values))
    return Measurement(name=name, value=max(values), spread=spread, runs=len(values), note=note)


async def _serve(store_path: Path, files: TlsFiles | None) -> None:
    """The relay's process: serves until stdin ends, and tells its CPU seconds for every line."""
    store = Store.open(store_path)
    reader = Principal(_PEER, frozenset({Right.READ}))
    server = RelayServer(
        store,
        daemon="trainer-1",
        boot="boot",
        door=Doorkeeper(lambda: (("token", reader),), {_PEER: reader}),
        announcements=Announcements(),
        on_report=lambda report: None,
    )
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=files.server() if files else None).start()
    print(runner.addresses[0][1], flush=True)
    read: Callable[[], Awaitable[str]] = lambda: asyncio.to_thread(sys.stdin.readline)  # noqa: E731
    while await read():
        print(time.process_time(), flush=True)
    await runner.cleanup()
    store.close()


if __name__ == "__main__":
    arguments = [Path(argument) for argument in sys.argv[1:]]
    uvloop.run(_serve(arguments[0], TlsFiles(*arguments[1:]) if arguments[1:] else None))
