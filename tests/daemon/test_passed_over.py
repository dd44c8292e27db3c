"""Daemons that lag, join late or sit behind another: they pass versions over, and nobody below is the worse for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import ExportRequest
from deltad.config import load_config
from deltad.daemon.node import Node
from deltad.daemon.versions import Versions
from deltad.delta.backend import choose
from deltad.errors import NotFoundError, UnavailableError
from deltad.relay.puller import PullStats
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version
from tests.kit.checkpoints import read_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.derived import Derived, anchor, skip_delta
from tests.kit.versions import Lineage, Published

BEHIND = 40
WAIT = 60.0


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    """v1, an anchor, to v41, each with a delta from the one before."""
    lineage = Lineage(tensors=2, density=0.01)
    for _ in range(BEHIND + 1):
        lineage.publish()
    return lineage


def commit_over(store: Store, made: Derived, target: Published) -> None:
    """A version has come over an edge that its record does not name."""
    for digest, data in made.objects.items():
        (store.put_chunk if digest in made.chunks else store.put)(data)
    store.run(target.run).commit(target.data, [Digest(made.ref.manifest)])


@pytest.fixture(scope="module")
def ladder(lineage: Lineage) -> list[Derived]:
    """v1 → v33 → v41, and v33 as a whole."""
    versions = lineage.versions
    return [skip_delta(versions[0:33]), skip_delta(versions[32:41]), anchor(versions[32])]


class Chain:
    """Daemon a, which holds all versions; b, which pulls from a; and c, which pulls from b."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ports = {}
        for name in "ab":
            self.ports[name] = max(self.ports.values(), default=free_port() - 1) + 1
        self.a = self._daemon("a", upstream="")
        self.b = self._daemon("b", upstream="a")
        self.c = self._daemon("c", upstream="b")

    def _daemon(self, name: str, upstream: str) -> Daemon:
        # What is derived here is said by each test, and not by the daemons' own policy.
        sections = 'derive_rate = "0B"\n'
        if name in self.ports:
            sections += f'[relay]\nlisten = "127.0.0.1:{self.ports[name]}"\ntoken_file = "token"\n'
        if upstream:
            sections += f'[[upstream]]\nurl = "http://127.0.0.1:{self.ports[upstream]}"\ntoken_file = "token"\n'
        return Daemon(self.home / name, name, sections)

    def fill(self, daemon: Daemon, versions: list[Published], edges: list[Derived]) -> None:
        """What a daemon that does not run holds from now on."""
        store = Store.open(daemon.home / "store")
        for published in versions:
            published.commit_into(store)
        for made in edges:
            made.add_to(store)
        store.close()

    def check(self, daemon: Daemon, published: Published) -> None:
        """The daemon comes to hold a version, and hands out the very weights that were published."""
        before = Version(1, published.version.number - 1)
        assert daemon.client.latest("policy", after=before, wait=WAIT) is not None, daemon.log
        assert daemon.client.verify("policy", str(published.version)).match
        directory = self.home / f"export-{daemon.name}"
        daemon.client.export("policy", ExportRequest(version=str(published.version), directory=str(directory)))
        assert read_checkpoint(directory).equals(published.weights)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    chain = Chain(tmp_path)
    yield chain
    for daemon in (chain.a, chain.b, chain.c):
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def test_two_daemons_in_a_row_that_are_forty_versions_behind_take_the_path_in_bytes(
    chain: Chain, lineage: Lineage, ladder: list[Derived]
) -> None:
    chain.fill(chain.a, lineage.versions, ladder)
    for laggard in (chain.b, chain.c):
        chain.fill(laggard, lineage.versions[:1], [])
    for daemon in (chain.a, chain.b, chain.c):
        daemon.start()
    for daemon in (chain.b, chain.c):  # before one is stopped that another one pulls from
        chain.check(daemon, lineage.versions[BEHIND])
    for daemon in (chain.b, chain.c):
        infos = daemon.client.versions("policy")
        assert [(info.version, info.kind, info.base) for info in infos[1:]] == [
            ("v000033", "skip-delta", "v000001"),
            ("v000041", "skip-delta", "v000033"),
        ]
        records = sum(len(lineage.versions[number].data) for number in (32, 40))
        # The layout and the files are held since the first version.
        assert sum(info.pulled_bytes for info in infos) == ladder[0].bytes + ladder[1].bytes + records
        assert daemon.stop() == 0


def test_a_newcomer_that_is_killed_on_the_way_takes_one_anchor_and_one_skip_delta(
    chain: Chain, lineage: Lineage, ladder: list[Derived]
) -> None:
    """The anchor that its upstream's host cut, since the newest version is nearer to that; and no other version."""
    chain.fill(chain.a, lineage.versions, ladder[1:])
    chain.a.start()
    chain.b.start()
    with contextlib.suppress(UnavailableError, NotFoundError):
        chain.b.client.latest("policy", wait=0.03)
    chain.b.kill()
    chain.b.start()
    chain.check(chain.b, lineage.versions[BEHIND])
    infos = chain.b.client.versions("policy")
    assert [(info.version, info.kind) for info in infos] == [("v000033", "anchor"), ("v000041", "skip-delta")]


async def test_a_region_whose_link_is_slower_than_the_trainer_says_so_in_its_report(
    tmp_path: Path, lineage: Lineage, ladder: list[Derived]
) -> None:
    home = Daemon(tmp_path / "b", "b", '[[upstream]]\nurl = "http://127.0.0.1:9"\ntoken_file = "token"\n')
    store = Store.open(home.home / "store")
    node = Node(load_config(home.config), store)
    versions = [lineage.versions[i] for i in (0, 32, 40)]
    stats = PullStats(record=1, layout=0, manifest=0, page=0, file=0, chunk=0, seconds=1.0)
    versions[0].commit_into(store)
    node.on_pulled(versions[0].record, stats)
    for made, published in zip(ladder, versions[1:], strict=False):
        commit_over(store, made, published)
        node.on_pulled(published.record, stats)
    said = "the link is slower than the cadence: 38 of the last 40 versions skipped"
    assert said in node.region_report().runs["policy"].activity
    store.close()


# Replicas of a daemon that passed versions over.


@pytest.fixture
def gaps(tmp_path: Path, lineage: Lineage, ladder: list[Derived]) -> Iterator[Versions]:
    """A daemon's versions v1, v33 and v41, reached over skip deltas."""
    store = Store.open(tmp_path / "store")
    versions = lineage.versions
    versions[0].commit_into(store)
    for made, target in ((ladder[0], versions[32]), (ladder[1], versions[40])):
        commit_over(store, made, target)
    yield Versions(store, RunId("policy"), choose(), daemon="border")
    store.close()


def test_a_replica_is_led_over_skip_deltas(gaps: Versions, ladder: list[Derived]) -> None:
    reply = gaps.next_for(Variant("bf16"), Version(1, 1))
    assert reply is not None
    assert not reply.reload
    assert [(step.base, step.version, step.manifest) for step in reply.steps] == [
        ("v000001", "v000033", ladder[0].ref.manifest.hex()),
        ("v000033", "v000041", ladder[1].ref.manifest.hex()),
    ]


def test_a_replica_that_serves_a_version_which_was_passed_over_here_reloads(gaps: Versions) -> None:
    reply = gaps.next_for(Variant("bf16"), Version(1, 3))
    assert reply is not None
    assert (reply.reload, reply.target, reply.steps) == (True, "v000041", ())
