"""What is said on the local control API: one struct per JSON body, shared by both ends.

Versions travel as text (`v000123`, `v000123@e2`), digests as hex, durations in seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class ReplicaState(StrEnum):
    """Where a replica is in its life. Only `verified` counts as live."""

    REGISTERED = "registered"
    STAGING = "staging"
    READY = "ready"
    COMMITTING = "committing"
    COMMITTED = "committed"
    VERIFIED = "verified"
    ROLLED_BACK = "rolled-back"
    FENCED = "fenced"
    UNKNOWN = "unknown"


PROVEN = frozenset({ReplicaState.VERIFIED, ReplicaState.STAGING, ReplicaState.READY})
"""States in which served weights that were once read back have not been touched since."""


class Seconds(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long each stage of a version took at one place; 0 where it did not happen there.

    `settle`: waiting for the checkpoint to be complete and quiet. `encode`: reading, diffing, storing.
    `transfer`: pulling. `stage`: decoding beside the live weights. `pause`: generation stood still.
    `verify`: reading all served weights back.
    """

    settle: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    stage: float = 0.0
    pause: float = 0.0
    verify: float = 0.0


class PinInfo(msgspec.Struct, frozen=True):
    """Who wants a version kept whatever the retention says, why, and since when in Unix seconds (0: not noted)."""

    by: str
    why: str
    at: float = 0.0


class VersionInfo(msgspec.Struct, frozen=True):
    """One version as a daemon holds it. `pulled_bytes` is all that this daemon fetched for it.

    `pin` is there while it is pinned at this daemon.

    `coder` is how its edge is coded: where it was published here, the mode, and `coder_reason` says why it
    was chosen; elsewhere, the coder of its frames. Empty where nothing is coded. `kind`, `base` and what is
    counted are those of the edge over which it is held here, which may be one that was derived. `sequence` grows
    by one with every version of the run, held here or not. All is told of the first variant; `others` has the roots of
    those after it, by name.
    """

    run: str
    version: str
    parent: str
    identity: str
    source: str
    variant: str
    kind: str
    reason: str
    root: str
    layout: str
    density: float
    elements: int
    changed: int
    full_bytes: int
    delta_bytes: int
    chunks: int
    created: float
    pulled_bytes: int = 0
    seconds: Seconds = Seconds()
    coder: str = ""
    coder_reason: str = ""
    base: str = ""
    sequence: int = 0
    pin: PinInfo | None = None
    others: dict[str, str] = {}


class Target(msgspec.Struct, frozen=True):
    """To which version a fleet is held (empty: it follows the newest again), and who said so, where and why.

    `fleet` names the daemon whose fleet is meant, all of them where it is empty. `when` is Unix time, for people.
    `here` tells whether the daemon that shows this holds the version.
    """

    version: str
    fleet: str = ""
    by: str = ""
    why: str = ""
    when: float = 0.0
    daemon: str = ""
    sequence: int = 0
    here: bool = True


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a replica last said of itself.

    `version` is what it serves, and `root` what it read back of that, in hex; empty until it did.
    `staleness` counts the versions of the run that are newer (where it serves none, or one that is not held here,
    those that are held).
    """

    replica: str
    run: str
    variant: str
    state: ReplicaState
    version: str = ""
    root: str = ""
    address: str = ""
    error: str = ""
    seconds: Seconds = Seconds()
    staleness: int = 0


class RegionReport(msgspec.Struct, frozen=True):
    """A daemon's compact report of itself, as it travels upstream.

    (`daemon`, `boot`, `sequence`) orders reports of one daemon; a receiver drops what is not newer and
    ages what it has on its own monotonic clock. `below` holds the last reports of all daemons below this
    one, each as it came but for its own `below`, which is empty: a report is at most two deep.

    `pull_rate` is what the daemon pulls at from the one that it reports to, in bytes a second while bytes
    came; 0 where that was not measured lately. `coders` are those that it reads.
    """

    daemon: str
    boot: str
    sequence: int
    runs: dict[str, RunReport] = {}
    below: tuple[RegionReport, ...] = ()
    pull_rate: float = 0.0
    coders: tuple[int, ...] = ()


class RunReport(msgspec.Struct, frozen=True):
    """A run at one daemon: its newest durable version, what it is doing, and its replicas.

    `versions` are the newest few that it holds, in ascending order. `target` is there while its fleet is held
    at a version, and does not follow the newest. `awaits` names the version of another run that the run forks, where
    nothing but that one leads to what upstreams have, and it is not held.
    """

    latest: str = ""
    activity: str = ""
    replicas: tuple[ReplicaReport, ...] = ()
    versions: tuple[VersionInfo, ...] = ()
    target: Target | None = None
    awaits: str = ""

    def is_at_target(self, replica: ReplicaReport) -> bool:
        """Whether one of its replicas is known to serve what it should: the version held at, or the newest."""
        if replica.state not in PROVEN or not replica.root:
            return False
        return replica.version == self.target.version if self.target else not replica.staleness


class RegionView(msgspec.Struct, frozen=True):
    """A region as another daemon sees it; `age` in seconds since its last report came in.

    In a region that is not `fresh`, every replica is shown as `unknown`.
    """

    report: RegionReport
    age: float
    fresh: bool


class FleetView(msgspec.Struct, frozen=True):
    """Every replica of a run that this daemon knows of, here and in regions below it.

    `verified` of the `replicas` serve `version`, or a newer one, as they read it back themselves. Where no version
    was asked for, `version` is the one that the fleet of this daemon should serve, and `verified` counts the
    replicas that serve what theirs should: the version that it is held at and no other, or the newest.
    """

    run: str
    version: str
    verified: int
    replicas: int
    regions: tuple[RegionView, ...]
    target: Target | None = None


class UpstreamView(msgspec.Struct, frozen=True):
    """A link to an upstream: whether it answers, what it does, in words, and what it moved so far.

    `error` is what is in the way, if anything, and `error_kind` its kind as in `ErrorReply`.
    """

    url: str
    up: bool
    activity: str
    rtt: float
    bytes_received: int
    rate: float
    error: str = ""
    error_kind: str = ""


class DamageView(msgspec.Struct, frozen=True):
    """Something stored that was found damaged: where it lay, and in words what it was and what became of it."""

    thing: str
    place: str
    healed: bool
    detail: str = ""


class ScrubView(msgspec.Struct, frozen=True):
    """Reading all that is stored. What was stored at `covered` (Unix time; 0 for never) was all read since.

    `read_bytes` of the `total_bytes` of a pass were read in this life, `activity` says in words what it does, and
    of the damage the first few are told, what is not healed first; `damaged` counts what is not, and `consequences`
    says which versions cannot be given to newcomers for it.
    """

    covered: float = 0.0
    read_bytes: int = 0
    total_bytes: int = 0
    activity: str = ""
    damaged: int = 0
    damage: tuple[DamageView, ...] = ()
    consequences: str = ""


class StatusView(msgspec.Struct, frozen=True):
    """What `deltad status` shows. `backend` is what computes now, and `backend_reason` says why that one."""

    daemon: str
    boot: str
    version: str
    backend: str
    backend_reason: str
    uptime: float
    ready: bool
    reasons: tuple[str, ...]
    store: str
    store_bytes: int
    free_bytes: int
    region: RegionReport
    upstreams: tuple[UpstreamView, ...]
    regions: tuple[RegionView, ...]
    scrub: ScrubView = ScrubView()


class RunVersion(msgspec.Struct, frozen=True):
    """A version of a run that need not be the one that is spoken of."""

    run: str
    version: str


class PublishRequest(msgspec.Struct, frozen=True):
    """Publish a checkpoint directory. Without `number`, it is taken from the directory's name.

    `new_epoch` opens the next epoch, unless the newest version is this very one. `resume_from` opens one whose first
    version is made from that version of the run. `fork_from` begins a run with a version that is made from another
    run's. `epoch` is the one that the publisher writes in, as the reply to its last publish named it: once another
    publisher has opened a newer one it is refused; 0 is whichever is the newest.
    """

    directory: str
    number: int | None = None
    identity: str = ""
    new_epoch: bool = False
    resume_from: str = ""
    fork_from: RunVersion | None = None
    epoch: int = 0


class PublishReply(msgspec.Struct, frozen=True):
    """`already` tells that the same bytes were published before and nothing was done."""

    version: VersionInfo
    already: bool


class PullRequest(msgspec.Struct, frozen=True):
    """Pull now, and answer once everything the upstreams had is durable here or `wait` is over."""

    wait: float = 60.0


class VersionsReply(msgspec.Struct, frozen=True):
    """Versions in ascending order."""

    versions: tuple[VersionInfo, ...]


class DerivedEdgeView(msgspec.Struct, frozen=True):
    """An edge that a host derived: its version's record does not name it. `size` is that of its manifest in bytes.

    A `local` one is offered to no other daemon.
    """

    variant: str
    kind: str
    base: str
    manifest: str
    size: int
    local: bool


class DerivedEdgesReply(msgspec.Struct, frozen=True):
    """The derived edges to one version that are held."""

    edges: tuple[DerivedEdgeView, ...]


class LatestReply(msgspec.Struct, frozen=True):
    """The newest durable version, or none within the wait."""

    version: VersionInfo | None


class Act(StrEnum):
    """What to do with the target: hold a fleet where it is or at a version, bring it back, or let it follow again."""

    HOLD = "hold"
    RELEASE = "release"
    ROLLBACK = "rollback"


class TargetRequest(msgspec.Struct, frozen=True):
    """Move the target of a fleet: of all, where `fleet` is empty and the run is published at this daemon.

    `version` may be empty: to hold where the fleet is, or to go back to the version before the newest.
    """

    act: Act
    version: str = ""
    fleet: str = ""
    why: str = ""


class TargetReply(msgspec.Struct, frozen=True):
    """The fleet's target now (None: it follows the newest), and whether it was `changed` by this.

    `latest` is the newest version. `heard` tells whether a daemon of the fleet's name is known here.
    """

    run: str
    target: Target | None
    latest: str
    changed: bool
    heard: bool = True


class TargetsReply(msgspec.Struct, frozen=True):
    """Where this daemon's own fleet is held (None: it follows the newest), what stands about any fleet as far as
    it is known here, and the last moves, oldest first."""

    run: str
    target: Target | None = None
    standing: tuple[Target, ...] = ()
    moves: tuple[Target, ...] = ()


class Decided(msgspec.Struct, frozen=True):
    """What a daemon would do now in the version graph of a variant, and why; `put_off` says why it has to wait."""

    variant: str
    what: str
    why: str
    put_off: str = ""


class PlanReply(msgspec.Struct, frozen=True):
    """What would be decided about a run, in order; what is being made now, in words or empty.

    `rate` is the bytes a second that may be read to make edges (0: none are made), and `saved` what is left of them.
    """

    run: str
    decided: tuple[Decided, ...]
    making: str
    rate: int
    saved: int


class DiskDeltaRequest(msgspec.Struct, frozen=True):
    """A delta in the layout that slime, miles and cwtrain read, from version `base` (the one before, if empty).

    `encoding` is `xor` or `overwrite`; `checksum` is `adler32`, `xxh3-128` or `blake3`. A version is called by its
    identity or, where it has none, by its number in six digits.
    """

    base: str = ""
    encoding: str = "xor"
    checksum: str = "adler32"


class ExportRequest(msgspec.Struct, frozen=True):
    """Write a version (the target's, if empty) as a loadable checkpoint.

    Without `directory` the daemon chooses one of its own, which lives while `replica` is registered. With `disk_delta`
    what is written into `directory` is a disk-delta directory instead.
    """

    version: str = ""
    directory: str = ""
    replica: str = ""
    disk_delta: DiskDeltaRequest | None = None


class ExportReply(msgspec.Struct, frozen=True):
    """The checkpoint directory and what is in it."""

    directory: str
    version: str
    root: str


class VerifyRequest(msgspec.Struct, frozen=True):
    """Rebuild a version from what is stored and compare its root."""

    version: str = ""


class VerifyReply(msgspec.Struct, frozen=True):
    """`match` is the answer; `wrong_tensors` names those whose sums differ."""

    version: str
    root: str
    found: str
    match: bool
    tensors: int
    wrong_tensors: tuple[str, ...] = ()


class PinRequest(msgspec.Struct, frozen=True):
    """Keep a version whatever the retention says. The daemon notes who asked, as the system tells it."""

    why: str = ""


class PinReply(msgspec.Struct, frozen=True):
    """The version's pin now, if it has one; `changed` is false where it was as asked before."""

    version: str
    pin: PinInfo | None
    changed: bool


class CollectRequest(msgspec.Struct, frozen=True):
    """Let go of what nobody needs; with `dry_run` only say what that would be."""

    dry_run: bool = False


class Explanation(msgspec.Struct, frozen=True):
    """Whether a version or an object is kept, and why."""

    thing: str
    bytes: int
    kept: bool
    why: str


class CollectReply(msgspec.Struct, frozen=True):
    """Every version of the store in order, and of its objects the first few that go and that stay; all are counted."""

    versions: tuple[Explanation, ...]
    objects: tuple[Explanation, ...]
    kept_objects: int
    dropped_objects: int
    dropped_bytes: int


class RegisterRequest(msgspec.Struct, frozen=True):
    """A replica announces itself. `boot` names its process, which may register again at any time.

    Another process of the same name is refused while the first one lives: until it unregistered, hung up in
    the midst of asking for what to do, or was silent for long. One at the same address takes over at once, since
    two living ones cannot share it.
    """

    replica: str
    run: str
    variant: str
    address: str = ""
    boot: str = ""


class Step(msgspec.Struct, frozen=True):
    """One delta on the way from what a replica serves to its target."""

    version: str
    root: str
    base: str
    base_root: str
    manifest: str


Cache = Literal["", "keep", "new-requests-only", "reset"]
"""What becomes of a replica's cached keys and values at a commit; empty: what its engine does by itself.

`keep`: all are kept and reused. `new-requests-only`: requests in flight keep theirs, new ones reuse none from before.
`reset`: all are dropped, and those of requests in flight are computed anew.
"""


class NextReply(msgspec.Struct, frozen=True):
    """What a replica should do now: nothing (`target` empty), apply `steps` in order, or reload.

    `reload` means that no delta leads from what it serves to the target: load a fresh export. `cache` is for that
    commit.
    """

    target: str = ""
    steps: tuple[Step, ...] = ()
    reload: bool = False
    cache: Cache = ""


class StateRequest(msgspec.Struct, frozen=True):
    """A replica reports its state; `version` and `root` as in `ReplicaReport`."""

    state: ReplicaState
    version: str = ""
    root: str = ""
    error: str = ""
    seconds: Seconds = Seconds()


class ErrorReply(msgspec.Struct, frozen=True):
    """Any refusal: the error's kind, its sentence, and whether trying again can help."""

    error: str
    message: str
    retryable: bool = False
    exit_code: int = 1
