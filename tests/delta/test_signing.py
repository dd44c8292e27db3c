"""A signature holds for just the bytes and the kind of thing that were signed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.encoding import encode, sha256
from deltad.delta.manifest import Manifest, decode_manifest
from deltad.delta.record import VersionRecord, decode_record
from deltad.delta.signing import PublicKey, SigningKey
from deltad.errors import FormatError
from deltad.types import Digest
from tests.kit.versions import Lineage

KEY = SigningKey(bytes(range(32)))
PUBLISHED = Lineage(tensors=1).publish()
MANIFEST = decode_manifest(PUBLISHED.objects[Digest(PUBLISHED.record.variants[0].edges[0].manifest)])


def test_the_key_is_that_of_rfc_8032() -> None:
    # Section 7.1, test 1.
    key = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.public.data.hex() == public
    assert key.public.id == sha256(bytes.fromhex(public)).hex()[:16]


@pytest.mark.parametrize("thing", [PUBLISHED.record, MANIFEST])
def test_what_was_signed_is_read_back_and_its_signature_holds(thing: VersionRecord | Manifest) -> None:
    signed = KEY.sign(thing)
    again = (decode_record if isinstance(thing, VersionRecord) else decode_manifest)(encode(signed))
    assert again == signed
    assert KEY.public.has_signed(again)
    assert not SigningKey.new().public.has_signed(again)
    assert not KEY.public.has_signed(thing)


@given(st.data())
def test_any_other_field_makes_it_another_thing(data: st.DataObject) -> None:
    thing = data.draw(st.sampled_from([KEY.sign(PUBLISHED.record), KEY.sign(MANIFEST)]))
    name = data.draw(st.sampled_from([field.name for field in msgspec.structs.fields(thing)]))
    value = getattr(thing, name)
    if isinstance(value, bytes):
        other: object = data.draw(st.binary(min_size=len(value), max_size=len(value)))
    elif isinstance(value, int):
        other = data.draw(st.integers(0, 1 << 40))
    elif isinstance(value, str):
        other = data.draw(st.text(max_size=20))
    else:
        return
    changed = msgspec.structs.replace(thing, **{name: other})
    assert KEY.public.has_signed(changed) == (other == value)


def test_a_signature_over_a_record_is_none_over_an_edge() -> None:
    record, edge = KEY.sign(PUBLISHED.record), KEY.sign(MANIFEST)
    assert not KEY.public.has_signed(msgspec.structs.replace(edge, signature=record.signature))


def test_signing_again_replaces_the_signature() -> None:
    other = SigningKey.new()
    signed = other.sign(KEY.sign(PUBLISHED.record))
    assert other.public.has_signed(signed)
    assert not KEY.public.has_signed(signed)


def test_a_key_goes_through_its_seed_and_is_not_printed() -> None:
    key = SigningKey.new()
    assert SigningKey(key.seed()).public == key.public
    assert key.seed().hex() not in repr(key)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(FormatError, match="32 bytes"):
        SigningKey(bytes(size))
    with pytest.raises(FormatError, match="32 bytes"):
        PublicKey(bytes(size))


@given(st.binary(min_size=32, max_size=32))
def test_bytes_that_are_no_key_have_signed_nothing(data: bytes) -> None:
    signed = msgspec.structs.replace(PUBLISHED.record, key_id=PublicKey(data).id, signature=bytes(64))
    assert not PublicKey(data).has_signed(signed)
