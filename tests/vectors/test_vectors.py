"""Every backend reads every vector to the same lanes, and writes it with the same plain streams."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from deltad.delta.backend import Backend
from deltad.delta.codec import apply_chunks, sum_weights
from deltad.delta.coding import WHOLE
from deltad.delta.digest import pack_sums, root_of
from deltad.delta.encoding import encode, sha256
from deltad.delta.frame import read_chunk
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import decode_record
from deltad.delta.symbols import GAPS, from_symbols, to_symbols, value_scheme
from deltad.errors import FormatError, IntegrityError
from deltad.types import DTYPES
from tests.kit.backends import present
from tests.kit.weights import ArrayWeights
from tests.vectors import plain
from tests.vectors.make import all_made, codes, edge, symbols, written
from tests.vectors.vector import HERE, Vector, all_vectors

VECTORS = all_vectors()
BACKENDS = present()
FULL = bool(os.environ.get("DELTAD_TEST_FULL"))

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)


@each_backend
@each_vector
def test_a_vector_is_read_to_its_target(vector: Vector, backend: Backend) -> None:
    after = vector.base.copy()
    sums = sum_weights(vector.layout, after, backend)
    apply_chunks([vector.frame], vector.layout, after, sums, backend)
    assert after.equals(vector.target)
    assert np.array_equal(sums, sum_weights(vector.layout, vector.target, backend))


@each_vector
def test_a_reader_written_from_the_document_alone_reads_a_vector_too(vector: Vector) -> None:
    tensors = [(spec.name, spec.dtype, spec.shape) for spec in vector.tensors]
    after = plain.read(vector.frame, tensors, [array.tobytes() for array in vector.base.arrays])
    assert after == [array.tobytes() for array in vector.target.arrays]


@each_backend
@pytest.mark.parametrize("vector", [v for v in VECTORS if v.mode not in ("folded", "table")], ids=lambda v: v.name)
def test_a_vector_is_written_with_the_same_header_and_plain_streams(vector: Vector, backend: Backend) -> None:
    data = written(vector.layout, vector.rects, vector.mode, vector.base, vector.target, backend)
    kept, found = (list(read_chunk(frame, vector.layout)) for frame in (vector.frame, data))
    assert [frame.streams for frame in found] == [frame.streams for frame in kept]
    assert [frame.header.coding for frame in found] == [frame.header.coding for frame in kept]
    assert [frame.header.check for frame in found] == [frame.header.check for frame in kept]


@each_backend
@pytest.mark.parametrize("vector", [v for v in VECTORS if not v.mode], ids=lambda v: v.name)
def test_a_whole_vector_is_written_with_the_very_same_bytes(vector: Vector, backend: Backend) -> None:
    assert written(vector.layout, vector.rects, "", vector.base, vector.target, backend) == vector.frame


@each_backend
@each_vector
def test_a_vector_with_any_byte_changed_is_refused_with_nothing_written_or_is_right(
    vector: Vector, backend: Backend
) -> None:
    checked = vector.mode != "folded"
    for at in range(len(vector.frame)):
        for flip in (0x01, 0x80, 0xFF) if FULL else (0x01 << at * 3 % 8,):
            mutated = vector.frame[:at] + bytes([vector.frame[at] ^ flip]) + vector.frame[at + 1 :]
            after = vector.base.copy()
            try:
                apply_chunks([mutated], vector.layout, after, np.zeros((len(vector.tensors), 2), np.uint64), backend)
            except (FormatError, IntegrityError):
                assert after.equals(vector.base)
            else:
                assert not checked or after.equals(vector.target), (at, flip)


@each_backend
@each_vector
def test_a_vector_on_another_base_is_refused_with_nothing_written_or_followed_to_other_sums(
    vector: Vector, backend: Backend
) -> None:
    """A step adds the same to any lane that it does not wrap, so a frame alone cannot prove its base: sums do."""
    kinds = {frame.header.coder for frame in read_chunk(vector.frame, vector.layout)}
    if not kinds or kinds & WHOLE:
        pytest.skip("a whole or empty frame needs no base; the other vectors run this")
    for seed in range(3):
        other = ArrayWeights.random(vector.layout, seed)
        before, sums = other.copy(), sum_weights(vector.layout, other)
        try:
            apply_chunks([vector.frame], vector.layout, other, sums, backend)
        except (FormatError, IntegrityError):
            assert other.equals(before)
        else:
            assert np.array_equal(sums, sum_weights(vector.layout, other))
            assert not np.array_equal(sums, sum_weights(vector.layout, vector.target))


def test_the_vectors_are_what_the_reference_makes() -> None:
    made = {vector.name: vector for vector in all_made()}
    assert sorted(made) == [vector.name for vector in VECTORS]
    for kept in VECTORS:
        fresh = made[kept.name]
        assert (fresh.tensors, fresh.rects, fresh.mode) == (kept.tensors, kept.rects, kept.mode)
        assert fresh.base.equals(kept.base)
        assert fresh.target.equals(kept.target)


def test_numbers_are_spelled_as_the_vectors_say() -> None:
    kept = json.loads((HERE / "symbols.json").read_text())
    assert kept == json.loads(json.dumps(symbols()))
    for name, vector in kept.items():
        scheme = GAPS if name == "gaps" else value_scheme(DTYPES[name.removeprefix("values ")])
        numbers = np.array(vector["numbers"], np.uint64)
        spelled, bits = bytes.fromhex(vector["symbols"]), bytes.fromhex(vector["bits"])
        assert to_symbols(numbers, scheme) == (spelled, bits)
        assert np.array_equal(from_symbols(spelled, bits, scheme), numbers)


def test_codes_are_made_as_the_vectors_say_and_as_the_document_says() -> None:
    kept = json.loads((HERE / "codes.json").read_text())
    assert kept == codes()
    for vector in kept.values():
        assert plain.code_lengths(vector["counts"]) == vector["lengths"]


@each_backend
def test_the_objects_of_a_version_say_what_the_vector_says(backend: Backend) -> None:
    kept = json.loads((HERE / "edge.json").read_text())
    assert kept == edge()
    data = {name: bytes.fromhex(kept[name]) for name in ("layout", "chunk", "page", "manifest", "record")}
    record, manifest, layout = (
        decode_record(data["record"]),
        decode_manifest(data["manifest"]),
        decode_layout(data["layout"]),
    )
    assert record.variants[0].edges[0].manifest == sha256(data["manifest"])
    assert manifest.layout == layout.digest == record.variants[0].layout == sha256(data["layout"])
    (page,) = manifest.pages
    assert page.digest == sha256(data["page"])
    (chunk,) = decode_page(data["page"], page, layout)
    assert chunk.digest == sha256(data["chunk"])
    assert encode(manifest) == data["manifest"]
    base, target = (weights(layout, kept[name]) for name in ("base", "target"))
    assert root_of(layout, sum_weights(layout, base, backend)).hex() == kept["base root"]
    sums = sum_weights(layout, base, backend)
    apply_chunks([data["chunk"]], layout, base, sums, backend)
    assert base.equals(target)
    assert pack_sums(sums).hex() == kept["sums"]
    assert np.array_equal(sums, manifest.tensor_sums(layout))
    assert root_of(layout, sums) == manifest.target.root == record.variants[0].root
    assert root_of(layout, sums).hex() == kept["target root"]


def weights(layout: Layout, parts: list[str]) -> ArrayWeights:
    found = ArrayWeights.zeros(layout)
    for array, part in zip(found.arrays, parts, strict=True):
        array[:] = np.frombuffer(bytes.fromhex(part), array.dtype)
    return found
