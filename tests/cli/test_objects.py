"""`inspect` of a store's own files: told by their content, checked against their names."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.cli.objects import read_frames, read_object
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import ChunkPage, decode_manifest
from deltad.errors import DeltadError, FormatError
from deltad.figures import size
from deltad.limits import Limits
from deltad.store.store import Store
from deltad.types import Digest
from tests.cli.terminal import Deltad
from tests.kit.deltas import encoder
from tests.kit.versions import Lineage, Published
from tests.kit.weights import ArrayWeights


@pytest.fixture
def delta() -> Published:
    """A delta of several pages of several chunks."""
    lineage = Lineage(tensors=6, density=0.3)
    lineage.publish()
    return lineage.publish()


def manifest_of(published: Published) -> bytes:
    return published.objects[Digest(published.record.variants[0].edges[0].manifest)]


def kept(directory: Path, data: bytes) -> Path:
    file = directory / "some-file"
    file.write_bytes(data)
    return file


def page_of(published: Published) -> bytes:
    return published.objects[Digest(decode_manifest(manifest_of(published)).pages[0].digest)]


def chunk_of(published: Published) -> bytes:
    page = msgspec.msgpack.decode(page_of(published), type=ChunkPage)
    return published.objects[Digest(page.chunks[0].digest)]


def test_a_record_shows_what_its_publisher_says(deltad: Deltad, tmp_path: Path, delta: Published) -> None:
    file = kept(tmp_path, delta.data)
    ended = deltad("inspect", file)
    assert ended.code == 0
    for word in ("version record", "policy/v000002", "v000001", delta.record.variants[0].root.hex(), "delta"):
        assert word in ended.out
    reply = deltad("inspect", "--json", file).reply
    assert reply["kind"] == "version record"
    assert reply["fields"]["version"] == "v000002"
    assert reply["fields"]["variants"][0]["edges"][0]["base"] == "v000001"


def test_a_manifest_shows_its_edge_and_its_pages(deltad: Deltad, tmp_path: Path, delta: Published) -> None:
    file = kept(tmp_path, manifest_of(delta))
    ended = deltad("inspect", file)
    assert ended.code == 0
    for word in ("manifest", "policy/v000001, root", "policy/v000002, root", "blind", "no key of its own"):
        assert word in ended.out
    reply = deltad("inspect", "--json", file).reply
    assert reply["fields"]["kind"] == "delta"
    assert reply["fields"]["target"]["root"] == delta.record.variants[0].root.hex()


def test_layouts_pages_and_chunks_are_told_by_their_bytes(deltad: Deltad, tmp_path: Path, delta: Published) -> None:
    kinds = {"layout": delta.layout.encode(), "manifest page": page_of(delta), "chunk": chunk_of(delta)}
    for kind, data in kinds.items():
        file = kept(tmp_path, data)
        ended = deltad("inspect", file)
        assert ended.code == 0
        assert f"is a    {kind}" in ended.out
        assert deltad("inspect", "--json", file).reply["kind"] == kind


def test_a_chunk_shows_its_frames(deltad: Deltad, tmp_path: Path, delta: Published) -> None:
    frame = deltad("inspect", "--json", kept(tmp_path, chunk_of(delta))).reply["fields"]["frames"][0]
    assert frame["dtype"] == "BF16"
    assert frame["changed"] > 0
    assert "BF16" in deltad("inspect", tmp_path / "some-file").out


def test_a_packed_frame_shows_what_its_lanes_take_and_what_it_does(deltad: Deltad, tmp_path: Path) -> None:
    layout = Layout(1, (TensorSpec("w", "BF16", (64, 128)),))
    (chunk,) = encoder(layout, ArrayWeights.bell(layout), limits=Limits()).chunks()
    file = kept(tmp_path, chunk.data)
    frame = deltad("inspect", "--json", file).reply["fields"]["frames"][0]
    assert frame["coder"] == 3
    stored = sum(stored for _, stored in frame["streams"])
    (row,) = (line for line in deltad("inspect", file).out.splitlines() if "BF16" in line)
    assert row.split()[-4:] == [*size(16384).split(), *size(stored).split()]


def test_objects_of_a_store_are_checked_against_their_names(deltad: Deltad, tmp_path: Path, delta: Published) -> None:
    store = Store.open(tmp_path / "store")
    digest = store.put(manifest_of(delta))
    config = store.put(b'{"model_type": "test"}')
    path, config_path = store.objects.extent(digest).path, store.objects.extent(config).path
    store.close()
    assert "which is its name" in deltad("inspect", path).out
    assert "travels with a version" in deltad("inspect", config_path).out
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    deltad("inspect", path).assert_refused(65, str(path), f"SHA-256 {digest.hex()}", "damaged")


def test_a_damaged_manifest_is_refused_with_the_words_that_a_daemon_has_for_it(
    deltad: Deltad, tmp_path: Path, delta: Published
) -> None:
    data = (
        manifest_of(delta)
        .replace(b"\xa6format\x01", b"\xa6format\x07")
        .replace(b"least_reader\x01", b"least_reader\x07")
    )
    deltad("inspect", kept(tmp_path, data)).assert_refused(65, "manifest", "expected format 1, found format 7")


@pytest.mark.parametrize("data", [b"", b"hello", b"\x00" * 64, b"\xff" * 64])
def test_what_is_no_object_is_one_line_and_65(data: bytes, deltad: Deltad, tmp_path: Path) -> None:
    deltad("inspect", kept(tmp_path, data)).assert_refused(65, "some-file", "a store's record, manifest")


def test_what_is_no_regular_file_is_refused_unread(deltad: Deltad, tmp_path: Path) -> None:
    for name in ("pipe", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
        deltad("inspect", tmp_path / name).assert_refused(65, f"{tmp_path}/{name}", "expected a regular file")
    deltad("inspect", "/dev/zero").assert_refused(65, "/dev/zero", "expected a regular file")


def test_a_file_larger_than_any_object_is_refused(tmp_path: Path) -> None:
    file = kept(tmp_path, b"")
    with file.open("r+b") as grown:
        grown.truncate(20_000)
    small = Limits(chunk_bytes=10_000, page_bytes=10_000, layout_bytes=10_000, manifest_bytes=10_000, file_bytes=10_000)
    with pytest.raises(FormatError, match="an object of at most"):
        read_object(file, limits=small)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_a_clear_error(data: bytes) -> None:
    with suppress(FormatError):
        assert read_frames(data).size == len(data)


@given(cut=st.integers(0, 400), flip=st.integers(0, 255), at=st.integers(0, 400))
def test_any_damage_to_a_record_is_a_clear_error_or_another_record(
    cut: int, flip: int, at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(Lineage(tensors=1, elements=64).publish().data)
    data[at % len(data)] ^= flip
    file = kept(tmp_path_factory.mktemp("damaged"), bytes(data[: len(data) - cut % len(data)]))
    with suppress(DeltadError):
        assert read_object(file).kind == "version record"


def test_a_chunk_above_its_limit_is_refused() -> None:
    with pytest.raises(FormatError, match="at most 10 bytes"):
        read_frames(bytes(11), limits=Limits(chunk_bytes=10))


def test_a_page_is_shown_with_its_chunks(deltad: Deltad, tmp_path: Path) -> None:
    file = kept(tmp_path, encode(ChunkPage(())))
    assert "none: nothing changed" in deltad("inspect", file).out
