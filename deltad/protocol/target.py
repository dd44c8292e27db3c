"""What the fleets of a run should serve, and who said so. Pure.

A statement says to which version a fleet (that of one daemon, or all) is held, or that it follows the newest
version again. The daemon where a run is published numbers its statements, and they travel down from there;
any other daemon speaks for its own fleet alone. Owns one invariant, the rule of precedence: the last to speak
wins. Of the statements from above that concern a fleet the one with the highest number counts; what was said
at the fleet's own daemon stands until it is withdrawn there, or until a statement with a higher number than all
that were known when it was made comes from above and concerns the fleet. One that arrives late changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from deltad.errors import FormatError, LimitError, UsageError
from deltad.types import Version, parse_daemon_name

EVERYONE = ""
"""The fleets of all daemons, as the `fleet` of a statement."""
MOST_SEQUENCE = 2**53 - 1
FLEETS = 256
"""For how many fleets a statement of their own may stand at a time."""
REMEMBERED = 64
"""How many of the last statements are remembered, for showing who moved the target."""
REASON_CHARACTERS = 256
_BY_CHARACTERS = 256
_MOST_NUMBER = 10**15 - 1
_MOST_EPOCH = 10**9 - 1


class Statement(msgspec.Struct, frozen=True):
    """`by` said at `daemon` that `fleet` is held at `version`, or with None that it follows the newest one.

    `when` (Unix time) is for people; nothing is decided by it. The `sequence` of a statement about a daemon's own
    fleet that was made there, below the one that publishes, is the highest that it had heard from above.
    """

    sequence: int
    version: Version | None
    fleet: str
    by: str
    why: str
    when: float
    daemon: str

    def __str__(self) -> str:
        """Why a version is kept on its account."""
        whose = f"the fleet of {self.fleet} is" if self.fleet else "all fleets are"
        return f"{whose} held at it by {self.by} at {self.daemon}" + (f": {self.why}" if self.why else "")


class Targets(msgspec.Struct, frozen=True):
    """All that is known at one daemon about the target of one run.

    `heard` are the statements from above, or where the run is published those that were made: at most one a
    fleet, ascending by `sequence`, none that a later one about everyone has replaced. `own` was said here about
    this daemon's own fleet alone. `history` has the last of both, oldest first.
    """

    heard: tuple[Statement, ...] = ()
    own: Statement | None = None
    history: tuple[Statement, ...] = ()

    @property
    def sequence(self) -> int:
        """The highest number that was heard; 0 if there is none."""
        return self.heard[-1].sequence if self.heard else 0

    def standing(self, fleet: str) -> Statement | None:
        """The statement that counts for the fleet of this daemon, or seen from above for another one."""
        heard = next((said for said in reversed(self.heard) if said.fleet in (EVERYONE, fleet)), None)
        own = self.own
        if own is not None and own.fleet == fleet and (heard is None or heard.sequence <= own.sequence):
            return own
        return heard

    def held(self, fleet: str) -> Statement | None:
        """As `standing`, and None where the fleet follows the newest version."""
        said = self.standing(fleet)
        return None if said is None or said.version is None else said

    def named(self) -> dict[Version, Statement]:
        """The versions that some fleet is held at, as far as it is known here, each with who said so."""
        said = (*self.heard, *((self.own,) if self.own and self.own is self.standing(self.own.fleet) else ()))
        return {statement.version: statement for statement in said if statement.version is not None}

    def say(self, version: Version | None, fleet: str, *, by: str, why: str, when: float, daemon: str) -> Targets:
        """A statement where the run is published, about everyone or the fleet of one daemon.

        What stands already is not said again, unless there is another reason now: then this very object is returned.
        One about everyone replaces those about single fleets. Raises LimitError.
        """
        now = self.standing(fleet)
        narrower = fleet == EVERYONE and any(said.fleet != EVERYONE for said in self.heard)
        if version == (now.version if now else None) and not narrower and not _is_new(why, now):
            return self
        return self.hear([Statement(self.sequence + 1, version, fleet, by, why, when, daemon)])

    def say_here(self, version: Version | None, *, by: str, why: str, when: float, daemon: str) -> Targets:
        """A statement at a daemon that pulls the run, about its own fleet; None withdraws the one before.

        What stands already is not said again, unless there is another reason now: then this very object is returned.
        """
        now = self.standing(daemon)
        if version is None and (now is None or now is not self.own):
            return self  # what came from above is for those above to release
        if version is not None and now is not None and now.version == version and not _is_new(why, now):
            return self
        said = Statement(self.sequence, version, daemon, by, why, when, daemon)
        return Targets(self.heard, None if version is None else said, self._remembered([said]))

    def hear(self, statements: Iterable[Statement]) -> Targets:
        """Take in statements from above. Those with a number that is known or lower change nothing.

        Raises FormatError for a malformed one, LimitError for too many fleets; then all are refused.
        """
        new = sorted((said for said in statements if said.sequence > self.sequence), key=lambda said: said.sequence)
        if not new:
            return self
        heard = {said.fleet: said for said in self.heard}
        for said in new:
            check_statement(said)
            if said.fleet == EVERYONE:
                heard.clear()
            heard[said.fleet] = said
        if len(heard) > FLEETS:
            raise LimitError("target", expected=f"statements about at most {FLEETS} fleets", found=f"{len(heard)}")
        return Targets(tuple(sorted(heard.values(), key=lambda said: said.sequence)), self.own, self._remembered(new))

    def after(self, sequence: int) -> tuple[Statement, ...]:
        """What stands and has a higher number than `sequence`: what is passed on to those below."""
        return tuple(said for said in self.heard if said.sequence > sequence)

    def _remembered(self, new: Iterable[Statement]) -> tuple[Statement, ...]:
        return (*self.history, *new)[-REMEMBERED:]


def _is_new(why: str, now: Statement | None) -> bool:
    """Whether a reason is given for what stands that is not the one it has."""
    return now is not None and now.version is not None and why not in ("", now.why)


def check_statement(said: Statement) -> None:
    """Raises FormatError for a statement that nobody can have made."""
    if not 0 < said.sequence <= MOST_SEQUENCE:
        raise FormatError("target", expected=f"a number from 1 to {MOST_SEQUENCE}", found=str(said.sequence))
    thing = f"target statement {said.sequence}"
    version = said.version
    if version is not None and not (1 <= version.epoch <= _MOST_EPOCH and 0 <= version.number <= _MOST_NUMBER):
        raise FormatError(thing, expected="a version", found=f"epoch {version.epoch}, number {version.number}")
    for what, text, most in (("reason", said.why, REASON_CHARACTERS), ("name", said.by, _BY_CHARACTERS)):
        if len(text) > most:
            raise FormatError(thing, expected=f"a {what} of at most {most} characters", found=f"{len(text)}")
    try:
        parse_daemon_name(said.daemon)
        if said.fleet != EVERYONE:
            parse_daemon_name(said.fleet)
    except UsageError as error:
        raise FormatError(thing, found=str(error)) from None


def check_notice(statements: Iterable[Statement], after: int) -> None:
    """Check what one daemon tells another: whole statements, ascending, all above `after`.

    Raises FormatError or LimitError.
    """
    count = 0
    for said in statements:
        check_statement(said)
        if said.sequence <= after:
            raise FormatError(
                "target", expected=f"statements in ascending order, above {after}", found=f"{said.sequence}"
            )
        after, count = said.sequence, count + 1
    if not 0 < count <= FLEETS:
        raise LimitError("target", expected=f"1 to {FLEETS} statements", found=str(count))
