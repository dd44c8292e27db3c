"""A publisher's sign of life: signed, numbered, and naming the newest version of its run.

A few bytes that every relay passes on verbatim. Which one is newer is told by `number` alone, which grows with each
that a publisher makes, over its restarts too; no clock is in it.
"""

from __future__ import annotations

import msgspec

from deltad.delta.encoding import check_format, check_signature, decode, encode
from deltad.errors import FormatError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import Version, VersionId, parse_run

MOST_NUMBER = 2**63 - 1


class Heartbeat(msgspec.Struct, frozen=True):
    """`latest` is the newest version of the run when this was made; None before the first one."""

    format: int
    run: str
    number: int
    latest: Version | None
    key_id: str = ""
    signature: bytes = b""

    def encode(self) -> bytes:
        return encode(self)

    def __str__(self) -> str:
        at = f"at {VersionId(parse_run(self.run), self.latest)}" if self.latest else "before its first version"
        return f"heartbeat {self.number} of {self.run}, {at}"


def decode_heartbeat(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Heartbeat:
    """Parse and check a heartbeat. Raises FormatError or LimitError."""
    beat = decode(Heartbeat, data, what="heartbeat", limit=limits.heartbeat_bytes)
    check_format(beat.format, "heartbeat")
    check_signature(beat.key_id, beat.signature, "heartbeat")
    try:
        parse_run(beat.run)
    except UsageError as error:
        raise FormatError("heartbeat", found=str(error)) from None
    if not 1 <= beat.number <= MOST_NUMBER:
        raise FormatError("heartbeat", expected=f"a number from 1 to {MOST_NUMBER}", found=f"{beat.number}")
    return beat
