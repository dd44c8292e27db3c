"""The checksums that disk-delta directories carry for the new bytes of each changed tensor, as text."""

from __future__ import annotations

import re
import zlib
from enum import StrEnum
from typing import Protocol

from deltad.errors import MissingPackageError


class Checksum(StrEnum):
    """A `checksum_format`."""

    ADLER32 = "adler32"
    XXH3_128 = "xxh3-128"
    BLAKE3 = "blake3"

    @property
    def digits(self) -> int:
        """Hex digits of one, lower case."""
        return {Checksum.ADLER32: 8, Checksum.XXH3_128: 32, Checksum.BLAKE3: 64}[self]

    @classmethod
    def named(cls, text: str) -> Checksum | None:
        """The one that this spelling names: case and hyphens do not count, and `alder32` is Adler-32."""
        return _SPELLINGS.get(re.sub(r"[-_]", "", text.lower()))

    def begin(self) -> Sum:
        """A sum of nothing. Raises MissingPackageError where the package that computes it is not installed."""
        if self is Checksum.ADLER32:
            return _Adler32()
        try:
            if self is Checksum.XXH3_128:
                import xxhash

                return xxhash.xxh3_128()
            import blake3

            return blake3.blake3()
        except ImportError as error:
            raise MissingPackageError(
                f"checksums in {self}", found=f"{error.name} is not installed", hint="pip install 'deltad[disk-delta]'"
            ) from None


_SPELLINGS = {
    "adler32": Checksum.ADLER32,
    "alder32": Checksum.ADLER32,  # so spelled in a hot-load API
    "xxh3128": Checksum.XXH3_128,
    "blake3": Checksum.BLAKE3,
}


class Sum(Protocol):
    """A checksum that grows."""

    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"
