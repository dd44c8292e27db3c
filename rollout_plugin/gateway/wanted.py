"""Which weight versions a request accepts, and what shall happen to its answer when they are swapped.

Pure: what it says depends on its arguments alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

from deltad.errors import UsageError
from deltad.types import Version, parse_version

LONGEST_WAIT = 600.0
"""Seconds that a request may ask to be held back."""


class OnSwap(StrEnum):
    """What becomes of an answer when its replica swaps weights in the midst of it.

    `keep`: it goes on with the new weights over the cache of the old ones. `abort`: it ends with what the old ones
    gave. `resume`: what the old ones gave stays, and is read anew by the new ones, which go on from there.
    """

    KEEP = "keep"
    ABORT = "abort"
    RESUME = "resume"


class WeightVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `weight_version` of a request, as it is written. Versions are text like `v000123` or `v000123@e2`.

    `wait`: seconds to be held back for a version that cannot be served now.
    """

    min: str = ""
    exact: str = ""
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    wait: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT)] = 0.0
    on_swap: OnSwap = OnSwap.KEEP


@dataclass(frozen=True, slots=True)
class Wanted:
    """The versions that will do: `least` or newer, `exact` alone, at most `max_staleness` behind the newest."""

    least: Version | None = None
    exact: Version | None = None
    max_staleness: int | None = None
    wait: float = 0.0
    on_swap: OnSwap = OnSwap.KEEP

    def takes(self, version: Version, staleness: int) -> bool:
        """Whether a replica that serves `version`, with `staleness` newer ones in the run, may answer."""
        if self.exact is not None:
            return version == self.exact
        if self.least is not None and version < self.least:
            return False
        return self.max_staleness is None or staleness <= self.max_staleness

    def takes_token(self, version: Version) -> bool:
        """Whether an answer may hold a token of this version."""
        return self.exact is None or version == self.exact

    def __str__(self) -> str:
        if self.exact is not None:
            return f"{self.exact} exactly"
        said = [f"{self.least} or newer"] if self.least is not None else []
        if self.max_staleness is not None:
            said.append(f"at most {self.max_staleness} behind the newest")
        return ", ".join(said) or "any version"


def parse_wanted(asked: WeightVersion, most_stale: int | None = None) -> Wanted:
    """What a request wants, within the bound on staleness that the gateway itself has. Raises UsageError."""
    if asked.exact and (asked.min or asked.max_staleness is not None):
        raise UsageError("weight_version", expected="`exact` alone, or `min` and `max_staleness`", found="both")
    bounds = [bound for bound in (asked.max_staleness, most_stale) if bound is not None]
    return Wanted(
        least=parse_version(asked.min) if asked.min else None,
        exact=parse_version(asked.exact) if asked.exact else None,
        max_staleness=min(bounds) if bounds and not asked.exact else None,
        wait=asked.wait,
        on_swap=asked.on_swap,
    )
