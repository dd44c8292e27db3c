"""The safetensors header: a true one is read exactly, and a lying one is refused by name. Nothing else happens."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from deltad.checkpoint.safetensors import Header, format_header, parse_header, read_header
from deltad.delta.layout import TensorSpec
from deltad.errors import CheckpointError, DeltadError, FormatError, LimitError
from deltad.limits import Limits
from tests.checkpoint.shards import packed, random_tensors, raw_file
from tests.kit.weights import layouts

LIMITS = Limits(safetensors_header_bytes=4096, tensors=40)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Header]:
    path = tmp_path_factory.mktemp("header") / "f"

    def read(content: bytes) -> Header:
        path.write_bytes(content)
        with path.open("rb") as file:
            return read_header(file.fileno(), os.fstat(file.fileno()).st_size, "some/file", limits=LIMITS)

    return read


def test_a_header_says_where_every_tensor_is(read: Callable[[bytes], Header]) -> None:
    tensors = random_tensors()
    content = packed(tensors, __metadata__={"format": "pt"})
    header = read(content)
    assert header.metadata == {"format": "pt"}
    assert {entry.spec.name for entry in header.entries} == tensors.keys()
    for entry in header.entries:
        dtype, shape, expected = tensors[entry.spec.name]
        assert (entry.spec.dtype, entry.spec.shape) == (dtype, tuple(shape))
        assert content[entry.offset : entry.offset + entry.spec.bytes] == expected


def test_a_file_without_tensors_is_a_file(read: Callable[[bytes], Header]) -> None:
    assert read(raw_file({})).entries == ()
    assert read(raw_file({"__metadata__": {"a": "b"}})).metadata == {"a": "b"}
    assert read(raw_file(b"{}      ")).entries == ()


def test_the_same_header_is_read_when_its_names_come_in_another_order(read: Callable[[bytes], Header]) -> None:
    entry = {"dtype": "U8", "shape": [2]}
    first, second = {**entry, "data_offsets": [0, 2]}, {**entry, "data_offsets": [2, 4]}
    assert read(raw_file({"a": first, "b": second}, b"1234")) == read(raw_file({"b": second, "a": first}, b"1234"))


def tensor(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES = {
    "no bytes": (b"", "a file of 0 bytes"),
    "half a length": (b"\x08\0\0\0", "a file of 4 bytes"),
    "a length beyond the file": (raw_file({}, length=1 << 60), "cut short"),
    "a header cut off": (raw_file({"a": tensor()}, b"12")[:30], "cut short"),
    "no JSON": (raw_file(b"<html>  "), "not JSON"),
    "JSON in UTF-16": (raw_file("{}".encode("utf-16")), "not JSON"),
    "a list": (raw_file([1]), "a JSON object"),
    "spaces first": (raw_file(b" {}"), "a JSON object"),
    "endless nesting": (raw_file(b'{"a":' + b"[" * 4000), "nested too deeply"),
    "nested arrays for a tensor": (raw_file(b'{"a":' + b"[" * 400 + b"]" * 400 + b"}"), "an object of dtype"),
    "a huge number": (raw_file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 4001), "not JSON"),
    "a name twice": (raw_file(b'{"a":1,"a":2}'), "'a' twice"),
    "a key twice": (raw_file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), "'dtype' twice"),
    "half a surrogate pair": (raw_file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "surrogate"),
    "an empty name": (raw_file({"": tensor()}, b"12"), "a name of 1 to"),
    "no shape": (raw_file({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, b"12"), "an object of dtype"),
    "an unknown dtype": (raw_file({"a": tensor(dtype="Q7")}, b"12"), "'Q7'"),
    "a dtype that is no name": (raw_file({"a": tensor(dtype=7)}, b"12"), "the name of a dtype"),
    "a negative dimension": (raw_file({"a": tensor(shape=[-2])}, b"12"), "integers from 0 on"),
    "a fractional dimension": (raw_file({"a": tensor(shape=[2.0])}, b"12"), "integers from 0 on"),
    "a dimension that is a truth": (raw_file({"a": tensor(shape=[True, 2])}, b"12"), "integers from 0 on"),
    "too many dimensions": (raw_file({"a": tensor(shape=[1] * 17 + [2])}, b"12"), "at most 16 dimensions"),
    "a shape beyond every disk": (raw_file({"a": tensor(shape=[1 << 40] * 9)}, b"12"), "at most"),
    "half a byte": (raw_file({"a": tensor(dtype="F4", shape=[3])}, b"12"), "a whole number of bytes"),
    "one offset": (raw_file({"a": tensor(offsets=[0])}, b"12"), "a begin and an end"),
    "an end before the begin": (raw_file({"a": tensor(offsets=[2, 0])}, b"12"), "a begin and an end"),
    "another size than the shape's": (raw_file({"a": tensor(shape=[3])}, b"12"), "3 bytes, as U8"),
    "a hole": (raw_file({"a": tensor(offsets=[1, 3])}, b"123"), "without overlap or hole"),
    "an overlap": (raw_file({"a": tensor(), "b": tensor(offsets=[1, 3])}, b"123"), "without overlap or hole"),
    "the same bytes twice": (raw_file({"a": tensor(), "b": tensor()}, b"12"), "without overlap or hole"),
    "data cut short": (raw_file({"a": tensor()}, b"1"), "not written to its end"),
    "data too long": (raw_file({"a": tensor()}, b"123"), "as its header says"),
    "metadata that is no table": (raw_file({"__metadata__": 3}), "an object of strings"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "an object of strings"),
    "a header above the limit": (raw_file(b"{}" + b" " * 5000), "at most 4096 bytes"),
    "too many tensors": (raw_file({str(i): {**tensor(shape=[0], offsets=[0, 0])} for i in range(41)}), "at most 40"),
}


@pytest.mark.parametrize(("content", "reason"), LIES.values(), ids=LIES.keys())
def test_a_lie_gives_one_line_that_names_the_file_and_the_reason(
    content: bytes, reason: str, read: Callable[[bytes], Header]
) -> None:
    with pytest.raises(DeltadError) as caught:
        read(content)
    sentence = str(caught.value)
    assert sentence.startswith("some/file")
    assert reason in sentence
    assert "\n" not in sentence
    assert len(sentence) < 500


def read_or_refuse(read: Callable[[bytes], Header], content: bytes) -> Header | None:
    """Any exception but a refusal fails the test."""
    try:
        return read(content)
    except (CheckpointError, FormatError):
        return None


@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(content: bytes, read: Callable[[bytes], Header]) -> None:
    read_or_refuse(read, content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
ALMOST_TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F4", "F32", "?"]) | JSON,
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 12) | st.integers(), min_size=1, max_size=3) | JSON,
    }
)


@given(header=st.dictionaries(st.text(max_size=4), ALMOST_TENSOR | JSON, max_size=4), data=st.binary(max_size=16))
def test_any_table_is_read_or_refused(header: dict[str, object], data: bytes, read: Callable[[bytes], Header]) -> None:
    read_or_refuse(read, raw_file(header, data))


@given(at=st.integers(0), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_mutated_file_is_refused_or_is_a_true_file(
    at: int, value: int, cut: int, read: Callable[[bytes], Header]
) -> None:
    content = bytearray(packed({"x": ("U8", [2, 2], b"1234"), "y": ("BF16", [3], b"abcdef")}))
    content[at % len(content)] = value
    header = read_or_refuse(read, bytes(content[: len(content) - cut]))
    if header is not None:
        assert cut == 0
        end = sum(entry.spec.bytes for entry in header.entries)
        assert 8 + struct.unpack("<Q", content[:8])[0] + end == len(content)


@st.composite
def nearly_true_files(draw: st.DrawFn) -> bytes:
    """A true file, in which at most one field of one tensor is another, or a few bytes are added or missing."""
    layout = draw(layouts())
    header: dict[str, Any] = {}
    data = bytearray()
    for spec in draw(st.permutations(layout.tensors)):
        header[spec.name] = tensor(spec.dtype, list(spec.shape), [len(data), len(data) + spec.bytes])
        data += draw(st.binary(min_size=spec.bytes, max_size=spec.bytes))
    if header and draw(st.booleans()):
        field, value = draw(
            st.tuples(st.just("dtype"), st.sampled_from(["U8", "I8", "BF16", "F32", "F4"]))
            | st.tuples(st.just("shape"), st.lists(st.integers(0, 5), max_size=3))
            | st.tuples(st.just("data_offsets"), st.lists(st.integers(0, 40), min_size=2, max_size=2))
        )
        header[draw(st.sampled_from(sorted(header)))][field] = value
    data += draw(st.sampled_from([b""] * 5 + [b"\0"]))
    return raw_file(header, bytes(data))


@given(content=nearly_true_files())
def test_the_reference_reads_the_same_files_and_finds_the_same_in_them(
    content: bytes, read: Callable[[bytes], Header]
) -> None:
    header = read_or_refuse(read, content)
    try:
        expected = {name: (part["dtype"], part["shape"], bytes(part["data"])) for name, part in deserialize(content)}
    except SafetensorError:
        expected = None
    found = header and {
        entry.spec.name: (
            entry.spec.dtype,
            list(entry.spec.shape),
            content[entry.offset : entry.offset + entry.spec.bytes],
        )
        for entry in header.entries
    }
    assert found == expected


@given(layouts(max_tensors=12))
def test_a_header_that_is_written_is_read_back(layout: Any) -> None:
    text = format_header(layout.tensors)
    assert len(text) % 8 == 0
    size = len(text) + layout.weight_bytes
    header = parse_header(text[8:], size, "written")
    assert [entry.spec for entry in header.entries if entry.spec.bytes] == [t for t in layout.tensors if t.bytes]
    assert {entry.spec for entry in header.entries} == set(layout.tensors)
    assert json.loads(text[8:])["__metadata__"] == {"format": "pt"}


def test_a_header_that_was_read_before_is_held_against_each_files_own_size() -> None:
    text = format_header([TensorSpec("a", "U8", (10,))])[8:]
    assert parse_header(text, 8 + len(text) + 10, "whole").entries[0].spec.shape == (10,)
    with pytest.raises(CheckpointError, match=r"^cut: .*expected a file of"):
        parse_header(text, 8 + len(text) + 9, "cut")


def test_the_length_is_checked_before_anything_of_that_size_is_read(read: Callable[[bytes], Header]) -> None:
    content = struct.pack("<Q", 1 << 33) + b"{}"
    with pytest.raises(CheckpointError, match="cut short"):
        read(content)
    with pytest.raises(LimitError):
        read(raw_file(b"{}" + b" " * 4096))
