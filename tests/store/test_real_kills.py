"""SIGKILL in the midst of real system calls, at a spread of every kind (P5, P6, P9, P15, P29).

What strace kills has been warmed up, and its calls are counted from where the deed begins. Whatever is left opens
by itself: nothing acknowledged is lost, nothing partial is visible, and the same deed done again converges. Every
sweep prints how many points it tried. `make test-full` tries all of them, up to 60 of a kind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deltad.checkpoint.baseline import RECORD_NAME
from deltad.daemon.origin import Origin
from deltad.delta.backend import choose
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.mirror import Mirror
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import Version
from tests.kit.checkpoints import read_checkpoint
from tests.kit.injecting import Deed, calls_of, killed_in
from tests.kit.regions import RUN as PULLED
from tests.kit.regions import Downstream, Upstream
from tests.kit.trainer import RUN, VARIANT, Trainer
from tests.kit.versions import SMALL_CHUNKS, Lineage
from tests.kit.weights import ArrayWeights
from tests.kit.whole import whole_versions

FULL = os.environ.get("DELTAD_TEST_FULL") == "1"
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)
MOST = 60


@pytest.fixture
def home() -> Iterator[Path]:
    """In memory where there is room for that: a killed process loses nothing that it has written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


def spread(count: int) -> list[int]:
    """Which of `count` calls of one kind are tried."""
    most = MOST if FULL else 4
    return sorted({(2 * i + 1) * count // (2 * most) + 1 for i in range(most)})


def sweep(
    what: str, template: Path, ready: Callable[[Path], Deed], check: Callable[[Path], object], *more: Path
) -> None:
    """Kill a deed on a copy of the directory `template` at a spread of points, and check what is left.

    `more` are directories that a deed makes beside the copy, and that go with it.
    """
    copy = template.with_name("copy")

    def fresh() -> None:
        for directory in (copy, *more):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(template, copy, symlinks=True)

    fresh()
    ready(copy)()  # so that nothing is imported or compiled where calls are counted
    fresh()
    calls = calls_of(lambda: ready(copy), template.with_name("trace"))
    tried, killed = 0, dict.fromkeys(calls, 0)
    for call, count in calls.items():
        for number in spread(count):
            fresh()
            killed[call] += killed_in(lambda: ready(copy), call, number)
            check(copy)
            tried += 1
    print(f"killed {what} at {sum(killed.values())} of {tried} points: {killed}")
    assert sum(killed.values()) > tried // 2 > 1
    assert {"fsync", "openat"} <= {call for call, times in killed.items() if times}


def stored(home: Path) -> tuple[Path, Path, dict[Version, ArrayWeights]]:
    """A closed store with versions 0 and 1, a checkpoint of version 2, and the weights of all three."""
    trainer = Trainer(home)
    weights = {}
    for number in (0, 1):
        version = trainer.step(number)
        weights[version] = trainer.weights
    weights[Version(1, 2)] = trainer.weights.changed(0.03, seed=2)
    checkpoint = trainer.write(2, weights[Version(1, 2)])
    trainer.store.close()
    return home / "store", checkpoint, weights


def mirror_of(store: Store) -> Mirror:
    return Mirror(store, store.run(RUN), VARIANT, choose())


def exported(store: Store, version: Version, scratch: Path) -> ArrayWeights:
    mirror_of(store).export(store.run(RUN).record(version), scratch)
    weights = read_checkpoint(scratch)
    shutil.rmtree(scratch)
    return weights


def test_a_publish_that_is_killed_in_any_call_leaves_the_old_version_or_the_new_one(home: Path) -> None:
    before, checkpoint, weights = stored(home)
    versions = list(weights)

    def ready(path: Path) -> Deed:
        origin = Origin(Store.open(path), RUN, VARIANT, choose())
        return lambda: origin.publish(checkpoint, 2)

    def check(path: Path) -> None:
        kept = path / "runs" / RUN / "baseline" / VARIANT / RECORD_NAME
        baseline = msgspec.json.decode(kept.read_bytes())["version"] if kept.exists() else None
        store = Store.open(path)
        visible = whole_versions(store, RUN)
        assert visible in (versions[:2], versions)
        assert baseline in (None, str(versions[1]), str(visible[-1])), "the baseline moves last"
        for version in visible:
            assert exported(store, version, home / "export").equals(weights[version])
        Origin(store, RUN, VARIANT, choose()).publish(checkpoint, 2)
        assert whole_versions(store, RUN) == versions
        assert list(store.scratch.iterdir()) == []
        store.close()

    sweep("a publish", before, ready, check)


def test_a_mirror_advance_that_is_killed_in_any_call_loses_nothing(home: Path) -> None:
    before, _, weights = stored(home)
    store = Store.open(before)
    mirror_of(store).advance(store.run(RUN).record(Version(1, 0)))
    store.close()

    def ready(path: Path) -> Deed:
        store = Store.open(path)
        return lambda: mirror_of(store).advance(store.run(RUN).record(Version(1, 1)))

    def check(path: Path) -> None:
        store = Store.open(path)
        generations = mirror_of(store).generations()
        assert generations
        for version, directory in generations.items():
            assert read_checkpoint(directory).equals(weights[version])
        advanced = mirror_of(store).advance(store.run(RUN).record(Version(1, 1)))
        assert list(advanced.parent.iterdir()) == [advanced]
        assert read_checkpoint(advanced).equals(weights[Version(1, 1)])
        store.close()

    sweep("a mirror advance", before, ready, check)


def test_an_export_that_is_killed_in_any_call_is_absent_or_whole(home: Path) -> None:
    before, _, weights = stored(home)
    store = Store.open(before)
    mirror_of(store).advance(store.run(RUN).record(Version(1, 1)))
    store.close()
    exports = home / "exports"

    def ready(path: Path) -> Deed:
        exports.mkdir(exist_ok=True)
        store = Store.open(path)
        return lambda: mirror_of(store).export(store.run(RUN).record(Version(1, 1)), exports / "live")

    def check(path: Path) -> None:
        found = exports / "live"
        assert not found.exists() or read_checkpoint(found).equals(weights[Version(1, 1)])
        shutil.rmtree(exports)
        ready(path)()
        assert read_checkpoint(found).equals(weights[Version(1, 1)])

    sweep("an export", before, ready, check, exports)


def test_a_collection_that_is_killed_in_any_call_leaves_all_versions_or_those_that_are_kept(home: Path) -> None:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for number in range(6):
        lineage.publish(anchor=number == 3)
    *held, late = lineage.versions
    store = Store.open(home / "store", limits=LIMITS)
    for version in held:
        version.commit_into(store)
    store.close()
    everything, kept = [v.version for v in held], [v.version for v in held[3:]]

    def ready(path: Path) -> Deed:
        now = [0.0]
        store = Store.open(path, limits=LIMITS, clock=lambda: now[0])
        now[0] += LEASE_SECONDS + GRACE_SECONDS

        def work() -> None:
            collect(store, {late.run: Retention(versions=1)})
            store.close()

        return work

    def check(path: Path) -> None:
        store = Store.open(path, limits=LIMITS)
        assert whole_versions(store, late.run) in (everything, kept)
        store.close()
        ready(path)()
        store = Store.open(path, limits=LIMITS)
        assert whole_versions(store, late.run) == kept
        late.commit_into(store)
        assert whole_versions(store, late.run) == [*kept, late.version]
        store.close()

    sweep("a collection", home / "store", ready, check)


def test_a_pull_that_is_killed_in_any_call_leaves_the_old_version_or_the_new_one(home: Path) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    store = Store.open(home / "store")
    first.commit_into(store)
    store.close()
    lineage.fill(offered := Store.open(home / "offered"))
    offered.close()
    old, new = [first.version], [first.version, second.version]
    with upstream(home / "offered") as url:

        def ready(path: Path) -> Deed:
            return lambda: asyncio.run(pull(path, url, second.version))

        def check(path: Path) -> None:
            store = Store.open(path)
            assert whole_versions(store, second.run) in (old, new)
            store.close()
            ready(path)()
            store = Store.open(path)
            assert whole_versions(store, second.run) == new
            store.close()

        sweep("a pull", home / "store", ready, check)


async def pull(path: Path, url: str, version: Version) -> None:
    async with Downstream(path, url) as downstream:
        latest = downstream.store.run(PULLED).latest()
        if latest is None or latest.version < version:
            await downstream.reaches(version)


@contextmanager
def upstream(path: Path) -> Iterator[str]:
    """A relay over a store, in a process of its own; its URL."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(serve(path, tells))
        finally:
            os._exit(1)
    try:
        yield f"http://127.0.0.1:{int(os.read(told, 16))}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tells)


async def serve(path: Path, tells: int) -> None:
    async with Upstream(path) as relay:
        os.write(tells, str(relay.port).encode())
        await asyncio.Event().wait()
