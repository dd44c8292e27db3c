"""The replica loop: carries out what `deltad.protocol.activate` decides, and tells it what happened.

It has no rules of its own about what may follow what. A daemon that is gone, restarted or has
forgotten this replica only delays: the loop backs off, registers again, repeats the newest state and
asks for anything after what it serves.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable

import msgspec
import numpy as np

from deltad.client.messages import RegisterRequest, StateRequest, Step
from deltad.delta.backend import Backend
from deltad.delta.digest import U64, root_of
from deltad.errors import DeltadError, FormatError, IntegrityError, NotFoundError, ReplicaError
from deltad.protocol.activate import (
    Activation,
    Ask,
    Broken,
    Commit,
    CommitBegun,
    Committed,
    Decision,
    Event,
    Fence,
    Offered,
    ReadBack,
    ReadWeights,
    Registered,
    Report,
    RolledBack,
    Serve,
    Staged,
    StageExport,
    StageFailed,
    StageSteps,
    Unfit,
)
from deltad.types import RunId, Variant, Version, parse_version
from rollout_plugin.commit import commit_deltas, commit_export
from rollout_plugin.engines import Engine, Loader
from rollout_plugin.log import Log
from rollout_plugin.serving import Serving
from rollout_plugin.staging import Daemon, StagedEngine, StagedExport, Stager, Staging

POLL_SECONDS = 20.0
_FIRST_RETRY = 0.2
_LONGEST_RETRY = 5.0
_LEAVING = "the replica is shutting down"


class Replica:
    """One replica of a run at one daemon. `run` belongs to one thread; `finish` to any other.

    `poll_seconds` bounds how long a lost wake-up can delay.
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        run: RunId,
        variant: Variant,
        name: str,
        address: str,
        load: Loader,
        serving: Serving,
        backend: Backend,
        log: Log,
        on_verified: Callable[[Version], None] = lambda version: None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._daemon = daemon
        self._registration = RegisterRequest(name, run, variant, address, boot=uuid.uuid4().hex)
        self._name = name
        self._serving = serving
        self._backend = backend
        self._log = log
        self._on_verified = on_verified
        self._poll_seconds = poll_seconds
        self._stager = Stager(daemon, run=run, variant=variant, replica=name, load=load, backend=backend)
        self._rng = random.Random()  # noqa: S311 (spreads retries)
        self._machine = Activation(self._rng)
        self._engine: Engine | None = None
        self._sums: U64 = np.zeros((0, 2), np.uint64)
        self._staged: Staging | None = None
        self._unreported = False
        self._forgotten = 0
        self._stopped = threading.Event()
        self._undivided = threading.Lock()
        """Held by what `finish` must not fall into: a registration, a commit, or the start of serving."""

    def run(self) -> None:
        """Live until `finish`. Whatever the daemon does, this neither ends nor raises."""
        event = self._register()
        while event is not None and not self._stopped.is_set():
            event = self._carry_out(self._machine.handle(event))

    def finish(self) -> None:
        """Let a running commit end, start no other, and take leave of the daemon."""
        self._stopped.set()
        with self._undivided:
            if self._engine is not None:
                self._engine.fence(_LEAVING)
            self._serving.fence(_LEAVING)
            try:
                self._daemon.unregister_replica(self._name)
            except DeltadError as error:
                self._log.write("unregister_failed", error=str(error))
            if self._engine is not None:
                self._engine.close()

    def _carry_out(self, decisions: tuple[Decision, ...]) -> Event | None:
        """What came of the decisions; None once the replica is to end."""
        event: Event | None = None
        for decision in decisions:
            match decision:
                case Report(state):
                    self._report(state)
                case Serve(version):
                    self._serve(version)
                case Fence(reason):
                    self._fence(reason)
                case Ask(after, delay):
                    event = self._ask(after, delay)
                case StageSteps(steps):
                    event = self._stage_steps(steps)
                case StageExport(target):
                    event = self._stage_export(target)
                case Commit(cache):
                    event = self._commit(cache)
                case ReadWeights():
                    event = self._read_back()
        return event

    # Talking to the daemon.

    def _register(self) -> Event | None:
        for attempt in itertools.count(1):
            try:
                with self._undivided:
                    if self._stopped.is_set():
                        return None
                    self._daemon.register_replica(self._registration)
            except DeltadError as error:
                if not self._try_again("register", attempt, error):
                    return None
            else:
                return Registered()
        return None

    def _ask(self, after: Version | None, delay: float) -> Event | None:
        if delay and self._stopped.wait(delay):
            return None
        for attempt in itertools.count(1):
            try:
                if self._unreported:
                    self._report(self._machine.report())
                reply = self._daemon.next(self._name, after=after or "", wait=self._poll_seconds)
            except NotFoundError as error:
                # A daemon that restarted has forgotten us. One that still does not know us, though it took
                # the registration, has a trouble that asking at once will not end.
                self._forgotten += 1
                if self._forgotten > 1 and not self._try_again("next", self._forgotten, error):
                    return None
                return self._register()
            except DeltadError as error:
                if not self._try_again("next", attempt, error):
                    return None
            else:
                self._forgotten = 0
                return Offered(reply)
        return None

    def _report(self, state: StateRequest) -> None:
        """Once, since losing it only delays: `_ask` repeats the newest state before it asks."""
        self._log.write("state", **msgspec.to_builtins(state))
        try:
            self._daemon.report_state(self._name, state)
            self._unreported = False
        except DeltadError as error:
            self._unreported = error.retryable
            self._log.write("report_failed", error=str(error))

    def _try_again(self, what: str, attempt: int, error: DeltadError) -> bool:
        """Wait a while; False once the replica is to end."""
        delay = min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(attempt - 1, 10)) * (1 + self._rng.random()) / 2
        self._log.write("retry", what=what, attempt=attempt, seconds=round(delay, 3), error=str(error))
        return not self._stopped.wait(delay)

    # Staging, committing, reading back.

    def _stage_steps(self, steps: tuple[Step, ...]) -> Event:
        engine, serving = self._engine, self._machine.serving
        assert engine is not None, "deltas are taken only where something is served"
        assert serving is not None, "deltas are taken only where something is served"
        return self._stage(steps[-1].version, lambda: self._stager.deltas(steps, engine.live, serving.root))

    def _stage_export(self, target: Version) -> Event:
        return self._stage(str(target), lambda: self._stager.whole(target, self._engine))

    def _stage(self, target: str, work: Callable[[], Staging]) -> Event:
        self._serving.expect(parse_version(target))
        begun = time.monotonic()
        try:
            staged = self._staged = work()
        except ReplicaError as error:
            self._serving.expect(None)
            self._log.write("unfit", target=target, error=str(error))
            return Unfit(str(error))
        except Exception as error:
            self._serving.expect(None)
            self._log.write("stage_failed", target=target, error=repr(error))
            if isinstance(error, FormatError | IntegrityError) and self._is_damaged():
                return Broken(f"staging: the weights are no longer the version served: {error}")
            return StageFailed(str(error) or repr(error))
        return Staged(staged.version, staged.root, time.monotonic() - begun)

    def _is_damaged(self) -> bool:
        """Whether the live weights are not what they were verified to be: then nothing can be read beside them."""
        engine, serving = self._engine, self._machine.serving
        if engine is None or serving is None:
            return False
        return root_of(engine.live.layout, engine.live.sums(self._backend)) != serving.root

    def _commit(self, cache: str) -> Event | None:
        staged, self._staged = self._staged, None
        assert staged is not None, "a commit follows staging"
        self._carry_out(self._machine.handle(CommitBegun()))
        with self._undivided:
            if self._stopped.is_set():
                return None
            self._serving.doubt(staged.version)
            outcome = self._write(staged, cache)
        self._serving.doubt(staged.version if isinstance(outcome, Committed) else None)
        return outcome

    def _write(self, staged: Staging, cache: str) -> Committed | RolledBack | Broken:
        if isinstance(staged, StagedEngine):
            self._engine = staged.engine  # nothing was served, so nothing is paused
            return Committed(0.0)
        assert self._engine is not None, "only the first load brings its engine"
        if isinstance(staged, StagedExport):
            return commit_export(self._engine, staged, self._backend, cache)
        return commit_deltas(self._engine, staged, self._sums, cache)

    def _read_back(self) -> Event:
        assert self._engine is not None, "only an engine is read back"
        live = self._engine.live
        begun = time.monotonic()
        try:
            live.check_live()
            self._sums = live.sums(self._backend)
        except Exception as error:
            return Broken(f"reading back: {type(error).__name__}: {error}")
        return ReadBack(root_of(live.layout, self._sums), time.monotonic() - begun)

    def _serve(self, version: Version) -> None:
        assert self._engine is not None, "what is verified was read from an engine"
        with self._undivided:
            if self._stopped.is_set():
                return
            self._engine.unfence()
            self._serving.verified(self._engine)
        self._on_verified(version)

    def _fence(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.fence(reason)
        suspects = self._serving.fence(reason)
        self._log.write("fenced", reason=reason, suspect_answers=suspects)
