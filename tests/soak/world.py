"""Three regions in a row, two trainers, and what is done to them: real daemons, real links, a small real disk."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from deltad.client.messages import ExportRequest, PublishRequest
from deltad.errors import DeltadError
from tests.kit.chaos import ChaosProxy
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights
from tests.soak.history import Durable, Event, Exported, Fault, Measured, Offered, Published

RUNS = ("one", "two")
_DISK = 512 << 20
_REMEMBERED = 60
"""How many versions' weights are kept for comparing."""
_CLOCK = """
import os, time
ahead = float(os.environ["DELTAD_TEST_CLOCK"])
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + ahead
time.time_ns = lambda: now_ns() + int(ahead * 1e9)
"""


class World:
    """`a` publishes, `b` pulls from it and `c` from `b`, over links that can be cut. `seed` fixes what is done when."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home = home
        self.rng = random.Random(seed)
        self.events: list[Event] = []
        self.weights: dict[tuple[str, int], ArrayWeights] = {}
        self.lives: dict[str, tuple[int, float]] = {}
        port = free_port()
        self.links = {"b": ChaosProxy(port), "c": ChaosProxy(port + 1)}
        relay = '[relay]\nlisten = "127.0.0.1:{}"\ntoken_file = "token"\n'
        declared = "".join(f'[[run]]\nid = "{run}"\nkeep_versions = 20\n' for run in RUNS)
        self._sections = {"a": relay.format(port) + declared, "b": relay.format(port + 1), "c": ""}
        self.daemons: dict[str, Daemon] = {}
        (home / "clock").mkdir(parents=True)
        (home / "clock" / "sitecustomize.py").write_text(_CLOCK)
        self.enough = asyncio.Event()
        """Set once no further fault is to be made."""
        self.mounted = False
        self.disk: Path | None = None
        self.linked: list[ChaosProxy] = []

    async def __aenter__(self) -> World:
        try:
            await self._enter()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _enter(self) -> None:
        for name, sections in self._sections.items():
            upstream = ""
            if link := self.links.get(name):
                await link.__aenter__()
                self.linked.append(link)
                upstream = f'[[upstream]]\nurl = "{link.url}"\ntoken_file = "token"\n'
            self.daemons[name] = Daemon(self.home / name, name, sections + upstream)
        # Not below the directory of the test: what is mounted there would be in the way of whoever tidies it up.
        self.disk = Path(tempfile.mkdtemp(prefix="deltad-soak-"))
        (self.home / "b" / "store").symlink_to(self.disk)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(self.disk)]
        mounted = await asyncio.to_thread(subprocess.run, mount, check=False, capture_output=True)
        self.mounted = mounted.returncode == 0
        for name in self.daemons:
            await self.start(name)

    async def __aexit__(self, *_: object) -> None:
        for daemon in self.daemons.values():
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.kill()
        if self.mounted:
            await asyncio.to_thread(subprocess.run, ["umount", str(self.disk)], check=True)
        if self.disk is not None:
            self.disk.rmdir() if self.mounted else shutil.rmtree(self.disk)
        for link in self.linked:
            await link.__aexit__(None, None, None)

    async def start(self, name: str, *, ahead: float = 0.0) -> None:
        """Start a daemon whose wall clock is so many seconds `ahead`."""
        daemon = self.daemons[name]
        path = f"{self.home / 'clock'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        clock = {"PYTHONPATH": path, "DELTAD_TEST_CLOCK": str(ahead)} if ahead else {}
        daemon.environment = {"PYTHONFAULTHANDLER": "1", **clock}
        await asyncio.to_thread(daemon.start)
        life, _ = self.lives.get(name, (0, 0.0))
        self.lives[name] = life + 1, time.monotonic()

    async def where_it_hangs(self) -> str:
        """What daemons that do not answer do, thread by thread; ends them. And the last of the log of all."""
        told = []
        for name, daemon in self.daemons.items():
            process = daemon.process
            assert process is not None
            try:
                status = await asyncio.wait_for(asyncio.to_thread(daemon.client.status), 10.0)
                told.append(f"{name} answers: {status.region.runs} {status.upstreams} {status.reasons}")
            except (DeltadError, TimeoutError) as error:
                told.append(f"{name} does not answer: {error!r}; exit code {process.poll()}")
                if process.poll() is None:
                    process.send_signal(signal.SIGABRT)
                    await asyncio.sleep(2.0)
            told.append(daemon.log[-6000:])
        return "\n".join(told)

    # Trainers and whoever looks on.

    async def train(self, run: str) -> None:
        """Publish a version after the other; one that is not acknowledged is offered again."""
        weights, number = ArrayWeights.random(MODEL, seed=len(run)), 0
        while True:
            weights = weights.changed(0.02, seed=number)
            self.weights[run, number] = weights
            self.weights.pop((run, number - _REMEMBERED), None)
            directory = self.home / "checkpoints" / run / f"step_{number}"
            await asyncio.to_thread(write_checkpoint, directory, weights)
            self.events.append(Offered(run, number))
            while True:
                with suppress(DeltadError):
                    request = PublishRequest(str(directory), number)
                    await asyncio.to_thread(self.daemons["a"].client.publish, run, request, timeout=20.0)
                    break
                await asyncio.sleep(0.2)
            self.events.append(Published(run, number))
            shutil.rmtree(self.home / "checkpoints" / run / f"step_{number - 2}", ignore_errors=True)
            number += 1
            await asyncio.sleep(0.5)

    async def look(self, region: str) -> None:
        """See again and again what a region holds, and compare what it exports."""
        seen: dict[str, int] = {}
        while True:
            for run in RUNS:
                with suppress(DeltadError):
                    await self._look_at(region, run, seen)
            await asyncio.sleep(0.5)

    async def _look_at(self, region: str, run: str, seen: dict[str, int]) -> None:
        client = self.daemons[region].client
        info = await asyncio.to_thread(client.latest, run)
        if info is None:
            return
        number = int(info.version[1:])
        self.events.append(Durable(region, run, number))
        if seen.get(run) == number or (run, number) not in self.weights:
            return
        directory = self.home / "exports" / f"{region}-{run}"
        shutil.rmtree(directory, ignore_errors=True)
        request = ExportRequest(version=info.version, directory=str(directory))
        await asyncio.to_thread(client.export, run, request, timeout=20.0)
        found = await asyncio.to_thread(read_checkpoint, directory)
        self.events.append(Exported(region, run, number, found.equals(self.weights[run, number])))
        seen[run] = number

    async def measure(self) -> None:
        """Note each second what the processes hold."""
        while True:
            for name, daemon in self.daemons.items():
                with suppress(OSError, ValueError):
                    assert daemon.process is not None
                    proc = Path("/proc") / str(daemon.process.pid)
                    resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                    descriptors = len(list((proc / "fd").iterdir()))
                    life, since = self.lives[name]
                    self.events.append(Measured(name, life, time.monotonic() - since, resident, descriptors))
            await asyncio.sleep(1.0)

    # What is done to them.

    async def trouble(self) -> None:
        """One fault after another, each over before the next; which, where and when, the seed says."""
        while not self.enough.is_set():
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            kinds = [self.kill, self.cut, self.pause, self.skew, *([self.fill] if self.mounted else [])]
            await self.rng.choice(kinds)()

    async def kill(self) -> None:
        name = self.rng.choice(sorted(self.daemons))
        self.events.append(Fault("kill", name))
        await asyncio.to_thread(self.daemons[name].kill)
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        await self.start(name)

    async def cut(self) -> None:
        name = self.rng.choice(sorted(self.links))
        self.events.append(Fault("cut", name))
        for _ in range(self.rng.randrange(1, 6)):
            await self.links[name].cut_all()
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))

    async def pause(self) -> None:
        name = self.rng.choice(sorted(self.daemons))
        process = self.daemons[name].process
        assert process is not None
        self.events.append(Fault("pause", name))
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
        finally:
            process.send_signal(signal.SIGCONT)

    async def skew(self) -> None:
        """A daemon starts again with a clock that is off by up to two days, and goes on with it."""
        name = self.rng.choice(sorted(self.daemons))
        ahead = self.rng.uniform(-172_800, 172_800)
        self.events.append(Fault("skew", name))
        await asyncio.to_thread(self.daemons[name].stop)
        await self.start(name, ahead=ahead)

    async def fill(self) -> None:
        """The disk of `b` is full for a while."""
        self.events.append(Fault("fill", "b"))
        store = self.home / "b" / "store"
        ballast = store / "ballast"
        free = os.statvfs(store).f_bavail * os.statvfs(store).f_frsize
        try:
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(free - (1 << 20), 1))
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
        finally:
            ballast.unlink(missing_ok=True)
