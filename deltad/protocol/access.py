"""Who may do what: identities by token or certificate, and what each of them may. Pure.

Owns two invariants: a token is compared in a time that does not depend on what was offered; and nobody who was not
named may do anything.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

ANY_RUN = "*"
_BEARER = "Bearer "


class Right(StrEnum):
    """What an identity may do: `read` versions and report what is served, `publish` versions, `control` what fleets
    serve and what is kept, or `administer`, which is all of these and what is about the daemon itself."""

    READ = "read"
    PUBLISH = "publish"
    CONTROL = "control"
    ADMINISTER = "administer"


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who was recognised, what they may do, and in which runs (`*`: all). `name` is for people."""

    name: str
    rights: frozenset[Right]
    runs: tuple[str, ...] = (ANY_RUN,)

    @property
    def sees_all(self) -> bool:
        """Whether they are bound to no runs."""
        return ANY_RUN in self.runs

    def may(self, right: Right, run: str | None = None) -> bool:
        """Whether they may do it in a run; without one, in any."""
        able = bool(self.rights & {right, Right.ADMINISTER})
        return able and (run is None or self.sees_all or run in self.runs)


EVERYTHING = frozenset({Right.ADMINISTER})
"""What the daemon's own user may."""

Tokens = Callable[[], Iterable[tuple[str, Principal]]]


class Doorkeeper:
    """Recognises callers. `tokens` gives the bearer tokens as they stand now, `peers` who a certificate's name is."""

    def __init__(self, tokens: Tokens, peers: Mapping[str, Principal] | None = None) -> None:
        self._tokens = tokens
        self._peers = dict(peers or {})

    @classmethod
    def of(cls, token: Callable[[], str], *rights: Right) -> Doorkeeper:
        """One who knows one token, with these rights (`read` if none is named) in all runs."""
        known = Principal("token", frozenset(rights or (Right.READ,)))
        return cls(lambda: [(token(), known)])

    def replace(self, other: Doorkeeper) -> None:
        """Know those that the other one knows from now on, and nobody else."""
        self._tokens, self._peers = other._tokens, other._peers

    def admit(self, authorization: str, names: Sequence[str] = ()) -> Principal | None:
        """Whom the header, or else a certificate with these names, belongs to; None for a stranger.

        A token that is wrong is refused, whatever the certificate says.
        """
        if not authorization:
            return next((self._peers[name] for name in names if name in self._peers), None)
        offered = _digest(authorization)
        found = None
        for token, principal in self._tokens():
            # All are compared, and digests have one length: the time tells nothing of what was offered.
            if hmac.compare_digest(offered, _digest(_BEARER + token)):
                found = principal
        return found


def certificate_names(certificate: Mapping[str, object] | None) -> tuple[str, ...]:
    """The DNS names that a checked certificate is for, as the `ssl` module tells of them."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value for kind, value in names if kind == "DNS") if isinstance(names, tuple) else ()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
