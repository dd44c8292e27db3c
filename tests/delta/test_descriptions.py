"""Layouts, manifests and records: what is stored is canonical, bounded, and refused when it lies."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.encoding import encode, sha256
from deltad.delta.layout import FileSpec, Layout, TensorSpec, check_layout, decode_layout
from deltad.delta.manifest import (
    ChunkRef,
    EdgeKind,
    Manifest,
    PageRef,
    State,
    decode_manifest,
    decode_page,
    make_pages,
)
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord, decode_record
from deltad.errors import FormatError, LimitError
from deltad.limits import Limits
from deltad.types import Version
from tests.kit.weights import layouts

DIGEST = bytes(range(32))
LAYOUT = Layout(
    1, (TensorSpec("a", "BF16", (2, 3)), TensorSpec("b", "F32", (4,))), (FileSpec("config.json", 2, DIGEST),)
)
MANIFEST = Manifest(
    format=1,
    least_reader=1,
    kind=EdgeKind.DELTA,
    run="r",
    variant="bf16",
    layout=DIGEST,
    base=State(Version(1, 1), DIGEST),
    target=State(Version(1, 2), DIGEST),
    sums=bytes(32),
    pages=(PageRef(DIGEST, 100, 1),),
    coders=(0, 1),
    changed=3,
    elements=10,
    chunk_bytes=50,
)
RECORD = VersionRecord(
    format=1,
    least_reader=1,
    run="r",
    version=Version(1, 2),
    parent=Version(1, 1),
    sequence=2,
    variants=(VariantRecord("bf16", DIGEST, 10, DIGEST, (EdgeRef(EdgeKind.DELTA, Version(1, 1), DIGEST, 10),)),),
)


def changed(value: msgspec.Struct, **fields: Any) -> bytes:
    return encode(msgspec.structs.replace(value, **fields))


@given(layouts())
def test_a_layout_survives_its_encoding(layout: Layout) -> None:
    assert decode_layout(layout.encode()) == layout


def test_equal_layouts_have_equal_digests_and_files_do_not_touch_the_table() -> None:
    without_files = Layout(1, LAYOUT.tensors)
    assert without_files.table_digest == LAYOUT.table_digest
    assert without_files.digest != LAYOUT.digest
    assert sha256(LAYOUT.encode()) == LAYOUT.digest


A = TensorSpec("a", "BF16", (2, 3))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ((A, A), "each once"),
        ((TensorSpec("b", "BF16", ()), A), "ascending order"),
        ((TensorSpec("", "BF16", ()),), "a name of 1"),
        ((TensorSpec("x" * 2000, "BF16", ()),), "a name of 1"),
        ((TensorSpec("a", "BF17", ()),), "a dtype of"),
        ((TensorSpec("a", "BF16", (-1,)),), "0 or more"),
        ((TensorSpec("a", "BF16", (2**30, 2**30)),), "at most"),
        ((TensorSpec("a", "BF16", (1,) * 20),), "length <= 16"),
        ((TensorSpec("a", "F4", (3,)),), "whole number of bytes"),
        ((A, TensorSpec("b", "BF16", (2, 3), alias_of="c")), "an alias of a tensor"),
        ((A, TensorSpec("b", "BF16", (3, 2), alias_of="a")), "like 'a'"),
        ((TensorSpec("a", "BF16", (2,), alias_of="b"), TensorSpec("b", "BF16", (2,), alias_of="a")), "holds weights"),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused_in_words(tensors: tuple[TensorSpec, ...], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        decode_layout(Layout(1, tensors).encode())


@pytest.mark.parametrize("name", ["modeling.py", "../config.json", "config.json\0", "weights.bin"])
def test_a_layout_carries_no_code_and_no_paths(name: str) -> None:
    with pytest.raises(FormatError, match="known non-weight files"):
        check_layout(Layout(1, (), (FileSpec(name, 1, DIGEST),)))


def test_too_many_tensors_and_dimensions_are_refused() -> None:
    with pytest.raises(LimitError, match="at most 16 dimensions"):
        check_layout(Layout(1, (TensorSpec("a", "BF16", (1,) * 20),)))
    with pytest.raises(LimitError, match="at most 1 tensors"):
        check_layout(LAYOUT, limits=replace(Limits(), tensors=1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": 2, "least_reader": 2}, "expected format 1, found format 2"),
        ({"format": 0, "least_reader": 0}, "expected format 1, found format 0"),
        ({"least_reader": 0}, "found format 0"),
        ({"signature": bytes(64)}, "a key id"),
        ({"key_id": "0123456789abcdef"}, "or neither"),
        ({"key_id": "0123456789abcdef", "signature": bytes(63)}, "63 bytes"),
        ({"base": None}, "a base exactly"),
        ({"kind": EdgeKind.ANCHOR}, "a base exactly"),
        ({"layout": b"short"}, "32 bytes"),
        ({"changed": 11}, "0 to 10"),
        ({"pages": (PageRef(DIGEST, 100, 0),)}, "pages of"),
        ({"pages": (PageRef(DIGEST, 2**40, 1),)}, "pages of"),
        ({"pages": (PageRef(DIGEST, 100, 4096),) * 200}, "chunks"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused_in_words(fields: dict[str, Any], said: str) -> None:
    assert decode_manifest(encode(MANIFEST)) == MANIFEST
    with pytest.raises(FormatError, match=said):
        decode_manifest(changed(MANIFEST, **fields))


def test_what_a_newer_build_wrote_for_readers_of_this_format_is_read() -> None:
    assert decode_manifest(changed(MANIFEST, format=2)).least_reader == 1
    assert decode_record(changed(RECORD, format=2)).least_reader == 1


def test_a_signature_and_the_name_of_its_key_are_carried() -> None:
    signed = {"key_id": "0123456789abcdef", "signature": bytes(range(64))}
    assert decode_manifest(changed(MANIFEST, **signed)).signature == bytes(range(64))
    assert decode_record(changed(RECORD, **signed)).key_id == "0123456789abcdef"


def test_sums_that_do_not_give_the_root_are_refused() -> None:
    with pytest.raises(Exception, match="other tensor sums"):
        MANIFEST.tensor_sums(LAYOUT)
    with pytest.raises(FormatError, match="sums of 2 tensors"):
        msgspec.structs.replace(MANIFEST, sums=b"").tensor_sums(LAYOUT)


VARIANT = RECORD.variants[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": 2, "least_reader": 2}, "expected format 1, found format 2"),
        ({"format": 0, "least_reader": 0}, "expected format 1, found format 0"),
        ({"key_id": "0123456789ABCDEF", "signature": bytes(64)}, "16 hex digits"),
        ({"run": "../r"}, "run id"),
        ({"version": Version(0, 2)}, "epoch"),
        ({"version": Version(1, -2)}, "epoch"),
        ({"sequence": 0}, "sequence"),
        ({"parent": Version(1, 2)}, "older"),
        ({"variants": ()}, "variants"),
        ({"variants": (msgspec.structs.replace(VARIANT, name="B/F"),)}, "variant"),
        ({"variants": (msgspec.structs.replace(VARIANT, edges=()),)}, "at least one edge"),
        ({"variants": (msgspec.structs.replace(VARIANT, root=b""),)}, "32 bytes"),
        ({"variants": (msgspec.structs.replace(VARIANT, layout_size=2**40),)}, "layout of"),
        (
            {
                "variants": (
                    msgspec.structs.replace(VARIANT, edges=(EdgeRef(EdgeKind.ANCHOR, Version(1, 1), DIGEST, 1),)),
                )
            },
            "base exactly",
        ),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused_in_words(fields: dict[str, Any], said: str) -> None:
    assert decode_record(RECORD.encode()) == RECORD
    with pytest.raises(FormatError, match=said):
        decode_record(changed(RECORD, **fields))


@pytest.mark.parametrize("parse", [decode_layout, decode_manifest, decode_record])
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(parse: Any, data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)


@pytest.mark.parametrize(
    ("parse", "data"),
    [(decode_layout, LAYOUT.encode()), (decode_manifest, encode(MANIFEST)), (decode_record, RECORD.encode())],
    ids=["layout", "manifest", "record"],
)
def test_a_flipped_byte_gives_a_format_error_or_another_valid_value(parse: Any, data: bytes) -> None:
    for at in range(len(data)):
        for flip in range(1, 256):
            mutated = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            try:
                value = parse(mutated)
            except FormatError:
                continue
            assert encode(value) == mutated, "what parses has one spelling only"


def test_chunk_lists_are_paged_in_order() -> None:
    limits = replace(Limits(), page_chunks=3)
    chunks = [ChunkRef(sha256(bytes([i])), i + 1, 0, 1) for i in range(8)]
    pages = list(make_pages(chunks, limits=limits))
    assert [page.chunks for page, _ in pages] == [3, 3, 2]
    assert [c for page, data in pages for c in decode_page(data, page, LAYOUT, limits=limits)] == chunks


@pytest.mark.parametrize(
    "chunk",
    [
        ChunkRef(b"short", 1, 0, 0),
        ChunkRef(DIGEST, 0, 0, 0),
        ChunkRef(DIGEST, 2**40, 0, 0),
        ChunkRef(DIGEST, 1, 1, 0),
        ChunkRef(DIGEST, 1, 0, 2),
    ],
)
def test_a_page_that_lists_an_impossible_chunk_is_refused(chunk: ChunkRef) -> None:
    ((page, data),) = make_pages([chunk])
    with pytest.raises(FormatError):
        decode_page(data, page, LAYOUT)
