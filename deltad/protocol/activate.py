"""One replica's life: what may follow what, and what to do next.

Sans-IO: facts come in as events, decisions go out for a shell to carry out, in order. It may not
touch weights, sockets or clocks. Owns one invariant: a version is *verified* only when the root that
was read back from everything served equals the root that was published, and a replica whose weights
are not known to be one version is *fenced*.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from deltad.client.messages import NextReply, ReplicaState, Seconds, StateRequest, Step
from deltad.errors import BaseMismatchError, DeltadError, ReplicaError
from deltad.types import Digest, Version, parse_version

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
"""Seconds between tries that fail: doubled each time, and drawn from the upper half."""


# What has happened.


@dataclass(frozen=True, slots=True)
class Registered:
    """The daemon knows this replica: for the first time, or again, after it forgot."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The daemon's answer to the last `Ask`."""

    reply: NextReply


@dataclass(frozen=True, slots=True)
class Staged:
    """All that the version needs is here, decoded and checked; the live weights are as they were."""

    version: Version
    root: Digest
    seconds: float


@dataclass(frozen=True, slots=True)
class StageFailed:
    """Staging gave up. The live weights are as they were."""

    error: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """This engine can never take the target: another layout, a tensor that it does not have. Nothing was touched."""

    error: str


@dataclass(frozen=True, slots=True)
class CommitBegun:
    """Generation stands still and the first write is about to happen."""


@dataclass(frozen=True, slots=True)
class Committed:
    """All writes are done, the sums that followed them are right, and generation goes on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The commit failed; every write was undone and the sums are those of the version before."""

    error: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The weights are no version at all, or cannot be read: a commit failed and could not be undone.

    `wrong_root`: everything was written, and it is not the target; writing it again will not help.
    """

    error: str
    wrong_root: bool = False


@dataclass(frozen=True, slots=True)
class ReadBack:
    """All served weights were read, and this is their root."""

    root: Digest
    seconds: float


Event = Registered | Offered | Staged | StageFailed | Unfit | CommitBegun | Committed | RolledBack | Broken | ReadBack


# What to do now.


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the daemon. Losing it only delays: the newest one is sent again after each registration."""

    state: StateRequest


@dataclass(frozen=True, slots=True)
class Ask:
    """Long-poll for anything after `after` (None: nothing is served), once `delay` seconds are over."""

    after: Version | None
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class StageSteps:
    """Fetch, check and decode these deltas, which lead in order from what is served to the target."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class StageExport:
    """Get a whole checkpoint of the target."""

    target: Version


@dataclass(frozen=True, slots=True)
class Commit:
    """Make what is staged live. `cache` says what becomes of cached keys and values; empty: as the engine would."""

    cache: str = ""


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Read everything that is served and compute its root."""


@dataclass(frozen=True, slots=True)
class Serve:
    """The weights are this version, verified: answer requests."""

    version: Version


@dataclass(frozen=True, slots=True)
class Fence:
    """Refuse all requests, those that run included, with this reason until the next `Serve`."""

    reason: str


Decision = Report | Ask | StageSteps | StageExport | Commit | ReadWeights | Serve | Fence


class Cause(StrEnum):
    """An event, judged: what the table of transitions is keyed by."""

    REGISTERED = "registered"
    OFFER_TAKEN = "offer taken"
    OFFER_REFUSED = "offer refused"
    NOTHING_OFFERED = "nothing offered"
    STAGED = "staged"
    STAGE_FAILED = "stage failed"
    UNFIT = "unfit"
    UNFIT_ALONE = "unfit, and nothing else is served"
    COMMIT_BEGUN = "commit begun"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    BROKEN = "broken"
    ROOT_RIGHT = "root right"
    ROOT_WRONG = "root wrong"


_S, _C = ReplicaState, Cause

RESTING = (_S.REGISTERED, _S.VERIFIED, _S.FENCED)
"""The states in which a replica asks for work; staging that fails returns to where it came from."""

TRANSITIONS: dict[ReplicaState, dict[Cause, ReplicaState | None]] = {
    _S.REGISTERED: {
        _C.REGISTERED: _S.REGISTERED,
        _C.NOTHING_OFFERED: _S.REGISTERED,
        _C.OFFER_REFUSED: _S.REGISTERED,
        _C.OFFER_TAKEN: _S.STAGING,
    },
    _S.STAGING: {
        _C.STAGED: _S.READY,
        _C.STAGE_FAILED: None,  # back to the resting state before
        _C.UNFIT: None,  # what is served was not touched
        _C.UNFIT_ALONE: _S.FENCED,
        _C.BROKEN: _S.FENCED,  # a delta was read beside the weights, and they are not what they were
    },
    _S.READY: {
        _C.COMMIT_BEGUN: _S.COMMITTING,
    },
    _S.COMMITTING: {
        _C.COMMITTED: _S.COMMITTED,
        _C.ROLLED_BACK: _S.ROLLED_BACK,
        _C.BROKEN: _S.FENCED,
    },
    _S.COMMITTED: {
        _C.ROOT_RIGHT: _S.VERIFIED,
        _C.ROOT_WRONG: _S.FENCED,
        _C.BROKEN: _S.FENCED,
    },
    _S.ROLLED_BACK: {
        _C.ROOT_RIGHT: _S.VERIFIED,
        _C.ROOT_WRONG: _S.FENCED,
        _C.BROKEN: _S.FENCED,
    },
    _S.VERIFIED: {
        _C.REGISTERED: _S.VERIFIED,
        _C.NOTHING_OFFERED: _S.VERIFIED,
        _C.OFFER_REFUSED: _S.VERIFIED,
        _C.OFFER_TAKEN: _S.STAGING,
    },
    _S.FENCED: {
        _C.REGISTERED: _S.FENCED,
        _C.NOTHING_OFFERED: _S.FENCED,
        _C.OFFER_REFUSED: _S.FENCED,
        _C.OFFER_TAKEN: _S.STAGING,
    },
}


@dataclass(frozen=True, slots=True)
class Serving:
    """A version and the root it must have. `read` tells that the root was read back from the weights."""

    version: Version
    root: Digest
    read: bool = False


def check_chain(steps: Sequence[Step], serving: Serving | None, target: str) -> None:
    """Raises BaseMismatchError unless `steps` lead, base root by base root, from what is served to `target`."""
    version, root = (str(serving.version), serving.root.hex()) if serving else ("nothing", "")
    for step in steps:
        if step.base_root != root:
            raise BaseMismatchError(
                f"delta {step.base} → {step.version}",
                expected=f"to start from {version}, root {root[:16] or 'none'}",
                found=f"root {step.base_root[:16]}",
                hint="nothing was touched; the daemon is asked again",
            )
        version, root = step.version, step.root
    if version != target:
        raise BaseMismatchError(f"offer of {target}", expected="deltas that lead there", found=f"they end at {version}")


class Activation:
    """The machine. `handle` takes an event and returns what to do, in order.

    A fenced replica heals by a whole checkpoint alone. A target is given up, until another one is
    offered, where trying again cannot help: it does not fit the engine, or a whole checkpoint of it was
    written and has another root. It is declined as often as it is offered, at growing intervals.
    """

    def __init__(self, rng: random.Random) -> None:
        self.state = ReplicaState.REGISTERED
        self.serving: Serving | None = None
        """What the weights are. None before the first load, and while fenced."""
        self.error = ""
        self._rng = rng
        self._resting = ReplicaState.REGISTERED
        self._staged: Serving | None = None
        self._seconds = Seconds()
        self._failures = 0
        self._target: Version | None = None
        self._whole = False
        self._cache = ""
        self._given_up: Version | None = None
        self._declined = 0

    def handle(self, event: Event) -> tuple[Decision, ...]:  # noqa: PLR0911 (one return an event)
        """Raises ReplicaError, and changes nothing, for an event that cannot happen in this state."""
        match event:
            case Registered():
                self._move(Cause.REGISTERED)
                return self._report(), self._ask()
            case Offered(reply):
                return self._offered(reply)
            case Staged(version, root, seconds):
                self._move(Cause.STAGED)
                self._staged = Serving(version, root)
                self._seconds = Seconds(stage=seconds)
                return self._report(), Commit(self._cache)
            case StageFailed(error):
                self._move(Cause.STAGE_FAILED)
                return self._failed(error)
            case Unfit(error):
                if self.serving is None:
                    self._move(Cause.UNFIT_ALONE)
                    return self._fenced(error, hopeless=True)
                self._move(Cause.UNFIT)
                self._given_up = self._target
                return self._failed(error)
            case CommitBegun():
                self._move(Cause.COMMIT_BEGUN)
                return (self._report(),)
            case Committed(seconds):
                self._move(Cause.COMMITTED)
                self.serving, self._staged = self._staged, None
                self._seconds = msgspec.structs.replace(self._seconds, pause=seconds)
                return self._report(), ReadWeights()
            case RolledBack(error):
                if self.serving is None:  # the first load has nothing to go back to
                    return self.handle(Broken(error))
                self._move(Cause.ROLLED_BACK)
                self.serving = replace(self.serving, read=False)
                self.error = error
                return self._report(), ReadWeights()
            case Broken(error, wrong_root):
                self._move(Cause.BROKEN)
                return self._fenced(error, hopeless=self._whole and wrong_root)
            case _:
                return self._read_back(event.root, event.seconds)

    def report(self) -> StateRequest:
        """What is true now. `version` and `root` are of the weights served; `root` once it was read back."""
        serving = self.serving
        return StateRequest(
            state=self.state,
            version=str(serving.version) if serving else "",
            root=serving.root.hex() if serving and serving.read else "",
            error=self.error,
            seconds=self._seconds,
        )

    def _report(self) -> Report:
        return Report(self.report())

    def _move(self, cause: Cause) -> None:
        row = TRANSITIONS[self.state]
        if cause not in row:
            raise ReplicaError(
                f"replica: {cause}", expected=f"one of {', '.join(sorted(row))}", found=f"state {self.state}"
            )
        self.state = row[cause] or self._resting

    def _offered(self, reply: NextReply) -> tuple[Decision, ...]:
        if not reply.target:
            self._move(Cause.NOTHING_OFFERED)
            return (self._ask(),)
        resting = self.state
        try:
            target = parse_version(reply.target)
            if target == self._given_up:
                self._move(Cause.NOTHING_OFFERED)
                self._declined += 1
                return (self._ask(self._delay(self._declined)),)
            if not reply.reload:
                check_chain(reply.steps, self.serving, reply.target)
        except DeltadError as error:
            self._move(Cause.OFFER_REFUSED)
            return self._failed(str(error))
        self._move(Cause.OFFER_TAKEN)
        self._resting = resting
        self._target, self._whole, self._cache = target, reply.reload, reply.cache
        self._declined = 0
        self._seconds = Seconds()
        return self._report(), StageExport(target) if reply.reload else StageSteps(reply.steps)

    def _read_back(self, root: Digest, seconds: float) -> tuple[Decision, ...]:
        serving, rolled_back = self.serving, self.state is ReplicaState.ROLLED_BACK
        self._move(Cause.ROOT_RIGHT if serving and serving.root == root else Cause.ROOT_WRONG)
        assert serving is not None, "committed and rolled back both mean that something is served"
        self._seconds = msgspec.structs.replace(self._seconds, verify=seconds)
        if self.state is ReplicaState.FENCED:
            wrong = ReplicaError(
                f"served weights of {serving.version}", expected=f"root {serving.root.hex()}", found=root.hex()
            )
            return self._fenced(str(wrong), hopeless=self._whole and not rolled_back)
        self.serving = replace(serving, read=True)
        if rolled_back:
            return Serve(serving.version), *self._failed(self.error)
        self.error, self._failures, self._given_up = "", 0, None
        return Serve(serving.version), self._report(), self._ask()

    def _failed(self, error: str) -> tuple[Decision, ...]:
        self.error = error
        self._failures += 1
        return self._report(), self._ask(self._delay(self._failures))

    def _fenced(self, error: str, *, hopeless: bool) -> tuple[Decision, ...]:
        self.serving = self._staged = None
        self._given_up = self._target if hopeless else None
        return Fence(error), *self._failed(error)

    def _ask(self, delay: float = 0.0) -> Ask:
        return Ask(self.serving.version if self.serving else None, delay)

    def _delay(self, tries: int) -> float:
        doubled = FIRST_DELAY * 2.0 ** min(tries - 1, 16)
        return min(LONGEST_DELAY, doubled) * (1 + self._rng.random()) / 2
