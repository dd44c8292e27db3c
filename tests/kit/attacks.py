"""The catalogue of attacks of a hostile peer, by name; see `tests.kit.hostile`."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import msgspec

from deltad.delta.encoding import encode, sha256
from deltad.delta.manifest import EdgeKind, PageRef, decode_manifest
from deltad.delta.signing import sign
from deltad.relay.wire import SEAL, Hello, RunNames, seal
from deltad.types import Digest, Version
from tests.kit.hostile import (
    DERIVER,
    STRANGER,
    TRAINER,
    Attack,
    Lie,
    Published,
    Request,
    signed,
    with_layout,
    with_manifest,
)
from tests.kit.versions import Lineage

OBJECT, LATEST, HELLO, RUNS, TARGET = "/objects/", "/runs/[^/]+/latest", "/hello", "/runs$", "/runs/[^/]+/target"
_HUGE = 1 << 60

Answer = Callable[[Request], bytes]


def _raw(text: str, body: bytes = b"") -> Lie:
    async def lie(request: Request) -> None:
        await request.send(text.format(name=request.name).encode("utf-8") + body)

    return lie


def _then_for_ever(text: str, piece: bytes, pause: float = 0.0) -> Lie:
    async def lie(request: Request) -> None:
        await request.send(text.format(name=request.name).encode())
        await request.for_ever(piece, pause)

    return lie


def _object(answer: Answer, **headers: str) -> Lie:
    async def lie(request: Request) -> None:
        await request.tagged(answer(request), {name.replace("_", "-"): value for name, value in headers.items()})

    return lie


def _sealed(body: bytes) -> Lie:
    async def lie(request: Request) -> None:
        await request.sealed(body)

    return lie


async def _silence(request: Request) -> None:
    await asyncio.Event().wait()


async def _reset(request: Request) -> None:
    await request.head("200 OK", {"ETag": f'"{request.name}"', "Content-Length": str(len(request.honest))})
    await request.send(request.honest[: len(request.honest) // 2])
    request.writer.transport.abort()


async def _unasked_part(request: Request) -> None:
    data = request.honest
    said = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}
    await request.tagged(data, said, "206 Partial Content")


async def _redirect(request: Request) -> None:
    await request.reply(b"", "302 Found", {"Location": "http://169.254.169.254/latest/meta-data"})


async def _unsealed(request: Request) -> None:
    await request.reply(request.hostile.version.data, headers={SEAL: seal(b"other")})


async def _nothing_at_once(request: Request) -> None:
    await request.head("204 No Content", {})


_HEAD = 'HTTP/1.1 200 OK\r\nETag: "{name}"\r\n'
_BOMB = gzip.compress(bytes(64 << 20))
_LENGTHS = _HEAD + "Content-Length: 3\r\nContent-Length: 4\r\n\r\n"
_SMUGGLED = _HEAD + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"

_HTTP = [
    Attack("other-bytes", OBJECT, _object(lambda r: bytes(b ^ 1 for b in r.honest)), "SHA-256"),
    Attack("one-byte-short", OBJECT, _object(lambda r: r.honest[:-1]), "bytes"),
    Attack("one-byte-long", OBJECT, _object(lambda r: r.honest + b"\0"), "bytes"),
    Attack("endless-body", OBJECT, _then_for_ever(_HEAD + "\r\n", bytes(65536)), "at most"),
    Attack(
        "endless-chunks",
        OBJECT,
        _then_for_ever(_HEAD + "Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + bytes(65536) + b"\r\n"),
        "at most",
    ),
    Attack(
        "endless-chunk-extension",
        OBJECT,
        _then_for_ever(_HEAD + "Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 4096, 0.001),
        ".",
    ),
    Attack("an-exabyte-announced", OBJECT, _raw(_HEAD + f"Content-Length: {_HUGE}\r\n\r\n"), "bytes"),
    Attack("a-negative-length", OBJECT, _raw(_HEAD + "Content-Length: -1\r\n\r\n"), "an HTTP reply"),
    Attack("two-lengths", OBJECT, _raw(_LENGTHS, b"abcd"), "an HTTP reply"),
    Attack("a-smuggled-reply", OBJECT, _raw(_SMUGGLED), "."),
    Attack("compressed-content", OBJECT, _object(lambda r: zlib.compress(r.honest), Content_Encoding="deflate"), "."),
    Attack("a-gzip-bomb", OBJECT, _object(lambda r: _BOMB, Content_Encoding="gzip"), "."),
    Attack("a-redirect", OBJECT, _redirect, "found HTTP 302"),
    Attack("a-part-that-nobody-asked-for", OBJECT, _unasked_part, "206"),
    Attack("tagged-as-another", OBJECT, _raw('HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 1\r\n\r\nx'), "."),
    Attack("drops-of-a-body", OBJECT, _then_for_ever(_HEAD + "\r\n", b"x", 0.1), "no progress"),
    Attack("silence", OBJECT, _silence, "no progress"),
    Attack("drops-of-a-head", OBJECT, _then_for_ever("HTTP/1.1 200 OK\r\nX: ", b"x", 0.1), "no progress"),
    Attack("an-endless-header", OBJECT, _then_for_ever("HTTP/1.1 200 OK\r\nX: ", b"x" * 4096), "."),
    Attack("endless-headers", OBJECT, _then_for_ever("HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 512), "."),
    Attack("endless-continues", OBJECT, _then_for_ever("", b"HTTP/1.1 100 Continue\r\n\r\n" * 8, 0.005), "."),
    Attack("not-http", OBJECT, _raw("220 mail.example ESMTP\r\n"), "an HTTP reply"),
    Attack("a-cut-in-the-middle", OBJECT, _reset, "the connection was cut"),
    Attack("server-errors", OBJECT, _raw("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"), "HTTP 500"),
    Attack("a-billion-brackets", HELLO, _sealed(b"[" * 1_000_000), "Hello"),
    Attack("deep-json", HELLO, _sealed(b'{"x":' * 100_000 + b"1" + b"}" * 100_000), "Hello"),
    Attack("too-much-json", HELLO, _sealed(b'"' + b"x" * (2 << 20) + b'"'), "at most"),
    Attack("a-huge-number", HELLO, _sealed(b'{"daemon":"a","boot":"b","formats":[1' + b"0" * 5000 + b"]}"), "."),
    Attack("another-format", HELLO, _sealed(msgspec.json.encode(Hello("a", "b", (7,), (0,)))), "reads format"),
    Attack("names-that-are-paths", RUNS, _sealed(msgspec.json.encode(RunNames(("../../etc",)))), "."),
    Attack("names-in-capitals", RUNS, _sealed(msgspec.json.encode(RunNames(("Policy",)))), "."),
    Attack("names-that-look-alike", RUNS, _sealed(msgspec.json.encode(RunNames(("pоlicy",)))), "."),
    Attack("names-with-nul", RUNS, _sealed(b'{"runs":["policy\\u0000"]}'), "."),
    Attack("a-target-of-nonsense", TARGET, _sealed(b'{"statements":[{"sequence":-1}]}'), "."),
    Attack("nothing-again-and-again", LATEST, _nothing_at_once, ""),
    Attack("an-unsealed-record", LATEST, _unsealed, "seals"),
    Attack("a-record-without-end", LATEST, _raw(f"HTTP/1.1 200 OK\r\nContent-Length: {1 << 40}\r\n\r\n"), "at most"),
]


def _records() -> list[Attack]:
    """Lies about versions, each in a record that says so."""
    lineage = Lineage(tensors=2)
    first = lineage.publish()
    plain = first.record
    variant, edge = plain.variants[0], plain.variants[0].edges[0]

    def record(name: str, says: str, made: Published) -> Attack:
        return Attack(name, LATEST, _sealed(made.data), says)

    def changed(**changes: object) -> Published:
        return signed(first, **changes)

    forged = msgspec.structs.replace(sign(plain, TRAINER), created_ns=7).encode()
    own_base = msgspec.structs.replace(edge, kind=EdgeKind.DELTA, base=plain.version)
    return [
        record("an-unsigned-record", "found none", first),
        record("signed-by-a-stranger", f"found one of key {STRANGER.public.id}", signed(first, STRANGER)),
        record("signed-without-the-scope", "which may not publish", signed(first, DERIVER)),
        Attack("a-forged-record", LATEST, _sealed(forged), "it was forged"),
        record("a-record-of-another-run", "policy", changed(run="other")),
        record("a-run-that-is-a-path", "run", changed(run="../../policy")),
        record("epoch-zero", "epoch", changed(version=Version(0, 1))),
        record("a-number-below-zero", "number", changed(version=Version(1, -1))),
        record("sequence-zero", "sequence", changed(sequence=0)),
        record("a-record-of-the-future", "format", changed(format=9, least_reader=9)),
        record("its-own-base", ".", changed(variants=(msgspec.structs.replace(variant, edges=(own_base,)),))),
        record("no-variants", "variants", changed(variants=())),
        record("short-digests", "digests", changed(variants=(msgspec.structs.replace(variant, root=b"x"),))),
        record("a-layout-of-an-exabyte", ".", changed(variants=(msgspec.structs.replace(variant, layout_size=_HUGE),))),
        Attack("deep-messagepack", LATEST, _sealed(b"\x91" * 500_000), "version record"),
        Attack("a-billion-fields", LATEST, _sealed(b"\xdf\x3b\x9a\xca\x00"), "version record"),
    ]


def _versions() -> list[Attack]:
    """Whole versions, signed by the publisher's own key, whose parts lie: a publisher that was taken over."""
    published = Lineage(tensors=2).publish()
    layout = published.layout
    twice = encode(msgspec.structs.replace(layout, tensors=(layout.tensors[0], layout.tensors[0])))
    unsorted = encode(msgspec.structs.replace(layout, tensors=layout.tensors[::-1]))
    vast = msgspec.structs.replace(layout.tensors[0], shape=(1 << 40, 1 << 40))
    billion = encode(layout).replace(b"\xa7tensors\x92", b"\xa7tensors\xdd\x3b\x9a\xca\x00")
    code = msgspec.structs.replace(layout.files[0], name="modeling_evil.py")
    path = msgspec.structs.replace(layout.files[0], name="../../../etc/cron.d/evil")
    manifest = decode_manifest(published.objects[Digest(published.record.variants[0].edges[0].manifest)])
    endless = tuple(PageRef(sha256(b"%d" % i), 4096, 1) for i in range(50_000))

    def made(name: str, says: str, version: Published) -> Attack:
        return Attack(name, OBJECT, None, says, version)

    return [
        made("a-tensor-twice", "ascending order", with_layout(published, twice)),
        made("tensors-out-of-order", "ascending order", with_layout(published, unsorted)),
        made(
            "a-tensor-of-yottabytes",
            "at most",
            with_layout(published, encode(msgspec.structs.replace(layout, tensors=(vast,)))),
        ),
        made("a-billion-tensors", "layout", with_layout(published, billion)),
        made(
            "code-among-the-files",
            "known non-weight files",
            with_layout(published, encode(msgspec.structs.replace(layout, files=(code,)))),
        ),
        made(
            "a-file-that-is-a-path",
            "known non-weight files",
            with_layout(published, encode(msgspec.structs.replace(layout, files=(path,)))),
        ),
        made("a-layout-of-noise", "layout", with_layout(published, bytes(range(256)))),
        made(
            "another-root",
            "root",
            with_manifest(
                published,
                encode(
                    msgspec.structs.replace(manifest, target=msgspec.structs.replace(manifest.target, root=bytes(32)))
                ),
            ),
        ),
        made(
            "more-pages-than-there-can-be",
            ".",
            with_manifest(published, encode(msgspec.structs.replace(manifest, pages=endless))),
        ),
        made("a-manifest-of-noise", "manifest", with_manifest(published, b"\x93\x01\x02")),
        made("a-manifest-that-is-shorter-than-said", "bytes", with_manifest(published, encode(manifest), 1 << 20)),
    ]


ATTACKS = {attack.name: attack for attack in (*_HTTP, *_records(), *_versions())}
