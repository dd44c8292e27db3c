"""What a twin, and who pulls from one, ask of a bucket: whole or ranged reads, and writes that never surprise.

A key is a path of plain names below the bucket's prefix. Every method raises UnavailableError where the bucket cannot
be reached or does not move on, DeniedError where it refuses the credentials, NotFoundError for a key that it lacks,
and PeerError for what no bucket should answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

PART_BYTES = 8 << 20
"""What is larger goes up in parts of this size."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which content a key has, as the bucket names it: an entity tag, and a generation where it counts those."""

    tag: str
    generation: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A key with content: its size in bytes and its stamp."""

    key: str
    size: int
    stamp: Stamp


class Bucket(Protocol):
    """A prefix of a bucket. All methods belong to one event loop."""

    url: str
    """For messages; never with a secret in it."""

    async def head(self, key: str) -> Found: ...

    async def read(self, key: str, most: int, *, unlike: Stamp | None = None) -> tuple[bytes, Stamp] | None:
        """The content, of at most `most` bytes; None if it still is `unlike`. Raises PeerError for more bytes."""

    def stream(self, key: str, start: int, size: int) -> AsyncIterator[bytes]:
        """The bytes from `start` on, as they come, of a content that must have `size` bytes in all."""

    async def create(self, key: str, data: bytes) -> bool:
        """Give a key its content in one step. False, and nothing is changed, if it has one."""

    async def put(self, key: str, data: bytes) -> None:
        """Give a key its content, whatever it had, in one step for readers; what is large goes up in parts."""

    async def swap(self, key: str, data: bytes, stamp: Stamp | None) -> Stamp:
        """Replace the content that has `stamp`, None for none at all. Raises ConflictError if it is another by now."""

    async def remove(self, key: str) -> None:
        """Take a key away; one that is not there is no error."""

    def keys(self, prefix: str) -> AsyncIterator[str]:
        """All keys below a path that ends with `/`, in any order."""
