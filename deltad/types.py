"""The words of deltad as types. Imports nothing of the project but its errors.

A `run` is one training lineage; a `Version` is ordered by (epoch, number) within its run; a
`Variant` is one precision of it. `Digest` is always the 32 raw bytes of a SHA-256, written in hex
where people or URLs see it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import msgspec

from deltad.errors import UsageError

RunId = NewType("RunId", str)
Variant = NewType("Variant", str)
Digest = NewType("Digest", bytes)

DIGEST_BYTES = 32

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_VERSION = re.compile(r"v?([0-9]{1,15})(?:@e([0-9]{1,9}))?", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A version within its run. Ordered by epoch first: a newer epoch beats any older number."""

    epoch: int
    number: int

    def __str__(self) -> str:
        suffix = "" if self.epoch == 1 else f"@e{self.epoch}"
        return f"v{self.number:06d}{suffix}"


@dataclass(frozen=True, slots=True, order=True)
class VersionId:
    """A version and the run it belongs to, printed `<run>/v000123` (`@e2` from the second epoch on)."""

    run: RunId
    version: Version

    def __str__(self) -> str:
        return f"{self.run}/{self.version}"


def parse_run(text: str) -> RunId:
    """A run id: 1 to 64 of `a-z 0-9 . _ -`, starting with a letter or digit. Raises UsageError."""
    return RunId(_parse_name(text, "run id"))


def parse_variant(text: str) -> Variant:
    """A variant name, spelled like a run id (`bf16`, `fp8-block128`). Raises UsageError."""
    return Variant(_parse_name(text, "variant"))


def parse_daemon_name(text: str) -> str:
    """A daemon or replica name, spelled like a run id. Raises UsageError."""
    return _parse_name(text, "name")


def _parse_name(text: str, what: str) -> str:
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{what} {text[:80]!r}",
            expected="1 to 64 of a-z, 0-9, '.', '_', '-', starting with a letter or digit",
        )
    return text


def parse_version(text: str) -> Version:
    """`v000123`, `123` or `v000123@e2`; without an epoch the first one is meant. Raises UsageError."""
    match = _VERSION.fullmatch(text)
    if not match:
        raise UsageError(f"version {text[:80]!r}", expected="a form like v000123, 123 or v000123@e2")
    return Version(epoch=int(match[2] or 1), number=int(match[1]))


def parse_digest(text: str) -> Digest:
    """64 lower-case hex digits, in full. Raises UsageError."""
    if not _HEX.fullmatch(text):
        raise UsageError(f"digest {text[:80]!r}", expected="64 lower-case hex digits")
    return Digest(bytes.fromhex(text))


class Difference(StrEnum):
    """How two bit patterns of one element differ; each is a group acting freely on the patterns.

    `LINE`: distance on the monotone integer line of a float (sign-magnitude read as two's complement).
    `RING`: plain subtraction modulo 2^width, for integers. `XOR`: for packed and opaque lanes.
    """

    LINE = "line"
    RING = "ring"
    XOR = "xor"


@dataclass(frozen=True, slots=True)
class DType:
    """An element type as safetensors names it.

    Comparison works on *lanes*: unsigned integers of `lane_bytes` bytes. A lane is one element, except
    for packed 4-bit and 6-bit types, whose lane is one byte. `bits` is the size of one element.
    """

    name: str
    bits: int
    lane_bytes: int
    difference: Difference


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("BF16", 16, 2, Difference.LINE),
        DType("F16", 16, 2, Difference.LINE),
        DType("F32", 32, 4, Difference.LINE),
        DType("F64", 64, 8, Difference.LINE),
        DType("F8_E4M3", 8, 1, Difference.LINE),
        DType("F8_E5M2", 8, 1, Difference.LINE),
        DType("F8_E4M3FNUZ", 8, 1, Difference.LINE),
        DType("F8_E5M2FNUZ", 8, 1, Difference.LINE),
        DType("F8_E8M0", 8, 1, Difference.RING),
        DType("F4", 4, 1, Difference.XOR),
        DType("F6_E2M3", 6, 1, Difference.XOR),
        DType("F6_E3M2", 6, 1, Difference.XOR),
        DType("I8", 8, 1, Difference.RING),
        DType("U8", 8, 1, Difference.RING),
        DType("I16", 16, 2, Difference.RING),
        DType("U16", 16, 2, Difference.RING),
        DType("I32", 32, 4, Difference.RING),
        DType("U32", 32, 4, Difference.RING),
        DType("I64", 64, 8, Difference.RING),
        DType("U64", 64, 8, Difference.RING),
        DType("BOOL", 8, 1, Difference.XOR),
        DType("C64", 64, 8, Difference.XOR),
    )
}
