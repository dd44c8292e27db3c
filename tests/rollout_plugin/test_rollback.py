"""A replica goes back, and forward again, by deltas alone: nothing is loaded whole (issue 5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import NextReply
from deltad.daemon.versions import Versions
from deltad.delta import FORMAT
from deltad.delta.backend import choose
from deltad.delta.codec import EdgeEncoder
from deltad.delta.digest import pack_sums
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout
from deltad.delta.manifest import EdgeKind, Manifest, State
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.store.edge_chunks import store_chunks
from deltad.types import Digest, Variant, Version, parse_version
from tests.kit.weights import ArrayWeights
from tests.rollout_plugin.conftest import StartReplica
from tests.rollout_plugin.region import RUN, SMALL, Held, Region

VARIANT = Variant("bf16")


class Keeping(Region):
    """A region whose versions are in its store's records too, and which leads its replicas where `target` says."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.target: Held | None = None
        self.versions_of_run = Versions(self.store, RUN, choose(), daemon="a", on_change=self.announce)

    def publish(self, layout: Layout, weights: ArrayWeights, files: dict[str, bytes]) -> Held:
        held = super().publish(layout, weights, files)
        self.target = self.target and held
        for data in files.values():
            self.store.put(data)
        self.store.run(RUN).commit(self._record(held).encode())
        return held

    def lead_to(self, held: Held) -> None:
        self.target = held
        self.announce()

    def _next(self, served: Version | None) -> NextReply | None:
        held = self.target or self.history[-1]
        target = parse_version(held.info.version)
        if served == target:
            return None
        records = self.versions_of_run.records
        steps = () if served is None else self.versions_of_run.way(VARIANT, served, records.record(target))
        return None if steps is None else NextReply(str(target), steps, reload=not steps)

    def _record(self, held: Held) -> VersionRecord:
        version, layout = parse_version(held.info.version), held.layout
        before = parse_version(held.info.parent) if held.info.parent else None
        manifest = held.manifest or self._anchor(held)
        kind = EdgeKind.DELTA if held.manifest else EdgeKind.ANCHOR
        edge = EdgeRef(kind, before if held.manifest else None, manifest, self.store.size(Digest(manifest)))
        return VersionRecord(
            format=FORMAT,
            least_reader=FORMAT,
            run=RUN,
            version=version,
            parent=before,
            sequence=version.number + 1,
            variants=(
                VariantRecord(VARIANT, layout.digest, len(layout.encode()), bytes.fromhex(held.info.root), (edge,)),
            ),
        )

    def _anchor(self, held: Held) -> Digest:
        encoder = EdgeEncoder(held.layout, held.weights, choose(), limits=SMALL)
        pages, chunk_bytes = store_chunks(self.store, encoder.chunks())
        manifest = Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=EdgeKind.ANCHOR,
            run=RUN,
            variant=VARIANT,
            layout=held.layout.digest,
            base=None,
            target=State(parse_version(held.info.version), encoder.root),
            sums=pack_sums(encoder.sums),
            pages=pages,
            coders=encoder.coders,
            changed=int(encoder.changed.sum()),
            elements=held.layout.elements,
            chunk_bytes=chunk_bytes,
        )
        return self.store.put(encode(manifest))


@pytest.fixture
def region(tmp_path: Path, tiny: Path) -> Iterator[Keeping]:
    """A region that holds version 0, the tiny model."""
    region = Keeping(tmp_path / "region")
    region.start()
    region.publish_checkpoint(tiny)
    yield region
    region.kill()
    region.store.close()


@pytest.mark.parametrize("mode", ["blind", "dense"])
def test_a_replica_goes_back_five_versions_and_forward_again_without_loading_anything(
    region: Keeping, start_replica: StartReplica, mode: str
) -> None:
    """Blind deltas are inverted; what is coded by context is encoded anew between two states."""
    region.mode = "dense" if mode == "dense" else "blind"
    for seed in range(5):
        region.publish_changed(seed=seed)
    first, *_, last = region.history
    replica = start_replica()
    region.await_verified(last)
    loaded = len(region.exports)
    for held in (first, last, region.history[2], last, first):
        region.lead_to(held)
        region.await_verified(held)
        assert replica.root() == held.info.root
    assert len(region.exports) == loaded, "nothing was loaded whole"
    made = region.store.run(RUN).derived()
    assert [(str(edge.base), str(edge.target)) for edge in made] == [(last.info.version, first.info.version)], (
        "the one inverse leads to the first, and from there deltas lead on to the one between"
    )
    assert all(edge.local for edge in made)


def test_a_replica_whose_way_back_cannot_be_made_loads_the_version_whole(
    region: Keeping, start_replica: StartReplica
) -> None:
    held = region.publish_changed(seed=1)
    start_replica()
    region.await_verified(held)
    manifest = region.store.run(RUN).read_manifest(region.store.run(RUN).record(Version(1, 1)).variants[0].edges[0])
    region.store.objects.remove([Digest(manifest.pages[0].digest)], lambda digest: False)
    region.lead_to(region.history[0])
    region.await_verified(region.history[0])
    assert len(region.exports) == 2
