"""What a publisher's ranks hand over to their daemon, and how it lies on the wire.

Every rank first says what it holds (`JoinRequest`) and is told what of it to hand over (`JoinReply`). A step is one
request a rank: blocks, each a kind (one byte), a length (four, little-endian) and so many bytes. The first block is a
`HandOver`, then come chunks, and the last is a `HandedOver`; whatever ends without it never happened. The reply comes
once the version that all ranks made together is durable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from deltad.client.messages import VersionInfo
from deltad.limits import DEFAULT_LIMITS
from deltad.types import Version

BLOCK = struct.Struct("<BI")
HEAD, CHUNK, TAIL = 1, 2, 3

_Kind = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z]{1,40}$")]
_Dims = Annotated[tuple[int, ...], msgspec.Meta(max_length=DEFAULT_LIMITS.tensor_dims)]


class ShardSpec(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of one tensor that a rank holds: its name, dtype and whole shape, and where it lies there."""

    name: str
    dtype: str
    shape: _Dims
    offset: _Dims
    extent: _Dims


class JoinRequest(msgspec.Struct, frozen=True):
    """A rank joins the `world` ranks that publish a run together; `session` is a name that they share.

    Shards that several ranks hold alike are handed over by one of them. `files` are the non-weight files of the
    checkpoint (config.json above all), from one rank or, alike, from several. `wait`: seconds to wait for the others.
    """

    session: str
    rank: int
    world: int
    shards: Annotated[tuple[ShardSpec, ...], msgspec.Meta(max_length=1_000_000)]
    files: Annotated[tuple[tuple[str, bytes], ...], msgspec.Meta(max_length=DEFAULT_LIMITS.files)] = ()
    wait: float = 60.0


class JoinReply(msgspec.Struct, frozen=True):
    """All ranks have joined. `owned` numbers the shards, as they were declared, that this rank is to hand over, in
    ascending order; `latest` is the newest version of the run, and `mode` how the next delta is to be coded."""

    layout: bytes
    owned: tuple[int, ...]
    latest: Version | None
    mode: str


class HandOver(msgspec.Struct, frozen=True):
    """What a rank hands over: its owned shards at a step, against `base`, or whole.

    What names the version (`number` to `epoch`) has to be the same on every rank; see `PublishRequest`. `skipped`
    counts, by kind, the steps that the rank skipped since its last share became a version.
    """

    session: str
    rank: int
    number: int
    base: Version | None = None
    identity: str = ""
    new_epoch: bool = False
    resume_from: str = ""
    epoch: int = 0
    skipped: Annotated[dict[_Kind, int], msgspec.Meta(max_length=32)] = {}


class HandedOver(msgspec.Struct, frozen=True):
    """The end of a rank's share. `sums` and `base_sums` hold, for each of its owned shards, the element sum that its
    lanes have at the step and had at the base (none where it is whole), 16 bytes each; `changed` counts lanes."""

    sums: bytes
    base_sums: bytes
    changed: int
    coders: Annotated[tuple[int, ...], msgspec.Meta(max_length=DEFAULT_LIMITS.coders)]


class HandOverReply(msgspec.Struct, frozen=True):
    """The version that all ranks made, and how the next delta is to be coded; `already`: see `PublishReply`."""

    version: VersionInfo
    already: bool
    mode: str


def body(head: HandOver, chunks: Iterator[bytes], tail: Callable[[], HandedOver]) -> Iterator[bytes]:
    """The body of a step's request; `tail` is asked once the chunks are at their end."""
    yield block(HEAD, msgspec.msgpack.encode(head))
    for chunk in chunks:
        yield block(CHUNK, chunk)
    yield block(TAIL, msgspec.msgpack.encode(tail()))


def block(kind: int, data: bytes) -> bytes:
    """One block as it lies on the wire."""
    return BLOCK.pack(kind, len(data)) + data
