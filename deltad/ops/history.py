"""What the status page remembers: how far each region was behind, and the last events. Bounded; lost at a restart.

Pure but for the handler of `logging` that keeps events. Invariant: an event's words are those of the log, which names
no secret.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltad.client.messages import RegionView, StatusView
from deltad.types import parse_version

SAMPLES = 180
"""Of one region and run; with one each ten seconds, half an hour."""
SAMPLE_SECONDS = 10.0
_SERIES = 512
_EVENTS = 30
_NOTED = frozenset(
    {
        *("daemon_ready", "daemon_stopping", "config_reloaded", "version_published", "version_pulled"),
        *("target_moved", "version_pinned", "version_unpinned", "backend_switched", "replica_registered"),
    }
)
"""What is worth a line although nothing is amiss."""


def behind(regions: Sequence[RegionView]) -> dict[tuple[str, str], int]:
    """By (daemon, run): of how many versions its slowest replica, or without one its store, lacks; by what is known."""
    sequences: dict[str, dict[str, int]] = {}
    for region in regions:
        for name, run in region.report.runs.items():
            sequences.setdefault(name, {}).update({info.version: info.sequence for info in run.versions})
    found = {}
    for region in regions:
        for name, run in region.report.runs.items():
            known = sequences[name]
            newest = max(known.values(), default=0)
            lacks = newest - known[run.latest] if run.latest in known else _by_number(run.latest, known)
            slowest = max((replica.staleness for replica in run.replicas), default=0)
            found[region.report.daemon, name] = max(lacks, slowest)
    return found


def _by_number(latest: str, known: dict[str, int]) -> int:
    """Where a version's place is not told, the numbers say about how far it is behind."""
    if not known or not latest:
        return len(known)
    return max(parse_version(name).number for name in known) - parse_version(latest).number


@dataclass(slots=True)
class History:
    """Samples of one daemon's life, each ten seconds, oldest first."""

    samples: dict[tuple[str, str], deque[int]] = field(default_factory=dict)
    _due: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a sample would be taken at `now`, in seconds of a monotonic clock."""
        return now >= self._due

    def note(self, view: StatusView, now: float) -> None:
        """How things are at `now`; taken if a sample is due."""
        if not self.is_due(now):
            return
        self._due = now + SAMPLE_SECONDS
        regions = [RegionView(view.region, 0.0, True), *view.regions]
        for key, count in behind(regions).items():
            if key not in self.samples and len(self.samples) >= _SERIES:
                continue
            self.samples.setdefault(key, deque(maxlen=SAMPLES)).append(count)
        shown = {region.report.daemon for region in regions}
        for key in [key for key in self.samples if key[0] not in shown]:
            del self.samples[key]


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the log: when (Unix time), how grave, and its words."""

    at: float
    level: str
    words: str


class Events(logging.Handler):
    """Keeps the last events: all that is amiss, and of the rest what an operator wants to see."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Event] = deque(maxlen=_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`, in any thread."""
        said = record.msg
        if isinstance(said, dict):
            name = str(said.get("event", ""))
            fields = ", ".join(f"{k} {v}" for k, v in said.items() if k not in _ENVELOPE and v not in ("", None))
        else:
            name, fields = record.getMessage(), ""
        if record.levelno >= logging.WARNING or name in _NOTED:
            words = name.replace("_", " ") + (f": {fields}" if fields else "")
            self.last.append(Event(record.created, record.levelname.lower(), words[:500]))


_ENVELOPE = frozenset({"event", "level", "logger", "timestamp", "exc_info", "exception", "stack_info"})
