"""Chunks in packs: found again after any damage to the tail, never guessed after damage to the middle (P11, P16)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.encoding import sha256
from deltad.errors import DeltadError, FormatError, IntegrityError
from deltad.limits import Limits
from deltad.store.pack import PAGE, decode_index, encode_entry, encode_index, entry_bytes, scan
from deltad.store.store import Store
from tests.kit.rot import overwrite

TOKEN = b"12345678"
LIMITS = replace(Limits(), pack_bytes=4 * PAGE)
CHUNKS = [bytes([i]) * (1500 * i + 1) for i in range(6)]


def pack_of(*chunks: bytes, token: bytes = TOKEN) -> bytes:
    """A pack whose every entry was synced before the next."""
    data = b""
    for chunk in chunks:
        data += encode_entry(token, sha256(chunk), chunk, synced=len(data))
    return data


def found_in(data: bytes, *, proven: bool = False) -> list[bytes]:
    """The chunks that a scan finds. Asserts that it calls nothing rotten."""
    found = scan(lambda count, at: data[at : at + count], len(data), TOKEN, proven=proven)
    assert found.rotten is None
    return [data[packed.offset : packed.offset + packed.size] for packed in found.entries]


def test_entries_are_found_in_their_order_and_begin_at_pages() -> None:
    data = pack_of(*CHUNKS)
    assert found_in(data) == CHUNKS
    assert len(data) == sum(entry_bytes(len(chunk)) for chunk in CHUNKS)
    assert all(entry_bytes(len(chunk)) % PAGE == 0 for chunk in CHUNKS)


@given(cut=st.integers(0, len(pack_of(*CHUNKS))), garbage=st.binary(max_size=200))
def test_a_tail_that_is_torn_or_garbage_ends_the_pack_at_its_last_whole_entry(cut: int, garbage: bytes) -> None:
    torn = pack_of(*CHUNKS)[:cut] + b"\xff" + garbage
    whole = [chunk for i, chunk in enumerate(CHUNKS) if is_whole(torn, cut, i)]
    assert found_in(torn) == whole


def is_whole(torn: bytes, cut: int, i: int) -> bool:
    """Is chunk number `i` all there, whatever has become of the zeros behind it?"""
    start = len(pack_of(*CHUNKS[:i]))
    return start + 64 + len(CHUNKS[i]) <= cut and start + entry_bytes(len(CHUNKS[i])) <= len(torn)


@given(at=st.integers(0, 64 + len(CHUNKS[-1]) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_last_entry_is_a_torn_tail(at: int, bit: int) -> None:
    data = bytearray(pack_of(*CHUNKS))
    data[len(pack_of(*CHUNKS[:-1])) + at] ^= 1 << bit
    assert found_in(bytes(data)) == CHUNKS[:-1]


@pytest.mark.parametrize("at", range(64))
def test_a_flipped_bit_in_a_header_before_the_last_is_rot_and_its_place_is_named(at: int) -> None:
    data = bytearray(pack_of(*CHUNKS))
    start = len(pack_of(*CHUNKS[:2]))
    data[start + at] ^= 0x10
    found = scan(lambda count, at: bytes(data[at : at + count]), len(data), TOKEN, proven=False)
    assert found.rotten == start


def test_a_chunk_that_looks_like_entries_of_a_pack_is_just_a_chunk() -> None:
    hostile = bytes(PAGE - 64) + pack_of(*CHUNKS, token=b"guessed!")
    data = pack_of(CHUNKS[0], hostile)
    torn = data[: len(pack_of(CHUNKS[0]))] + bytes(64) + data[len(pack_of(CHUNKS[0])) + 64 :]
    assert found_in(data) == [CHUNKS[0], hostile]
    assert found_in(torn) == [CHUNKS[0]]


@given(st.binary(max_size=3 * PAGE))
def test_any_bytes_can_be_scanned(data: bytes) -> None:
    scan(lambda count, at: data[at : at + count], len(data), TOKEN, proven=True)
    assert decode_index(data, TOKEN) is None


def test_an_index_lists_what_the_pack_holds_and_is_refused_when_one_byte_is_another() -> None:
    data = pack_of(*CHUNKS)
    entries = scan(lambda count, at: data[at : at + count], len(data), TOKEN, proven=True).entries
    encoded = encode_index(TOKEN, entries, len(data))
    index = decode_index(encoded, TOKEN)
    assert index is not None
    assert (index.length, index.entries) == (len(data), entries)
    assert decode_index(encoded, b"another!") is None
    for i in range(len(encoded)):
        assert decode_index(encoded[:i] + bytes([encoded[i] ^ 1]) + encoded[i + 1 :], TOKEN) is None
        assert decode_index(encoded[:i], TOKEN) is None


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two full packs and one that is written to."""
    store = Store.open(tmp_path / "s", limits=LIMITS)
    for chunk in CHUNKS:
        store.put_chunk(chunk)
    return store


def reopened(store: Store) -> Store:
    store.close()
    return Store.open(store.path, limits=LIMITS)


def packs(store: Store, suffix: str = ".pack") -> list[Path]:
    return sorted(store.path.glob(f"packs/*{suffix}"))


def test_chunks_of_one_writer_lie_one_behind_the_other_and_are_found_after_a_restart(store: Store) -> None:
    places = [store.objects.extent(sha256(chunk)) for chunk in CHUNKS]
    assert len({place.path for place in places}) == 3
    assert [(place.path, place.offset) for place in places] == sorted((place.path, place.offset) for place in places)
    again = reopened(store)
    assert [again.objects.extent(sha256(chunk)) for chunk in CHUNKS] == places
    assert [again.read(sha256(chunk)) for chunk in CHUNKS] == CHUNKS
    assert len(packs(again, ".index")) == 2
    again.put_chunk(b"one more")
    assert len(packs(again)) == 3, "the pack that was written to is written on"


def test_a_chunk_that_is_held_is_not_stored_twice(store: Store) -> None:
    before = store.used_bytes()
    store.put_chunk(CHUNKS[3])
    assert store.used_bytes() == before


def test_a_damaged_chunk_is_named_by_file_and_place_and_mended_by_the_same_bytes(store: Store) -> None:
    digest = sha256(CHUNKS[1])
    place = store.objects.extent(digest)
    overwrite(store, digest, b"rot")
    with pytest.raises(IntegrityError, match=rf"{place.path.name} from byte {place.offset}.*SHA-256"):
        store.read(digest)
    store.put_chunk(CHUNKS[1])
    assert store.read(digest) == CHUNKS[1]
    assert reopened(store).read(digest) == CHUNKS[1]


@pytest.mark.parametrize("keep", ["nothing", "half"])
def test_an_index_that_is_lost_or_damaged_is_made_anew(store: Store, keep: str) -> None:
    index = packs(store, ".index")[0]
    before = index.read_bytes()
    if keep == "half":
        index.write_bytes(before[: len(before) // 2])
    else:
        index.unlink()
    again = reopened(store)
    assert [again.read(sha256(chunk)) for chunk in CHUNKS] == CHUNKS
    assert index.read_bytes() == before


@pytest.mark.parametrize("damage", ["foreign", "cut", "missing", "rot"])
def test_damage_to_what_was_durable_stops_the_start_and_names_the_file(store: Store, damage: str) -> None:
    first, *_, last = packs(store)
    named = first.name
    if damage == "foreign":
        (store.path / "packs" / "thesis.tex").write_text("x")
        named = "thesis.tex"
    elif damage == "cut":
        os.truncate(first, first.stat().st_size - PAGE)
    elif damage == "missing":
        first.unlink()
    else:
        for index in packs(store, ".index"):
            index.write_bytes(b"rot")
        data = bytearray(last.read_bytes())
        data[0] ^= 1
        first.write_bytes(bytes(data[:PAGE]) + first.read_bytes()[PAGE:])
    before = {path.name: path.read_bytes() for path in packs(store, "")}
    store.close()
    with pytest.raises((FormatError, IntegrityError), match=named):
        Store.open(store.path, limits=LIMITS)
    assert {path.name: path.read_bytes() for path in packs(store, "")} == before


def test_every_byte_of_a_pack_that_is_written_to_may_be_cut_off(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    for chunk in CHUNKS[:3]:
        store.put_chunk(chunk)
    store.close()
    (pack,) = packs(store)
    data = pack.read_bytes()
    tried = 0
    for size in range(0, len(data) + 1, 512):
        pack.write_bytes(data[:size])
        again = Store.open(tmp_path / "s")
        held = [chunk for chunk in CHUNKS[:3] if again.has(sha256(chunk))]
        assert held == CHUNKS[: len(held)]
        assert all(again.read(sha256(chunk)) == chunk for chunk in held)
        for chunk in CHUNKS[:4]:
            again.put_chunk(chunk)
        assert [again.read(sha256(chunk)) for chunk in CHUNKS[:4]] == CHUNKS[:4]
        again.close()
        for path in packs(again):
            path.unlink()
        tried += 1
    print(f"cut a pack at {tried} places")
    assert tried > 20


def test_an_object_that_is_open_can_be_read_on_after_its_file_is_gone(store: Store) -> None:
    with store.open_object(sha256(CHUNKS[4])) as reader:
        for path in packs(store):
            path.unlink()
        assert reader.read(1 << 20, 0) == CHUNKS[4]
        assert reader.read(10, reader.size - 4) == CHUNKS[4][-4:]
    with pytest.raises(DeltadError, match="gone"):
        store.read(sha256(CHUNKS[4]))
