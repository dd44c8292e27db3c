"""What happened, in order, and what must hold of it. Pure: told of events, asked whether they may have been."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_BYTES = 400 << 20
"""Of resident memory, at any moment."""
GROWTH_BYTES = 64 << 20
MOST_DESCRIPTORS = 256
GROWTH_DESCRIPTORS = 24
SETTLED_SECONDS = 60.0
"""How long after its start a daemon on a busy machine has all that it will need, compiled code above all."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A trainer asks for a version to be published; what its weights are is known from here on."""

    run: str
    number: int


@dataclass(frozen=True, slots=True)
class Published:
    """A daemon said that the version is durable."""

    run: str
    number: int


@dataclass(frozen=True, slots=True)
class Durable:
    """A region said that this is the newest version that it holds."""

    region: str
    run: str
    number: int


@dataclass(frozen=True, slots=True)
class Exported:
    """A region wrote a version out, and the bytes were compared with what the trainer offered."""

    region: str
    run: str
    number: int
    equal: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """Something was done to a region or a link."""

    kind: str
    at: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A daemon's process, `life` counting its starts, so many seconds after this one."""

    region: str
    life: int
    age: float
    resident: int
    descriptors: int


Event = Offered | Published | Durable | Exported | Fault | Measured


def violations(events: Sequence[Event]) -> Iterator[str]:
    """Everything that may not have happened."""
    offered: set[tuple[str, int]] = set()
    published: dict[str, int] = defaultdict(lambda: -1)
    newest: dict[tuple[str, str], int] = defaultdict(lambda: -1)
    for event in events:
        match event:
            case Offered(run, number):
                offered.add((run, number))
            case Published(run, number):
                published[run] = max(published[run], number)
            case Durable(region, run, number):
                if (run, number) not in offered:
                    yield f"{region} holds {run} {number}, which nobody offered"
                if number < newest[region, run]:
                    yield f"{region} went back in {run} from {newest[region, run]} to {number}"
                if region == "a" and number < published[run]:
                    yield f"a lost {run} {published[run]}, which it had acknowledged: its newest is {number}"
                newest[region, run] = max(newest[region, run], number)
            case Exported(region, run, number, equal):
                if not equal:
                    yield f"{region} exports {run} {number} with other bytes than were published"
            case Measured(region, life, _, resident, descriptors):
                if resident > MOST_BYTES or descriptors > MOST_DESCRIPTORS:
                    yield f"{region}, life {life}: {resident >> 20} MiB and {descriptors} descriptors"
    yield from _growths([event for event in events if isinstance(event, Measured)])


def unreached(events: Sequence[Event], regions: Sequence[str]) -> list[str]:
    """The regions that do not, at the end, hold the newest version that was acknowledged."""
    last: dict[tuple[str, str], int] = {}
    published: dict[str, int] = {}
    for event in events:
        if isinstance(event, Published):
            published[event.run] = max(published.get(event.run, -1), event.number)
        elif isinstance(event, Durable):
            last[event.region, event.run] = event.number
    return [
        f"{region} has {run} {last.get((region, run), 'never')}, and {number} was published"
        for run, number in published.items()
        for region in regions
        if last.get((region, run), -1) < number
    ]


def figures(events: Sequence[Event]) -> dict[str, object]:
    """What a soak came to, for people."""
    measured = [event for event in events if isinstance(event, Measured)]
    kinds = Counter(type(event).__name__ for event in events)
    return {
        "versions_published": kinds["Published"],
        "exports_compared": kinds["Exported"],
        "faults": dict(sorted(Counter(event.kind for event in events if isinstance(event, Fault)).items())),
        "most_resident_mib": max((event.resident for event in measured), default=0) >> 20,
        "most_descriptors": max((event.descriptors for event in measured), default=0),
        "longest_life_seconds": round(max((event.age for event in measured), default=0.0)),
    }


def _growths(measured: Sequence[Measured]) -> Iterator[str]:
    """Lives in which memory or descriptors grew once all was there."""
    lives: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for event in measured:
        if event.age >= SETTLED_SECONDS:
            lives[event.region, event.life].append(event)
    for (region, life), samples in lives.items():
        first, last = samples[0], samples[-1]
        if last.resident - first.resident > GROWTH_BYTES:
            grown = (last.resident - first.resident) >> 20
            yield f"{region}, life {life}: {grown} MiB more after {last.age:.0f} s"
        if last.descriptors - first.descriptors > GROWTH_DESCRIPTORS:
            yield f"{region}, life {life}: {last.descriptors - first.descriptors} more descriptors"
