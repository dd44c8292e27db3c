"""What lies in a store without the signature that is demanded counts as not held, is kept, and may come anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deltad.config import Config, load_config
from deltad.daemon.trusting import doubts_in_words, sift_stored, trust_list
from deltad.delta.encoding import encode
from deltad.delta.keys import SigningKey
from deltad.delta.manifest import EdgeKind, decode_manifest
from deltad.delta.signing import sign
from deltad.errors import NotFoundError
from deltad.store.garbage import collect
from deltad.store.retention import Retention
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest
from tests.kit.hostile import signed
from tests.kit.regions import RUN
from tests.kit.versions import Lineage, Published

TRAINER, DERIVER, STRANGER = (SigningKey.from_seed(bytes([n] * 32)) for n in (1, 2, 3))


class Held:
    """A store with three versions, the second unsigned, and two anchors that daemons cut of the third."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.now = 0.0
        self.store = Store.open(home / "store", clock=lambda: self.now)
        lineage = Lineage(tensors=1)
        made = [lineage.publish(anchor=True) for _ in range(3)]
        self.versions = [signed(made[0], TRAINER), made[1], signed(made[2], TRAINER)]
        for published in self.versions:
            published.commit_into(self.store)
        self.edges = [self._anchor(lineage, made[2], key) for key in (DERIVER, STRANGER)]

    def _anchor(self, lineage: Lineage, target: Published, key: SigningKey) -> Digest:
        made = lineage.skip(target, target)
        made.put_into(self.store)
        manifest = msgspec.structs.replace(decode_manifest(made.objects[made.manifest]), kind=EdgeKind.ANCHOR)
        return Digest(self.run.add_edge(self.store.put(encode(sign(manifest, key)))).manifest)

    @property
    def run(self) -> RunStore:
        return self.store.run(RUN)

    def config(self, text: str) -> Config:
        (self.home / "deltad.toml").write_text('[daemon]\nname = "b"\n' + text)
        return load_config(self.home / "deltad.toml")

    def trust(self, text: str = "") -> None:
        """Sift with the trainer's and the deriver's key trusted, or as `text` says."""
        config = self.config(
            text or f'[[trust]]\nkey = "{TRAINER.public}"\n[[trust]]\nkey = "{DERIVER.public}"\nscope = "derive"\n'
        )
        sift_stored(self.store, config, trust_list(config), None)

    def numbers(self) -> list[int]:
        return [record.version.number for record in self.run.records()]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path)
    yield held
    held.store.close()


def test_what_nobody_trusted_has_signed_is_not_held_and_the_words_say_why(held: Held) -> None:
    held.trust()
    assert held.numbers() == [1, 3]
    with pytest.raises(NotFoundError):
        held.run.record(held.versions[1].version)
    assert "v000002 lie here and are neither served nor activated: record of policy/v000002" in doubts_in_words(
        held.run
    )
    assert [Digest(edge.manifest) for edge in held.run.derived()] == [held.edges[0]], "the stranger's is hidden"
    latest = held.run.latest()
    assert latest is not None
    assert latest.version == held.versions[2].version


def test_the_newest_of_those_that_are_believed_is_the_latest(held: Held) -> None:
    held.trust(f'[[trust]]\nkey = "{STRANGER.public}"\n')
    assert held.numbers() == []
    assert held.run.latest() is None
    assert held.store.runs() == []


def test_what_a_revoked_key_signed_is_not_held_any_more(held: Held) -> None:
    held.trust()
    held.trust(f'[[trust]]\nkey = "{TRAINER.public}"\nscope = "none"\n')
    assert held.numbers() == []
    assert f"found one of key {TRAINER.public.id}, which may not publish" in doubts_in_words(held.run)


def test_a_doubt_that_ends_leaves_everything_as_it_was(held: Held) -> None:
    held.trust(f'[[trust]]\nkey = "{STRANGER.public}"\n')
    held.now += 10_000.0
    collect(held.store, {RUN: Retention(versions=1)})
    held.trust("[[run]]\nid = 'other'\n")
    assert held.numbers() == [1, 2, 3]
    assert {Digest(edge.manifest) for edge in held.run.derived()} == set(held.edges)
    assert all(held.store.objects.is_held(edge) for edge in held.edges)
    for published in held.versions:
        assert all(held.store.read(digest) == data for digest, data in published.objects.items())


def test_a_doubted_version_that_comes_anew_signed_is_held(held: Held) -> None:
    held.trust(f'[[trust]]\nkey = "{STRANGER.public}"\n')
    again = signed(held.versions[1], STRANGER)
    assert held.run.commit(again.data)
    assert held.numbers() == [2]
    assert [version.number for version in held.run.doubts()] == [1, 3]
    held.store.close()
    held.store = Store.open(held.home / "store")
    assert held.run.record_bytes(again.version) == again.data, "and over a restart"


def test_the_daemon_does_not_doubt_what_it_publishes_itself(held: Held) -> None:
    held.trust(f'[[run]]\nid = "{RUN}"\n[[trust]]\nkey = "{STRANGER.public}"\n')
    assert held.numbers() == [1, 2, 3]
