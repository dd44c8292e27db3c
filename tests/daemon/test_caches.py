"""What is to become of replicas' caches: told with what they are to commit, the strictest of all that it brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.client.messages import Cache
from deltad.daemon.versions import Versions
from deltad.delta.backend.numpy import NumpyBackend
from deltad.store.store import Store
from deltad.types import Variant, Version
from tests.kit.versions import Lineage


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    """Versions 0 to 3 of a run."""
    store = Store.open(tmp_path / "store")
    lineage = Lineage("r", tensors=1)
    for _ in range(4):
        lineage.publish().commit_into(store)
    return Versions(store, lineage.run, NumpyBackend(), daemon="d")


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        (("", "", ""), ""),
        (("", "", "reset"), "reset"),
        (("reset", "", ""), "reset"),
        (("keep", "new-requests-only", "keep"), "new-requests-only"),
        (("keep", "", "keep"), ""),
        (("keep", "keep", "keep"), "keep"),
    ],
)
def test_a_replica_that_takes_several_versions_at_once_is_told_the_strictest(
    versions: Versions, policies: tuple[Cache, Cache, Cache], told: Cache
) -> None:
    held = [record.version for record in versions.records.records()]
    for version, cache in zip(held[1:], policies, strict=True):
        versions.set_cache(version, cache)
    variant = Variant(versions.records.records()[0].variants[0].name)
    offered = versions.next_for(variant, held[0])
    assert offered is not None
    assert offered.cache == told
    alone = versions.next_for(variant, held[2])
    assert alone is not None
    assert alone.cache == policies[2]
    newcomer = versions.next_for(variant, None)
    assert newcomer is not None
    assert newcomer.cache == policies[2]


def test_it_is_remembered_over_a_restart(versions: Versions) -> None:
    (*_, newest) = (record.version for record in versions.records.records())
    versions.set_cache(newest, "reset")
    again = Versions(versions._store, versions.run, NumpyBackend(), daemon="d")
    variant = Variant(versions.records.records()[0].variants[0].name)
    offered = again.next_for(variant, Version(1, 0))
    assert offered is not None
    assert offered.cache == "reset"
