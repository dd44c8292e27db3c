"""What daemons say to each other: bodies, the spelling of versions, and the header that seals a body.

Both ends import this and nothing of one another. Objects are named by their digest; every other body of
a 200 reply, and a report, carries `Repr-Digest` (RFC 9530), so that a byte that changed on the way is
noticed before anything is parsed. It guards against accident; signatures guard against malice.
"""

from __future__ import annotations

import base64
import re

import msgspec

from deltad.delta.encoding import sha256
from deltad.errors import UsageError
from deltad.protocol.target import MOST_SEQUENCE, Statement
from deltad.types import Version

PREFIX = "/v1/relay"
SEAL = "Repr-Digest"
LISTED_VERSIONS = 10_000

_DOTTED = re.compile(r"([0-9]{1,9})\.([0-9]{1,15})", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", re.ASCII)
_SEQUENCE = re.compile(r"[0-9]{1,16}", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{1,18})-", re.ASCII)


class Hello(msgspec.Struct, frozen=True):
    """Who answers: its name, the id of its current life, and the formats and coders that it reads.

    Who pulls asks for its format; the coders are told for people, since every manifest names those of its edge.
    """

    daemon: str
    boot: str
    formats: tuple[int, ...]
    coders: tuple[int, ...]


class RunNames(msgspec.Struct, frozen=True):
    """The runs of which a daemon has versions."""

    runs: tuple[str, ...]


class VersionNames(msgspec.Struct, frozen=True):
    """Versions (`E.N`) in ascending order; the newest `LISTED_VERSIONS` where there are more."""

    versions: tuple[str, ...]


class TargetNotice(msgspec.Struct, frozen=True):
    """What stands about the target of a run and was not known yet: at most one statement a fleet, ascending.

    Versions in it are `[epoch, number]`.
    """

    statements: tuple[Statement, ...]


def dotted(version: Version) -> str:
    """`E.N`: epoch and number."""
    return f"{version.epoch}.{version.number}"


def parse_dotted(text: str) -> Version:
    """`E.N`, with an epoch of at least 1. Raises UsageError."""
    match = _DOTTED.fullmatch(text)
    if not match or int(match[1]) < 1:
        raise UsageError(f"version {text[:80]!r}", expected="epoch and number, like 1.123")
    return Version(int(match[1]), int(match[2]))


def parse_seconds(text: str) -> float:
    """A duration in plain decimals. Raises UsageError."""
    if not _SECONDS.fullmatch(text):
        raise UsageError(f"wait {text[:80]!r}", expected="seconds, like 30 or 0.5")
    return float(text)


def parse_sequence(text: str) -> int:
    """The number of a statement, or 0 for before the first one. Raises UsageError."""
    if not _SEQUENCE.fullmatch(text) or int(text) > MOST_SEQUENCE:
        raise UsageError(f"after {text[:80]!r}", expected=f"a whole number from 0 to {MOST_SEQUENCE}")
    return int(text)


def parse_range(text: str) -> int | None:
    """The first byte of `bytes=N-`, the one form of a range that resuming needs; None for any other."""
    match = _RANGE.fullmatch(text)
    return int(match[1]) if match else None


def seal(data: bytes) -> str:
    """The value of the `SEAL` header of a body."""
    return f"sha-256=:{base64.b64encode(sha256(data)).decode()}:"
