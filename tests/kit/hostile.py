"""A hostile peer: a relay over a raw socket that answers honestly but for one attack at a time.

    async with Hostile() as hostile:
        hostile.begin(ATTACKS["a-record-of-another-run"])
        ... let a daemon pull from hostile.url ...
        await hostile.until_told(2)

It speaks HTTP by hand, so that heads can lie as well as bodies. What it publishes is signed by `TRAINER`; an attack may
hand out a version of its own, signed by whomever it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from deltad.delta.encoding import sha256
from deltad.delta.keys import SigningKey
from deltad.delta.signing import sign
from deltad.relay.wire import PREFIX, SEAL, Hello, RunNames, VersionNames, dotted, seal
from deltad.types import Digest
from tests.kit.versions import Lineage, Published

TRAINER, DERIVER, STRANGER = (SigningKey.from_seed(bytes([n] * 32)) for n in (1, 2, 3))
_PIECE = bytes(64 << 10)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, and where the answer goes."""

    method: str
    path: str
    headers: Mapping[str, str]
    writer: asyncio.StreamWriter
    hostile: Hostile

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.partition("?")[0].rsplit("/", 1)[1]

    @property
    def honest(self) -> bytes:
        """The object that was asked for."""
        return self.hostile.objects.get(Digest(bytes.fromhex(self.name)), b"nothing")

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError once the other end is gone."""
        self.hostile.sent += len(data)
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, body: bytes, status: str = "200 OK", headers: Mapping[str, str] | None = None) -> None:
        head = {"Content-Length": str(len(body)), **(headers or {})}
        await self.head(status, head)
        await self.send(body)

    async def head(self, status: str, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        await self.send("\r\n".join(lines).encode("utf-8"))

    async def sealed(self, body: bytes) -> None:
        await self.reply(body, headers={SEAL: seal(body)})

    async def tagged(self, body: bytes, headers: Mapping[str, str] | None = None, status: str = "200 OK") -> None:
        """An object, as an honest head announces it."""
        await self.reply(body, status, {"ETag": f'"{self.name}"', **(headers or {})})

    async def for_ever(self, data: bytes, pause: float = 0.0) -> None:
        """Send it again and again, until the other end is gone."""
        while True:
            await self.send(data)
            await asyncio.sleep(pause)


Lie = Callable[[Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """A lie about what lies below `at`, a pattern of paths. `version` is what is published meanwhile, if it is another.

    `says` is a pattern of what the victim says of it; empty where nothing that is said is wrong.
    """

    name: str
    at: str
    lie: Lie | None
    says: str = ""
    version: Published | None = None


@dataclass
class Hostile:
    """The peer. `told` counts lies, `sent` bytes."""

    told: int = 0
    sent: int = 0
    port: int = 0
    _attack: Attack | None = None
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.published = signed(Lineage(tensors=2).publish())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def version(self) -> Published:
        return (self._attack and self._attack.version) or self.published

    @property
    def objects(self) -> Mapping[Digest, bytes]:
        return self.version.objects

    def begin(self, attack: Attack | None) -> None:
        """From now on, this attack; with None, nothing but the truth."""
        self._attack = attack
        self.told = self.sent = 0

    async def until_told(self, times: int) -> None:
        while self.told < times:
            self._news.clear()
            await self._news.wait()

    async def cut_all(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Hostile:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut_all()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other end is gone, or the attack is over
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on: after a lie it does not."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(method, path.removeprefix(PREFIX), headers, writer, self)
        attack = self._attack
        if attack is not None and attack.lie is not None and re.match(attack.at, request.path):
            self.told += 1
            self._news.set()
            await attack.lie(request)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            return False
        if attack is not None and attack.lie is None and re.match(attack.at, request.path):
            self.told += 1
            self._news.set()
        await self._truth(request)
        return True

    async def _truth(self, request: Request) -> None:
        path, _, query = request.path.partition("?")
        version = self.version
        match path.strip("/").split("/"):
            case ["hello"]:
                await request.sealed(msgspec.json.encode(Hello("hostile", "boot-1", (1,), (0, 1, 2, 3))))
            case ["runs"]:
                await request.sealed(msgspec.json.encode(RunNames((version.run,))))
            case ["runs", _, "latest"] if f"after={dotted(version.version)}" not in query:
                await request.sealed(version.data)
            case ["runs", _, "records"]:
                await request.sealed(msgspec.json.encode(VersionNames((dotted(version.version),))))
            case ["runs", _, "latest" | "target"]:
                await asyncio.sleep(0.2)
                await request.head("204 No Content", {})
            case ["objects", name] if Digest(bytes.fromhex(name)) in self.objects:
                await request.tagged(request.honest)
            case ["report"]:
                await request.sealed(b"{}")
            case _:
                await request.reply(b"", "404 Not Found")


def signed(published: Published, key: SigningKey = TRAINER, **changes: object) -> Published:
    """A version whose record says other things, signed by a key."""
    record = sign(msgspec.structs.replace(published.record, **changes), key)
    return Published(record, record.encode(), published.objects, published.chunks, published.weights, published.layout)


def with_layout(published: Published, layout: bytes) -> Published:
    """A signed version that names these bytes as its layout."""
    variant = msgspec.structs.replace(published.record.variants[0], layout=sha256(layout), layout_size=len(layout))
    made = signed(published, variants=(variant,))
    return _with_objects(made, {**published.objects, sha256(layout): layout})


def with_manifest(published: Published, manifest: bytes, size: int | None = None) -> Published:
    """A signed version that names these bytes as the manifest of its one edge, of `size` bytes as it says."""
    edge = msgspec.structs.replace(
        published.record.variants[0].edges[0], manifest=sha256(manifest), size=size or len(manifest)
    )
    variant = msgspec.structs.replace(published.record.variants[0], edges=(edge,))
    made = signed(published, variants=(variant,))
    return _with_objects(made, {**published.objects, sha256(manifest): manifest})


def _with_objects(published: Published, objects: dict[Digest, bytes]) -> Published:
    return Published(published.record, published.data, objects, published.chunks, published.weights, published.layout)
