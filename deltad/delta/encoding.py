"""Struct ↔ bytes for everything that is stored or sent: MessagePack, fields in declared order.

Owns one invariant: bytes that decode without an error re-encode to the same bytes, so a digest over
the bytes names the value. Bytes in any other spelling are refused.
"""

from __future__ import annotations

import hashlib
import re
from typing import TypeVar

import msgspec

from deltad.delta import FORMAT
from deltad.errors import FormatError, LimitError
from deltad.types import Digest

SIGNATURE_BYTES = 64
_TOO_LONG = "of length <="  # msgspec's words
_KEY_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)

OLDEST = 1
"""The oldest format that this build reads."""

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


def encode(value: msgspec.Struct) -> bytes:
    """The one spelling of `value`."""
    return _encoder.encode(value)


def decode(kind: type[T], data: bytes, *, what: str, limit: int) -> T:
    """Parse `data` as `kind`. Raises LimitError above `limit` bytes and FormatError for anything else."""
    if len(data) > limit:
        raise LimitError(what, expected=f"at most {limit} bytes", found=f"{len(data)} bytes")
    try:
        value = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        # A list with a limit of its own is refused by its declared length, before an element is made.
        refused = LimitError if _TOO_LONG in str(error) else FormatError
        raise refused(what, found=f"not a {kind.__name__}: {error}") from None
    if _encoder.encode(value) != data:
        raise FormatError(what, found=f"a {kind.__name__} in a spelling other than its canonical one")
    return value


def check_format(number: int, what: str) -> None:
    """Refuse a format number that this build does not read."""
    if number != FORMAT:
        raise FormatError(
            what,
            expected=f"format {FORMAT}",
            found=f"format {number}",
            hint="it was written by another version of deltad; use a build that reads it",
        )


def check_reader(written: int, least: int, what: str) -> None:
    """Refuse by name what needs a newer reader than this build, or is older than anything it reads."""
    for number in (written, least):
        if number < OLDEST:
            check_format(number, what)
    if least > FORMAT:
        check_format(least, what)


def check_signature(key_id: str, signature: bytes, what: str) -> None:
    """Raises FormatError unless both are empty or have the shape of a key's name and of a signature."""
    if not (key_id or signature):
        return
    if not _KEY_ID.fullmatch(key_id) or len(signature) != SIGNATURE_BYTES:
        raise FormatError(
            what,
            expected=f"a key id of 16 hex digits and a signature of {SIGNATURE_BYTES} bytes, or neither",
            found=f"{key_id[:40]!r} and {len(signature)} bytes",
        )


def sha256(data: bytes | memoryview) -> Digest:
    """The name of `data` in every store and on every wire."""
    return Digest(hashlib.sha256(data).digest())
