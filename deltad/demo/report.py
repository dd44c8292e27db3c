"""What the demo found out about each version, and the report that it makes of it. Does no IO.

Facts come in from three sides (the daemons, the replica, the trainer's event lines), in any order and any
number of times. The invariant: the report claims a match only where the root that daemon A published and the
root that the replica read back from its live weights were both seen, and are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from deltad.client.messages import ReplicaReport, ReplicaState, Seconds, VersionInfo

LOGPROB_TOLERANCE = 0.05
"""How far two bf16 forward passes of the same weights may be apart in any token's log-prob, in nats.

bf16 keeps 8 bits: the logits of the demo's models, up to about 30, are rounded by up to 1/16, and a
different batch or cache shape rounds differently. Other weights show as a multiple of it within a few steps.
"""


class TrainerLine(msgspec.Struct, frozen=True):
    """One event line of the trainer, as far as the demo needs it: a flat struct for all tags, told by `event`.

    JSON has no NaN: a figure that is None where the event should have one was no number.
    """

    event: str
    time: float = 0.0
    model: str = ""
    parameters: int = 0
    steps: int = 0
    step: int = 0
    number: int = -1
    version: str = ""
    versions: tuple[str, ...] | int = ()
    root_served: str = ""
    end_to_end: float = 0.0
    logprob_gap: float | None = None
    logprob_shift: float | None = None
    reward_mean: float | None = None
    total: int = 0
    samples: int = 0
    seconds: float = 0.0
    when: str = ""
    prompts: int = 0
    what: str = ""
    attempt: int = 0
    bytes: int = 0
    zero_advantage: bool = False
    rollouts_from_remote: int = 0
    kind: str = ""
    error: str = ""


def parse_line(line: bytes) -> TrainerLine | None:
    """A line of the trainer's standard output; None for what is no event (a library's own chatter)."""
    try:
        return msgspec.json.decode(line, type=TrainerLine)
    except msgspec.MsgspecError:
        return None


class LinkReport(msgspec.Struct, frozen=True):
    """The link between the regions."""

    rtt_ms: float
    mbit_s: float


class VersionSeconds(msgspec.Struct, frozen=True):
    """How long each stage of a version took, and all of them from the end of writing to *verified*."""

    settle: float
    encode: float
    transfer: float
    stage: float
    pause: float
    verify: float
    end_to_end: float


class VersionReport(msgspec.Struct, frozen=True):
    """One version. `delta_bytes` is everything that region B pulled for it.

    `reward_mean` is that of the rollouts sampled from this version; None for one that none were sampled from.
    """

    version: str
    density: float
    full_bytes: int
    delta_bytes: int
    percent_of_full: float
    seconds: VersionSeconds
    root_published: str
    root_served: str
    match: bool
    reward_mean: float | None
    logprob_gap: float | None


class DemoReport(msgspec.Struct, frozen=True):
    """What `demo-report.json` holds."""

    model: str
    parameters: int
    link: LinkReport
    versions: tuple[VersionReport, ...]
    all_match: bool
    rollouts_from_remote: int


@dataclass(slots=True)
class Facts:
    """What is known about one version so far."""

    published: VersionInfo | None = None
    pulled: VersionInfo | None = None
    served: ReplicaReport | None = None
    root_served: str = ""
    end_to_end: float = 0.0
    logprob_gap: float | None = None
    logprob_shift: float | None = None
    reward_mean: float | None = None

    @property
    def match(self) -> bool:
        """The replica read back exactly the root that was published, and whoever told of it says the same."""
        told = {self.root_served, self.served.root if self.served else ""} - {""}
        return self.published is not None and told == {self.published.root}

    @property
    def served_root(self) -> str:
        """What the replica read back, in hex; empty until it did."""
        return self.served.root if self.served is not None else self.root_served

    @property
    def complete(self) -> bool:
        """Everything that can be known of a version that is served is known."""
        return None not in (self.published, self.pulled, self.served, self.logprob_gap)


@dataclass(slots=True)
class Ledger:
    """All facts about all versions, by name."""

    steps: int
    model: str = ""
    parameters: int = 0
    rollouts_from_remote: int = 0
    versions: dict[str, Facts] = field(default_factory=dict)
    evaluations: dict[str, TrainerLine] = field(default_factory=dict)

    def published(self, infos: Iterable[VersionInfo]) -> None:
        """What daemon A holds."""
        for info in infos:
            self._of(info.version).published = info

    def pulled(self, infos: Iterable[VersionInfo]) -> None:
        """What daemon B holds."""
        for info in infos:
            self._of(info.version).pulled = info

    def served(self, report: ReplicaReport) -> None:
        """What the replica said of itself: counts where it has verified a version."""
        if report.state is not ReplicaState.VERIFIED or not report.root:
            return
        facts = self._of(report.version)
        # What it says again after its daemon was started anew need not hold the seconds any more.
        if facts.served is None or facts.served.root != report.root:
            facts.served = report

    def trainer(self, line: TrainerLine) -> None:
        """What the trainer said."""
        match line.event:
            case "started":
                self.model, self.parameters = line.model, line.parameters
            case "rollouts":
                self.rollouts_from_remote = max(self.rollouts_from_remote, line.total)
                # A replica may commit in the middle of an answer: the rollouts count for the version that
                # the step asked for, which is the first that sampled a token.
                if isinstance(line.versions, tuple) and line.versions:
                    self._of(line.versions[0]).reward_mean = line.reward_mean
            case "version_verified":
                facts = self._of(line.version)
                facts.root_served = line.root_served
                facts.end_to_end = line.end_to_end
                facts.logprob_gap = math.nan if line.logprob_gap is None else line.logprob_gap
                facts.logprob_shift = math.nan if line.logprob_shift is None else line.logprob_shift
            case "evaluation":
                self.evaluations[line.when] = line
            case "finished":
                self.rollouts_from_remote = max(self.rollouts_from_remote, line.rollouts_from_remote)

    def verified(self) -> list[str]:
        """Versions that the trainer saw verified on the remote replica, ascending."""
        return sorted(version for version, facts in self.versions.items() if facts.logprob_gap is not None)

    def complete(self) -> bool:
        """Nothing is missing that a finished run leaves behind."""
        return len(self.verified()) > self.steps and all(facts.complete for facts in self.versions.values())

    def complaints(self) -> list[str]:
        """Why this run proves nothing, one sentence each; empty if it proves everything."""
        found = []
        if (seen := len(self.verified())) <= self.steps:
            found.append(f"{self.steps + 1} versions were to be verified on the replica, {seen} were")
        if not self.rollouts_from_remote:
            found.append("no rollout came from the remote replica")
        first = next(iter(sorted(self.versions)), "")
        for version, facts in sorted(self.versions.items()):
            found += [f"{version}: {complaint}" for complaint in _complaints(facts, self.versions[first])]
        return found

    def report(self, link: LinkReport) -> DemoReport:
        """The report as it stands."""
        return DemoReport(
            model=self.model,
            parameters=self.parameters,
            link=link,
            versions=tuple(_version_report(version, facts) for version, facts in sorted(self.versions.items())),
            all_match=not self.complaints(),
            rollouts_from_remote=self.rollouts_from_remote,
        )

    def _of(self, version: str) -> Facts:
        return self.versions.setdefault(version, Facts())


def _complaints(facts: Facts, first: Facts) -> list[str]:
    if facts.published is None:
        return ["not published by daemon A"]
    if not facts.match:
        return [f"published root {facts.published.root}, served root {facts.served_root or 'not read back'}"]
    if facts.logprob_gap is None or facts.logprob_shift is None:
        return ["its log-probs were not compared"]
    found = []
    # Written so that a NaN is a complaint.
    if not facts.logprob_gap <= LOGPROB_TOLERANCE:
        found.append(f"log-probs differ from the trainer's by {facts.logprob_gap:.3g}, above {LOGPROB_TOLERANCE}")
    other_weights = first.published is not None and first.published.root != facts.published.root
    if other_weights and not facts.logprob_shift > 0:
        found.append("log-probs are those of the first version, although the weights are not")
    return found


def _version_report(version: str, facts: Facts) -> VersionReport:
    published, pulled = facts.published, facts.pulled
    at_origin = published.seconds if published else Seconds()
    at_replica = facts.served.seconds if facts.served else Seconds()
    full = published.full_bytes if published else 0
    delta = pulled.pulled_bytes if pulled else 0
    return VersionReport(
        version=version,
        density=published.density if published else 0.0,
        full_bytes=full,
        delta_bytes=delta,
        percent_of_full=100 * delta / full if full else 0.0,
        seconds=VersionSeconds(
            settle=at_origin.settle,
            encode=at_origin.encode,
            transfer=pulled.seconds.transfer if pulled else 0.0,
            stage=at_replica.stage,
            pause=at_replica.pause,
            verify=at_replica.verify,
            end_to_end=facts.end_to_end,
        ),
        root_published=published.root if published else "",
        root_served=facts.served_root,
        match=facts.match,
        reward_mean=facts.reward_mean,
        logprob_gap=facts.logprob_gap,
    )
