"""Whose records and edges are believed: a list of keys, each with what it may vouch for. Pure.

Owns one invariant: where a run has keys at all, nothing of it is believed that none of them has signed, with the
scope for it, over just these bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from deltad.delta.heartbeat import Heartbeat
from deltad.delta.keys import PublicKey
from deltad.delta.manifest import EdgeKind, Manifest
from deltad.delta.record import VersionRecord
from deltad.delta.signing import is_signed_by
from deltad.errors import IntegrityError, UntrustedError
from deltad.types import RunId

ANY_RUN = "*"


class Scope(StrEnum):
    """What a key may vouch for: `publish` versions, or `derive` edges between versions that were published."""

    PUBLISH = "publish"
    DERIVE = "derive"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key and what it is trusted for, in these runs (`*`: all)."""

    key: PublicKey
    scopes: frozenset[Scope]
    runs: tuple[str, ...] = (ANY_RUN,)
    name: str = ""

    def speaks_for(self, run: str) -> bool:
        return ANY_RUN in self.runs or run in self.runs


class TrustList:
    """All keys that a daemon trusts. Rotation is two keys for a while; revocation is one key less."""

    def __init__(self, keys: Iterable[TrustedKey] = ()) -> None:
        self._keys = tuple(keys)

    def replace(self, keys: TrustList) -> None:
        """Trust those keys from now on, and no other."""
        self._keys = keys._keys

    def demands(self, run: RunId) -> bool:
        """Whether signatures are demanded for a run: any key is trusted for it."""
        return any(key.speaks_for(run) for key in self._keys)

    def check_record(self, record: VersionRecord) -> None:
        """Raises UntrustedError unless a key with the scope `publish` has signed, where the run demands it."""
        self._check(record, record.run, Scope.PUBLISH, f"record of {record.id}")

    def check_heartbeat(self, beat: Heartbeat) -> None:
        """Like `check_record`, for a publisher's sign of life."""
        self._check(beat, beat.run, Scope.PUBLISH, f"heartbeat of {beat.run}")

    def check_derived(self, manifest: Manifest) -> None:
        """Like `check_record`, for an edge that no record names; the publisher may derive as well."""
        thing = f"{manifest.kind} to {manifest.target.version} of {manifest.run}"
        if manifest.kind is EdgeKind.DELTA:
            raise IntegrityError(
                thing, expected="a skip delta or an anchor, or a record that names it", found="neither"
            )
        self._check(manifest, manifest.run, Scope.DERIVE, thing)

    def _check(self, signed: VersionRecord | Manifest | Heartbeat, run: str, scope: Scope, thing: str) -> None:
        trusted = [key for key in self._keys if key.speaks_for(run)]
        if not trusted:
            return
        able = [key for key in trusted if key.scopes & {scope, Scope.PUBLISH}]
        expected = f"a signature of {_named(able, scope)}"
        if not signed.signature:
            raise UntrustedError(thing, expected=expected, found="none", hint=_HINT)
        named = [key for key in trusted if key.key.id == signed.key_id]
        if not named:
            raise UntrustedError(thing, expected=expected, found=f"one of key {signed.key_id}", hint=_HINT)
        if not any(key in able for key in named):
            found = f"one of key {signed.key_id}, which may not {scope}"
            raise UntrustedError(thing, expected=expected, found=found, hint=_HINT)
        if not is_signed_by(signed, named[0].key):
            raise UntrustedError(
                thing, expected=expected, found=f"one of key {signed.key_id} over other bytes", hint="it was forged"
            )


_HINT = "`deltad keys show` lists the keys that are trusted here"


def _named(keys: list[TrustedKey], scope: Scope) -> str:
    names = sorted(f"{key.name} ({key.key.id})" if key.name else key.key.id for key in keys)
    return " or ".join(names) if names else f"a key that may {scope}, and none is trusted for that"
