"""What every replica serves, here and in the regions below, as far as it is known.

Pure: told what was said and when (seconds on a monotonic clock of this daemon), asked for views; it
does no IO and reads no clock. It owns the counting invariant: a replica counts as verified at a version
only while it is heard of, its last word is that all its served weights were read back, and the root
that it found is the one that was published. Silence ages to *unknown*, never to verified.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from deltad.client.messages import (
    PROVEN,
    FleetView,
    RegionReport,
    RegionView,
    RegisterRequest,
    ReplicaReport,
    ReplicaState,
    RunReport,
    StateRequest,
    Target,
    VersionInfo,
)
from deltad.errors import ConflictError, FormatError, LimitError, NotFoundError, ReplicaError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.mode import Reader
from deltad.types import RunId, Version, parse_daemon_name, parse_digest, parse_run, parse_variant, parse_version

REPORTED_VERSIONS = 16
"""How many of a run's newest versions a report carries."""

_DAEMONS = 1024
_REPLICAS = 4096
_BOOTS = 16
_TEXT = 500


@dataclass(frozen=True, slots=True)
class Standing:
    """What this daemon itself holds of a run, in ascending order, what it is doing about it, and where it is held.

    `awaits`: see `RunReport`.
    """

    versions: Sequence[VersionInfo] = ()
    activity: str = ""
    target: Target | None = None
    awaits: str = ""


@dataclass(slots=True)
class _Replica:
    registration: RegisterRequest
    report: ReplicaReport
    heard: float


@dataclass(slots=True)
class _Region:
    report: RegionReport
    heard: float
    boots_before: deque[str] = field(default_factory=lambda: deque(maxlen=_BOOTS))


class _Lineage:
    """A run's versions as held here: their order and the published roots of their variants."""

    def __init__(self, versions: Sequence[VersionInfo]) -> None:
        self._order = [parse_version(info.version) for info in versions]
        self._roots = {
            version: {info.variant: info.root, **info.others}
            for version, info in zip(self._order, versions, strict=True)
        }
        self._sequences = {version: info.sequence for version, info in zip(self._order, versions, strict=True)}

    @property
    def newest(self) -> Version | None:
        return self._order[-1] if self._order else None

    def doubt(self, served: str, variant: str, root: str) -> str:
        """Why the root that a replica found proves nothing; empty if it proves its version."""
        roots = self._roots.get(parse_version(served))
        if roots is None:
            return f"{served} is not held by the daemon that looks at it, so its root cannot be compared"
        published = roots.get(variant)
        if published is None:
            return f"{served} has no variant {variant}, so its root cannot be compared"
        if published != root:
            return str(ReplicaError(f"served weights of {served}", expected=f"root {published}", found=root))
        return ""

    def staleness(self, served: str) -> int:
        """How many versions of the run are newer; of those that were passed over here, the sequence tells."""
        sequence = self._sequences.get(parse_version(served)) if served else None
        if sequence:
            return self._sequences[self._order[-1]] - sequence
        return len(self._order) - (bisect_right(self._order, parse_version(served)) if served else 0)


class Fleet:
    """All replicas that a daemon knows of. `daemon` and `boot` name the daemon in its own reports."""

    def __init__(
        self,
        daemon: str,
        boot: str,
        *,
        fresh_for: float = 30.0,
        quiet_for: float = 120.0,
        limits: Limits = DEFAULT_LIMITS,
        on_report: Callable[[ReplicaReport, ReplicaReport], None] = lambda before, now: None,
    ) -> None:
        """`fresh_for`: seconds after which a region's last report says nothing any more; `quiet_for`: the
        same for a replica at this daemon, which is silent while it stages. `on_report` hears what each replica at
        this daemon said before and says now."""
        self.daemon = daemon
        self.boot = boot
        self.fresh_for = fresh_for
        self.quiet_for = quiet_for
        self.forget_after = 30 * quiet_for
        self._limits = limits
        self._on_report = on_report
        self._sequence = 0
        self._replicas: dict[str, _Replica] = {}
        self._regions: dict[str, _Region] = {}

    # Replicas at this daemon.

    def register(self, request: RegisterRequest, now: float, *, hung_up: bool = False) -> None:
        """Take a replica in; an earlier registration of its name is replaced, and it starts anew.

        `hung_up`: whether the one that has the name was cut off in the midst of a question, as a process that
        ended is. Raises UsageError, LimitError, and ConflictError while another process of that name lives.
        """
        parse_daemon_name(request.replica)
        parse_run(request.run)
        parse_variant(request.variant)
        _check_text("address", request.address)
        _check_text("boot", request.boot)
        known = self._replicas.get(request.replica)
        if known is not None and not hung_up and now - known.heard <= self.quiet_for:
            _check_lineage(known.registration, request, self.quiet_for)
        if request.replica not in self._replicas and len(self._replicas) >= _REPLICAS:
            raise LimitError(f"replica {request.replica}", expected=f"at most {_REPLICAS} replicas at one daemon")
        report = ReplicaReport(
            request.replica, request.run, request.variant, ReplicaState.REGISTERED, address=request.address
        )
        self._replicas[request.replica] = _Replica(request, report, now)

    def unregister(self, replica: str) -> None:
        """Forget a replica. Raises NotFoundError."""
        self._find(replica)
        del self._replicas[replica]

    def forget_silent(self, now: float) -> None:
        """Forget replicas that have not been heard of for so long that they are not coming back."""
        for name in [name for name, replica in self._replicas.items() if now - replica.heard > self.forget_after]:
            del self._replicas[name]

    def registration(self, replica: str) -> RegisterRequest:
        """How a replica announced itself. Raises NotFoundError."""
        return self._find(replica).registration

    def is_registered(self, replica: str) -> bool:
        """Whether what was made for this replica is still needed."""
        return replica in self._replicas

    def heard(self, replica: str, now: float) -> None:
        """The replica gave a sign of life. Raises NotFoundError."""
        self._find(replica).heard = now

    def report_state(self, replica: str, request: StateRequest, versions: Sequence[VersionInfo], now: float) -> None:
        """Take a replica's word, where its root bears it out.

        `versions`: those of its run that are held here. Raises NotFoundError for a replica that is not
        registered, UsageError for a malformed report, and ReplicaError for a root that is not the published
        one; then the replica is *unknown* from here on.
        """
        known = self._find(replica)
        _check_state(request)
        report = msgspec.structs.replace(
            known.report,
            state=request.state,
            version=str(parse_version(request.version)) if request.version else "",
            root=request.root,
            error=request.error[:_TEXT],
            seconds=request.seconds,
        )
        known.heard = now
        self._on_report(known.report, report)
        known.report = report
        if report.root and any(info.version == report.version for info in versions):
            doubt = _Lineage(versions).doubt(report.version, report.variant, report.root)
            if doubt:
                raise ReplicaError(f"replica {replica}: {doubt}", hint="it does not count as verified")

    # Regions below.

    def receive(self, report: RegionReport, now: float) -> bool:
        """Take in a report from below; False if it, and so all in it, was known or is older.

        Raises FormatError for a malformed report and ConflictError for one that carries this daemon's own
        name; neither changes anything.
        """
        _check_report(report)
        if report.daemon == self.daemon:
            raise ConflictError(
                f"daemon {report.daemon!r}",
                expected="a name of its own for each daemon",
                found="the name of the daemon that it reports to",
                hint="change `name` in the [daemon] section of one of them",
            )
        if not self._take(msgspec.structs.replace(report, below=()), now):
            return False
        for inner in report.below:
            if inner.daemon not in (self.daemon, report.daemon):
                self._take(msgspec.structs.replace(inner, below=()), now)
        return True

    def _take(self, report: RegionReport, now: float) -> bool:
        region = self._regions.get(report.daemon)
        if region is None:
            if len(self._regions) >= _DAEMONS:
                del self._regions[min(self._regions, key=lambda name: self._regions[name].heard)]
            self._regions[report.daemon] = _Region(report, now)
            return True
        if report.boot == region.report.boot:
            if report.sequence <= region.report.sequence:
                return False
        elif report.boot in region.boots_before:
            return False
        else:
            region.boots_before.append(region.report.boot)
        region.report = report
        region.heard = now
        return True

    def daemons(self) -> set[str]:
        """The names of this daemon and of all below that were heard of in this life."""
        return {self.daemon, *self._regions}

    # Views. `standings` and `versions` tell what this daemon holds itself.

    def region(self, standings: Mapping[RunId, Standing], now: float) -> RegionReport:
        """This daemon's own region, for showing it here."""
        return RegionReport(self.daemon, self.boot, self._sequence, self._own_runs(standings, now))

    def region_report(self, standings: Mapping[RunId, Standing], now: float) -> RegionReport:
        """The next report to send upstream: this region and the last word of all below it.

        What is not fresh here goes on as *unknown*: to a daemon that has just started it would be news.
        """
        self._sequence += 1
        below = tuple(
            region.report if now - region.heard <= self.fresh_for else _unknown(region.report)
            for region in self._regions.values()
        )
        report = RegionReport(self.daemon, self.boot, self._sequence, self._own_runs(standings, now), below)
        return _fit(report, self._limits.report_bytes)

    def regions(self, standings: Mapping[RunId, Standing], now: float) -> tuple[RegionView, ...]:
        """The regions below, in order of their names."""
        lineages = {str(run): _Lineage(standing.versions) for run, standing in standings.items()}
        return tuple(self._region_view(self._regions[name], lineages, now) for name in sorted(self._regions))

    def view(
        self,
        run: RunId,
        versions: Sequence[VersionInfo],
        now: float,
        *,
        version: Version | None = None,
        target: Target | None = None,
    ) -> FleetView:
        """All replicas of a run, and how many of them serve `version` or a newer one.

        Without `version`, how many serve what their region's fleet should: the version that it is held at, or the
        newest. `target` is where this daemon's own fleet is held.
        """
        lineage = _Lineage(versions)
        wanted = version or (parse_version(target.version) if target else lineage.newest)
        own = RegionView(self.region({run: Standing(versions, target=target)}, now), age=0.0, fresh=True)
        below = (self._region_view(self._regions[name], {run: lineage}, now) for name in sorted(self._regions))
        regions = tuple(_only(view, run) for view in (own, *below) if view is own or run in view.report.runs)
        replicas = [(replica, held.report.runs[run]) for held in regions for replica in held.report.runs[run].replicas]
        return FleetView(
            run=run,
            version=str(wanted) if wanted else "",
            verified=sum(
                _serves(replica, version) if version else report.is_at_target(replica) for replica, report in replicas
            ),
            replicas=len(replicas),
            regions=regions,
            target=target,
        )

    def readers(self, run: RunId, now: float) -> tuple[Reader, ...]:
        """The regions below that have the run. A rate that was told long ago is none; what coders are read stays."""
        return tuple(
            Reader(name, region.report.pull_rate if now - region.heard <= self.fresh_for else 0.0, region.report.coders)
            for name, region in sorted(self._regions.items())
            if run in region.report.runs
        )

    def _own_runs(self, standings: Mapping[RunId, Standing], now: float) -> dict[str, RunReport]:
        replicas: dict[str, list[_Replica]] = {str(run): [] for run in standings}
        for replica in self._replicas.values():
            replicas.setdefault(replica.registration.run, []).append(replica)
        reports = {}
        for run, members in replicas.items():
            standing = standings.get(RunId(run), Standing())
            lineage = _Lineage(standing.versions)
            reports[run] = RunReport(
                latest=str(lineage.newest or ""),
                activity=standing.activity,
                replicas=tuple(
                    _judge(member.report, lineage, heard_of=now - member.heard <= self.quiet_for) for member in members
                ),
                versions=tuple(standing.versions[-REPORTED_VERSIONS:]),
                target=standing.target,
                awaits=standing.awaits,
            )
        return reports

    def _region_view(self, region: _Region, lineages: Mapping[str, _Lineage], now: float) -> RegionView:
        age = max(now - region.heard, 0.0)
        fresh = age <= self.fresh_for
        runs = {}
        for run, report in region.report.runs.items():
            lineage = lineages.get(run) or _Lineage(())
            replicas = tuple(_judge(replica, lineage, heard_of=fresh) for replica in report.replicas)
            runs[run] = msgspec.structs.replace(report, replicas=replicas)
        return RegionView(msgspec.structs.replace(region.report, runs=runs), age, fresh)

    def _find(self, replica: str) -> _Replica:
        try:
            return self._replicas[replica]
        except KeyError:
            raise NotFoundError(
                f"replica {replica[:80]!r}", found="not registered at this daemon", hint="register it again"
            ) from None


def _judge(report: ReplicaReport, lineage: _Lineage, *, heard_of: bool) -> ReplicaReport:
    """What a replica's last word is worth to whoever holds `lineage`, now."""
    state, error = report.state, report.error
    if not heard_of:
        state = ReplicaState.UNKNOWN
    elif report.state is ReplicaState.VERIFIED or (report.state in PROVEN and report.root):
        doubt = lineage.doubt(report.version, report.variant, report.root)
        if doubt:
            state, error = ReplicaState.UNKNOWN, doubt
    return msgspec.structs.replace(report, state=state, error=error, staleness=lineage.staleness(report.version))


def _unknown(report: RegionReport) -> RegionReport:
    runs = {
        run: msgspec.structs.replace(
            run_report,
            replicas=tuple(
                msgspec.structs.replace(replica, state=ReplicaState.UNKNOWN) for replica in run_report.replicas
            ),
        )
        for run, run_report in report.runs.items()
    }
    return msgspec.structs.replace(report, runs=runs)


def _serves(replica: ReplicaReport, version: Version) -> bool:
    """Whether a judged replica is known to serve `version` or a newer one."""
    return replica.state in PROVEN and bool(replica.root) and parse_version(replica.version) >= version


def _only(view: RegionView, run: str) -> RegionView:
    runs = {run: view.report.runs[run]}
    return RegionView(msgspec.structs.replace(view.report, runs=runs), view.age, view.fresh)


def _fit(report: RegionReport, limit: int) -> RegionReport:
    """The report without the descriptions of versions, where it would be refused for its size with them."""
    if len(msgspec.json.encode(report)) <= limit:
        return report
    below = tuple(_without_versions(inner) for inner in report.below)
    return msgspec.structs.replace(_without_versions(report), below=below)


def _without_versions(report: RegionReport) -> RegionReport:
    runs = {run: msgspec.structs.replace(run_report, versions=()) for run, run_report in report.runs.items()}
    return msgspec.structs.replace(report, runs=runs)


def _check_text(what: str, text: str) -> None:
    if len(text) > _TEXT:
        raise UsageError(what, expected=f"at most {_TEXT} characters", found=f"{len(text)}")


def _check_lineage(known: RegisterRequest, request: RegisterRequest, quiet_for: float) -> None:
    """Raises ConflictError unless a living replica's name is taken over by its own process, or at its own address."""
    if request.boot == known.boot or (request.address and request.address == known.address):
        return
    raise ConflictError(
        f"replica {request.replica} at {request.address or 'no address'}",
        expected="a name of its own for each replica",
        found=f"another one of that name, at {known.address or 'no address'}",
        hint=f"rename one of them; a process that was killed loses the name after {quiet_for:g} s of silence",
    )


def _check_state(request: StateRequest) -> None:
    """Raises UsageError."""
    if request.state is ReplicaState.UNKNOWN:
        raise UsageError("state 'unknown'", expected="a state that a replica can be in")
    if request.version:
        parse_version(request.version)
    if request.root:
        parse_digest(request.root)
    if request.state is ReplicaState.VERIFIED and not (request.version and request.root):
        raise UsageError("state 'verified'", expected="the version and the root that was read back")
    if request.root and not request.version:
        raise UsageError("a root", expected="the version that it was read back from")


def _check_report(report: RegionReport) -> None:
    """Raises FormatError unless every name, version and root in a report from below is well formed."""
    try:
        for region in (report, *report.below):
            parse_daemon_name(region.daemon)
            parse_daemon_name(region.boot)
            for run, run_report in region.runs.items():
                parse_run(run)
                if run_report.latest:
                    parse_version(run_report.latest)
                if run_report.target:
                    _check_target(run_report.target)
                for replica in run_report.replicas:
                    _check_replica(replica)
    except UsageError as error:
        raise FormatError(f"report of daemon {report.daemon[:80]!r}", found=str(error)) from None


def _check_target(target: Target) -> None:
    if str(parse_version(target.version)) != target.version:
        raise UsageError("target", expected="a version as deltad prints it", found=target.version[:80])
    for what, text in (("reason", target.why), ("name", target.by), ("fleet", target.fleet), ("daemon", target.daemon)):
        _check_text(f"{what} of a target", text)


def _check_replica(replica: ReplicaReport) -> None:
    parse_daemon_name(replica.replica)
    if replica.version:
        parse_version(replica.version)
    if replica.root:
        parse_digest(replica.root)
    if replica.state is ReplicaState.VERIFIED and not (replica.version and replica.root):
        raise UsageError("state 'verified'", expected="the version and the root that was read back")
    if replica.root and not replica.version:
        raise UsageError("a root", expected="the version that it was read back from")
