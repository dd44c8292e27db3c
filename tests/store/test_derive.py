"""Edges that a host makes by itself lead to the published root, or are not made (issue 5)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from deltad.delta.backend import Mode, choose
from deltad.delta.coding import Coder
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout
from deltad.delta.manifest import EdgeKind, Manifest
from deltad.delta.record import VersionRecord
from deltad.errors import ConflictError, IntegrityError, NotFoundError
from deltad.protocol.mode import ModeChoice
from deltad.store.derive import AT_ONCE, Deriver
from deltad.store.derived import DerivedEdge
from deltad.store.edge_chunks import stored_delta
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.mirror import Mirror
from deltad.types import Digest, Version
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.deltas import applied
from tests.kit.trainer import VARIANT, Trainer
from tests.kit.weights import ArrayWeights

BF16 = Layout(0, tuple(spec for spec in MODEL.tensors if spec.dtype == "BF16"), MODEL.files)
"""Frames of one lane would be whole."""


class Host(Trainer):
    """A trainer's host, which also makes edges. `states` are the weights of every version."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(home, clock=clock)
        self.weights = ArrayWeights.random(BF16)
        self.states: dict[Version, ArrayWeights] = {}
        self.deriver = Deriver(self.store, self.run, VARIANT, self.mirror, choose())

    def publish(self, *modes: Mode, weights: ArrayWeights | None = None) -> list[Version]:
        """Publish a version in each mode: `weights`, or some that differ a little from the ones before."""
        for mode in modes:
            number = len(self.states)
            if number:
                self.weights = weights or self.weights.changed(0.01, seed=number)
            written = write_checkpoint(self.checkpoints / f"step_{number:06d}", self.weights, layout=BF16)
            published = self.origin.publish(written, number, coding=ModeChoice(mode, "as the test says"))
            self.states[published.record.version] = self.weights
        return list(self.states)

    def layout(self, version: Version) -> Layout:
        return self.mirror.layout(self.run.record(version))

    def manifest(self, edge: DerivedEdge) -> Manifest:
        return self.run.read_manifest(edge.ref)

    def leads(self, edge: DerivedEdge) -> bool:
        """Whether an edge, read anew from the store, makes of its base's weights those of its target."""
        layout = self.layout(edge.target)
        delta = stored_delta(self.store, self.manifest(edge), layout)
        base = self.states[edge.base] if edge.base else ArrayWeights.zeros(BF16)
        return applied(delta, layout, base, limits=self.store.limits).equals(self.states[edge.target])


class Sealed(Mirror):
    """A mirror that shows no weights to anybody."""

    def state(self, record: VersionRecord) -> NoReturn:
        raise AssertionError(f"the weights of {record.id} were asked for")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_blind_deltas_are_folded_without_a_look_at_any_weights(host: Host) -> None:
    versions = host.publish(*repeat("blind", 9))
    sealed = Sealed(host.store, host.run, VARIANT, choose())
    deriver = Deriver(host.store, host.run, VARIANT, sealed, choose())
    made = deriver.make_edge(versions[0], versions[8])
    assert (made.folded, made.how) == (True, "folded from 8 of the run's deltas")
    assert made.edge.kind is EdgeKind.SKIP_DELTA
    assert not made.edge.local
    assert host.leads(made.edge)
    path = host.run.path(host.run.record(versions[8]), VARIANT, [versions[0]])
    assert [hop.edge for hop in path.hops] == [made.edge.ref]
    onward = deriver.make_edge(versions[0], versions[6])
    assert host.leads(onward.edge)


def test_many_deltas_are_folded_in_rounds(host: Host) -> None:
    versions = host.publish(*repeat("blind", AT_ONCE + 4))
    assert host.leads(host.deriver.make_edge(versions[0], versions[-1]).edge)
    back = host.deriver.make_edge(versions[-1], versions[1]).edge
    assert host.leads(back)
    assert back.local


def test_what_is_coded_by_context_is_encoded_anew_and_folds_from_then_on(host: Host) -> None:
    versions = host.publish("blind", "dense", "dense", "blind", "blind")
    made = host.deriver.make_edge(versions[0], versions[2])
    assert (made.folded, made.how, made.edge.coders) == (False, "encoded anew", (Coder.BLIND,))
    assert host.leads(made.edge)
    further = host.deriver.make_edge(versions[0], versions[4])
    assert further.how == "folded from 3 of the run's deltas"
    assert host.leads(further.edge)
    dense = host.deriver.make_edge(versions[1], versions[4], mode="dense")
    assert Coder.CONTEXT in dense.edge.coders
    assert not list(host.store.scratch.iterdir()), "what was rebuilt is gone"


def test_the_way_back_is_an_inverse_that_stays_here(host: Host) -> None:
    versions = host.publish("blind", "blind", "dense", "blind")
    back = host.deriver.make_edge(versions[1], versions[0])
    assert (back.how, back.edge.local) == ("inverted from 1 of the run's deltas", True)
    further = host.deriver.make_edge(versions[3], versions[1])
    assert (further.how, further.edge.local) == ("encoded anew", True)
    assert host.leads(back.edge)
    assert host.leads(further.edge)
    whole = host.run.path(host.run.record(versions[0]), VARIANT, [versions[3]], anchors=False)
    assert [hop.edge for hop in whole.hops] == [further.edge.ref, back.edge.ref]


def test_whole_frames_fold_forwards_and_are_encoded_anew_backwards(host: Host) -> None:
    host.publish("blind")
    first = host.weights
    second = ArrayWeights.random(BF16, 77)
    second.arrays[0] = first.arrays[0]
    host.publish("blind", weights=second)
    versions = host.publish("blind")
    forth = host.deriver.make_edge(versions[0], versions[2])
    assert host.leads(forth.edge)
    back = host.deriver.make_edge(versions[2], versions[0])
    assert back.edge.local
    assert host.leads(back.edge)


def test_an_edge_that_was_made_is_not_made_again(host: Host) -> None:
    versions = host.publish("blind", "blind", "blind")
    made = host.deriver.make_edge(versions[0], versions[2])
    again = host.deriver.make_edge(versions[0], versions[2])
    assert (again.edge, again.how) == (made.edge, "made before")
    with pytest.raises(NotFoundError):
        host.deriver.make_edge(versions[0], Version(1, 99))


def test_no_delta_is_made_between_versions_of_other_tensors(host: Host, tmp_path: Path) -> None:
    host.publish("blind")
    host.origin.publish(write_checkpoint(tmp_path / "wider", ArrayWeights.random(MODEL)), 1)
    with pytest.raises(ConflictError, match="the same tensors in both"):
        host.deriver.make_edge(Version(1, 0), Version(1, 1))


def test_an_edge_that_leads_elsewhere_is_refused_by_name_and_never_catalogued(host: Host) -> None:
    """A part that is whole and well formed, is cheaper than the true one, and whose frames do another one's work."""
    versions = host.publish("blind", "blind", "blind")
    true = host.run.read_manifest(host.run.record(versions[2]).variants[0].edges[0])
    other = host.run.read_manifest(host.run.record(versions[1]).variants[0].edges[0])
    forged = msgspec.structs.replace(true, kind=EdgeKind.SKIP_DELTA, pages=other.pages, chunk_bytes=1)
    host.run.add_edge(host.store.put(encode(forged)))
    known = host.run.derived()
    with pytest.raises(IntegrityError, match=r"edge v000000 → v000002 of r that was folded.*in tensor"):
        host.deriver.make_edge(versions[0], versions[2])
    assert host.run.derived() == known


def test_an_anchor_of_one_version_has_the_same_chunks_wherever_it_is_cut(host: Host, tmp_path: Path) -> None:
    versions = host.publish("blind", "dense", "blind")
    other = Host(tmp_path / "other")
    other.publish("dense", "blind")
    other.publish("blind", weights=host.weights)
    host.mirror.advance(host.run.record(versions[1]))
    one, two = (at.deriver.cut_anchor(versions[2], "for newcomers") for at in (host, other))
    assert one.edge.kind is EdgeKind.ANCHOR
    first, second = host.manifest(one.edge), other.manifest(two.edge)
    assert first.pages == second.pages
    assert first.tensor_sha256 == second.tensor_sha256
    assert host.leads(one.edge)
    assert first.reason == "for newcomers"
    join = host.run.join(versions[2], VARIANT)
    assert join is not None
    assert join.manifest == one.edge.manifest


def test_an_anchor_says_the_sha256_of_every_tensor_and_whoever_builds_from_it_checks_them(host: Host) -> None:
    (version,) = host.publish("blind")
    record = host.run.record(version)
    manifest = host.run.read_manifest(record.variants[0].edges[0])
    hashes = [hashlib.sha256(array.tobytes()).digest() for array in host.weights.arrays]
    assert manifest.tensor_sha256 == b"".join(hashes)
    hashes[2] = bytes(32)
    forged = msgspec.structs.replace(manifest, tensor_sha256=b"".join(hashes), chunk_bytes=1)
    host.run.add_edge(host.store.put(encode(forged)))
    with pytest.raises(IntegrityError, match=r"the anchor of r/v000000: tensor 'layers.0.norm.weight'.*SHA-256 0000"):
        host.mirror.verify(record, host.exports / "live")
    assert not (host.exports / "live").exists()
    host.mirror.export(record, host.exports / "live")  # along the one that the record names


def test_a_mirror_that_rotted_is_cut_into_no_anchor(host: Host) -> None:
    versions = host.publish("blind", "blind")
    directory = host.mirror.advance(host.run.record(versions[1]))
    shard = next(directory.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match="as the mirror holds it"):
        host.deriver.cut_anchor(versions[1], "for newcomers")
    assert host.run.derived() == []


def test_the_objects_of_a_derived_edge_are_kept_until_it_is_dropped(tmp_path: Path) -> None:
    now = [0.0]
    host = Host(tmp_path, clock=lambda: now[0])
    versions = host.publish("blind", "blind", "blind")
    edge = host.deriver.make_edge(versions[0], versions[2]).edge
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    collect(host.store, {})
    assert host.leads(edge)
    host.run.drop_edges([Digest(edge.manifest)])
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    collect(host.store, {})
    assert not host.store.objects.is_held(Digest(edge.manifest))
