"""Where the fleet of this daemon should be, and moving that: what `hold`, `release` and `rollback` mean here.

Where a run is published a statement is about all fleets, or one that is named, and travels to the daemons that
pull; elsewhere it is about this daemon's own fleet. What then counts for whom is `deltad.protocol.target`'s rule.
Owns one invariant: no fleet is led to a version that is not held where it was said, or not held here.
"""

from __future__ import annotations

from deltad.client.messages import Act, Target, TargetReply, TargetRequest, TargetsReply
from deltad.config import Config
from deltad.delta.record import VersionRecord
from deltad.errors import NotFoundError, UsageError
from deltad.protocol.target import EVERYONE, Statement, Targets
from deltad.store.runs import RunStore
from deltad.types import RunId, Version, VersionId, parse_version


def goal(records: RunStore, daemon: str) -> VersionRecord | None:
    """The version that replicas of this daemon's fleet should serve.

    None while there is none, or while the fleet is held at one that is not held here: then each stays where it is.
    """
    said = records.targets().held(daemon)
    return records.latest() if said is None or said.version is None else _find(records, said.version)


def target_of(records: RunStore, daemon: str) -> Target | None:
    """Where the fleet of a daemon is held; None while it follows the newest version."""
    said = records.targets().held(daemon)
    return None if said is None else _in_words(records, said)


def targets_reply(records: RunStore, daemon: str) -> TargetsReply:
    """All that is known here about the targets of a run."""
    now = records.targets()
    own = (now.own,) if now.own is not None and now.standing(daemon) is now.own else ()
    return TargetsReply(
        records.run,
        target_of(records, daemon),
        tuple(_in_words(records, said) for said in (*now.heard, *own)),
        tuple(_in_words(records, said) for said in now.history),
    )


def is_published_here(config: Config, run: RunId) -> bool:
    """Whether this daemon speaks for all fleets of a run: nobody brings it, or a watch here publishes it."""
    pulled = config.pulls(run)
    return not pulled or any(watch.run == run for watch in config.watches)


def move(records: RunStore, config: Config, request: TargetRequest, *, by: str, now: float) -> TargetReply:
    """Move a target; durable on return. Blocks. `now` is Unix time, for people.

    Raises UsageError for a fleet that this daemon does not speak for, or a way back that leads forwards;
    NotFoundError for a version that is not held here; LimitError, StoreError.
    """
    daemon, publishes = config.daemon.name, is_published_here(config, records.run)
    if not publishes and request.fleet not in (EVERYONE, daemon):
        raise UsageError(
            f"fleet {request.fleet}",
            expected=f"{daemon}, this daemon's own, since it pulls run {records.run}",
            found="another one",
            hint="say it at that daemon, or where the run is published",
        )
    fleet = request.fleet if publishes else daemon

    def moved(targets: Targets) -> Targets:
        version = _wanted(records, targets.held(fleet), request)
        if publishes:
            return targets.say(version, fleet, by=by, why=request.why, when=now, daemon=daemon)
        return targets.say_here(version, by=by, why=request.why, when=now, daemon=daemon)

    changed = records.move_target(moved)
    latest = records.latest()
    return TargetReply(records.run, target_of(records, fleet), str(latest.version) if latest else "", changed)


def _wanted(records: RunStore, held: Statement | None, request: TargetRequest) -> Version | None:
    """The version to hold at; None to follow the newest."""
    if request.act is Act.RELEASE:
        return None
    latest = records.latest()
    if latest is None:
        raise NotFoundError(f"run {records.run}", expected="a version to hold the fleets at", found="none yet")
    served = held.version if held is not None and held.version is not None else latest.version
    if request.act is Act.HOLD:
        wanted = parse_version(request.version) if request.version else served
    else:
        wanted = parse_version(request.version) if request.version else _before(latest)
        if wanted >= served and (held is None or wanted != served):
            raise UsageError(
                f"rollback to {VersionId(records.run, wanted)}",
                expected=f"a version before {served}, which is the target now",
                found="a newer one" if wanted > served else "that one",
                hint="`deltad hold` holds at any version, `deltad release` follows the newest",
            )
    # What stands already may be said again where it is not held: it changes nothing.
    return wanted if held is not None and wanted == served else records.record(wanted).version


def _before(latest: VersionRecord) -> Version:
    if latest.parent is None or latest.parent_run:
        raise NotFoundError(f"a version before {latest.id}", found="it is the first one of its run")
    return latest.parent


def _find(records: RunStore, version: Version) -> VersionRecord | None:
    try:
        return records.record(version)
    except NotFoundError:
        return None


def _in_words(records: RunStore, said: Statement) -> Target:
    return Target(
        version="" if said.version is None else str(said.version),
        fleet=said.fleet,
        by=said.by,
        why=said.why,
        when=said.when,
        daemon=said.daemon,
        sequence=said.sequence,
        here=said.version is None or _find(records, said.version) is not None,
    )
