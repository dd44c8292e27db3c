"""Asks both daemons, again and again, what they hold and do, and keeps what a viewer wants to see.

It may only ask: nothing here changes anything. A daemon that does not answer is one that is being started
again; what it said before stands until it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deltad.client import Client
from deltad.client.messages import ReplicaReport, StatusView
from deltad.demo.place import RUN, Place
from deltad.demo.report import Ledger, TrainerLine
from deltad.errors import DeltadError

ASK_SECONDS = 0.25
_ANSWER_SECONDS = 5.0
_RATE_SECONDS = 1.0


@dataclass(slots=True)
class RegionSight:
    """A region as last seen: `latest` durable version, what its daemon does, and whether it answers."""

    name: str
    latest: str = ""
    activity: str = ""
    up: bool = False


class LinkMeter:
    """Bytes per second over the last second or so, from counts that are read now and then. Does no IO."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def read(self, now: float, count: int) -> float:
        """The rate after this reading. A count that is lower than before starts anew: so did the link."""
        if self._points and count < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[1][0] <= now - _RATE_SECONDS:
            self._points.pop(0)
        (since, before), (until, after) = self._points[0], self._points[-1]
        return (after - before) / (until - since) if until > since else 0.0


@dataclass(slots=True)
class Sight:
    """Everything that is shown while the demo runs."""

    region_1: RegionSight
    region_2: RegionSight
    replica: ReplicaReport | None = None
    trainer: str = "starting"
    written: list[str] = field(default_factory=list)
    link_bytes: int = 0
    link_rate: float = 0.0


class Observer:
    """Fills the ledger and the sight from the daemons' answers, the link's counts and the trainer's lines."""

    def __init__(self, place: Place, ledger: Ledger, on_news: Callable[[], None]) -> None:
        self._place = place
        self._ledger = ledger
        self._on_news = on_news
        self._clients = tuple(
            Client(region.socket, timeout=_ANSWER_SECONDS) for region in (place.region_1, place.region_2)
        )
        self._again = asyncio.Event()
        self._meter = LinkMeter()
        self.sight = Sight(RegionSight(place.region_1.name), RegionSight(place.region_2.name))

    async def run(self) -> None:
        """Ask until cancelled; at once after each of the trainer's lines."""
        while True:
            await self.ask()
            self._on_news()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), ASK_SECONDS)
            self._again.clear()

    async def ask(self) -> None:
        """Ask both daemons once, side by side."""
        first, second = self._clients
        await asyncio.gather(
            self._look(first, self.sight.region_1, self._origin_says),
            self._look(second, self.sight.region_2, self._remote_says),
        )
        self._read_link(self._place.link_stats("relay-link"))

    async def complete(self, patience: float) -> None:
        """Ask until nothing is missing of a finished run, or for `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.ask()
                while not self._ledger.complete():
                    await asyncio.sleep(ASK_SECONDS)
                    await self.ask()

    def trainer_says(self, line: TrainerLine) -> None:
        """Take note of a line of the trainer."""
        self._ledger.trainer(line)
        if line.event == "checkpoint_written" and line.version not in self.sight.written:
            self.sight.written.append(line.version)
        self.sight.trainer = describe(line) or self.sight.trainer
        self._again.set()

    async def _look(self, client: Client, region: RegionSight, take: Callable[[Client, StatusView], None]) -> None:
        try:
            view = await asyncio.to_thread(client.status)
            run = view.region.runs.get(RUN)
            region.up = True
            region.activity = run.activity if run else ""
            if run and run.latest:
                region.latest = run.latest
                await asyncio.to_thread(take, client, view)
        except DeltadError:
            region.up = False
            region.activity = "does not answer"

    def _origin_says(self, client: Client, view: StatusView) -> None:
        self._ledger.published(client.versions(RUN))

    def _remote_says(self, client: Client, view: StatusView) -> None:
        for replica in view.region.runs[RUN].replicas:
            self.sight.replica = replica
            self._ledger.served(replica)
        self._ledger.pulled(client.versions(RUN))

    def _read_link(self, path: Path) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
            count = int(msgspec.json.decode(path.read_bytes())["bytes_from_target"])
            self.sight.link_rate = self._meter.read(asyncio.get_running_loop().time(), count)
            self.sight.link_bytes = count


def describe(line: TrainerLine) -> str:
    """What the trainer does after a line, in a few words; empty where the line does not tell."""
    texts = {
        "started": "loaded the model",
        "step_started": f"step {line.step}: samples from {line.version} on the replica",
        "rollouts": f"step {line.step}: learns from {line.samples} samples, mean reward {_figure(line.reward_mean)}",
        "trained": f"step {line.step}: writes a checkpoint",
        "checkpoint_written": f"waits for {line.version} on the replica",
        "version_verified": f"compared log-probs at {line.version}: {_figure(line.logprob_gap)} apart",
        "evaluation": f"held-out reward {line.when} training: {_figure(line.reward_mean)}",
        "waiting": f"waits for the {line.what}",
        "finished": "finished",
        "failed": f"failed: {line.error}",
    }
    return texts.get(line.event, "")


def _figure(value: float | None) -> str:
    return "nan" if value is None else f"{value:.3f}"
