"""A replica waits for its way back as long as that is worth it, and not longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.daemon.inverses import Inverses
from deltad.daemon.versions import Versions
from deltad.delta.backend import Mode, choose
from deltad.store.derive import Deriver, Made
from deltad.store.store import Store
from deltad.types import Variant, Version
from tests.kit.versions import Lineage

VARIANT = Variant("bf16")


class Slow(Deriver):
    """Makes nothing before it is let."""

    def __init__(self, versions: Versions, store: Store) -> None:
        super().__init__(store, versions.records, VARIANT, versions.mirror(VARIANT), choose())
        self.go = threading.Event()

    def make_edge(self, base: Version, target: Version, *, mode: Mode = "blind") -> Made:
        assert self.go.wait(60)
        return super().make_edge(base, target, mode=mode)


class Host:
    def __init__(self, home: Path) -> None:
        lineage = Lineage()
        self.first, *_, self.last = [lineage.publish().version for _ in range(3)]
        self.store = Store.open(home / "store")
        lineage.fill(self.store)
        self.changed = asyncio.Event()
        self.versions = Versions(self.store, lineage.versions[0].run, choose(), daemon="a", on_change=self.changed.set)
        self.slow = Slow(self.versions, self.store)

    def way(self) -> tuple[str, ...] | None:
        steps = self.versions.way(VARIANT, self.last, self.versions.records.record(self.first))
        return steps and tuple(step.version for step in steps)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.slow.go.set()
    host.store.close()


async def test_whoever_asks_for_the_way_back_is_told_to_ask_again_and_then_given_it(host: Host) -> None:
    assert host.way() is None
    assert host.way() is None
    await asyncio.wait_for(host.changed.wait(), 60)
    assert host.way() == (str(host.first),)
    (edge,) = host.versions.records.derived()
    assert edge.local


async def test_an_inverse_that_takes_too_long_is_not_waited_for_but_found_once_it_is_there(host: Host) -> None:
    inverses = Inverses(host.slow, host.changed.set, seconds=0.01)
    assert inverses.coming(host.last, host.first)
    await asyncio.wait_for(host.changed.wait(), 60)
    assert not inverses.coming(host.last, host.first), "it is given up"
    host.slow.go.set()
    await asyncio.to_thread(host.slow.make_edge, host.last, host.first)
    assert host.way() == (str(host.first),)


async def test_a_version_that_is_not_held_has_no_way_back(host: Host) -> None:
    assert host.versions.way(VARIANT, Version(1, 99), host.versions.records.record(host.first)) == ()
