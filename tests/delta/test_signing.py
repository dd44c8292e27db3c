"""A signature holds for just the bytes and the kind of thing that were signed."""

from __future__ import annotations

import base64

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.encoding import encode, sha256
from deltad.delta.keys import PublicKey, SigningKey, parse_public_key
from deltad.delta.manifest import Manifest, decode_manifest
from deltad.delta.record import VersionRecord, decode_record
from deltad.delta.signing import is_signed_by, sign
from deltad.errors import FormatError
from deltad.types import Digest
from tests.kit.versions import Lineage

KEY = SigningKey.from_seed(bytes(range(32)))
PUBLISHED = Lineage(tensors=1).publish()
MANIFEST = decode_manifest(PUBLISHED.objects[Digest(PUBLISHED.record.variants[0].edges[0].manifest)])


def test_the_key_is_that_of_rfc_8032() -> None:
    # Section 7.1, test 1.
    key = SigningKey.from_seed(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.public.data.hex() == public
    assert key.public.id == sha256(bytes.fromhex(public)).hex()[:16]


@pytest.mark.parametrize("thing", [PUBLISHED.record, MANIFEST])
def test_what_was_signed_is_read_back_and_its_signature_holds(thing: VersionRecord | Manifest) -> None:
    signed = sign(thing, KEY)
    again = (decode_record if isinstance(thing, VersionRecord) else decode_manifest)(encode(signed))
    assert again == signed
    assert is_signed_by(again, KEY.public)
    assert not is_signed_by(again, SigningKey.new().public)
    assert not is_signed_by(thing, KEY.public)


@given(st.data())
def test_any_other_field_makes_it_another_thing(data: st.DataObject) -> None:
    thing = data.draw(st.sampled_from([sign(PUBLISHED.record, KEY), sign(MANIFEST, KEY)]))
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
    assert is_signed_by(changed, KEY.public) == (other == value)


def test_a_signature_over_a_record_is_none_over_an_edge() -> None:
    record, edge = sign(PUBLISHED.record, KEY), sign(MANIFEST, KEY)
    assert not is_signed_by(msgspec.structs.replace(edge, signature=record.signature), KEY.public)


def test_signing_again_replaces_the_signature() -> None:
    other = SigningKey.new()
    signed = sign(sign(PUBLISHED.record, KEY), other)
    assert is_signed_by(signed, other.public)
    assert not is_signed_by(signed, KEY.public)


def test_a_key_goes_through_its_file_and_is_not_printed() -> None:
    key = SigningKey.new()
    assert SigningKey.from_pem(key.pem()).public == key.public
    assert repr(key) == f"SigningKey({key.public.id})"


def test_a_public_key_goes_through_its_text() -> None:
    assert parse_public_key(str(KEY.public)) == KEY.public


@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda data: "ed25519:" + base64.b64encode(data).decode()))
def test_any_text_is_a_public_key_in_its_one_spelling_or_refused(text: str) -> None:
    try:
        key = parse_public_key(text)
    except FormatError:
        return
    assert str(key) == text
    assert len(key.data) == 32


@pytest.mark.parametrize(
    "data",
    [b"", b"hunter2", SigningKey.new().pem()[:-40], b"-----BEGIN PRIVATE KEY-----\n"],
    ids=["nothing", "a word", "a torn key", "a first line"],
)
def test_what_is_no_private_key_is_refused_and_not_repeated(data: bytes) -> None:
    with pytest.raises(FormatError, match="Ed25519") as refused:
        SigningKey.from_pem(data)
    assert "hunter2" not in str(refused.value)


def test_a_private_key_of_another_kind_is_refused() -> None:
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(FormatError, match="another kind"):
        SigningKey.from_pem(other)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(FormatError, match="32 bytes"):
        PublicKey(bytes(size))


@given(st.binary(min_size=32, max_size=32))
def test_bytes_that_are_no_key_have_signed_nothing(data: bytes) -> None:
    signed = msgspec.structs.replace(PUBLISHED.record, key_id=PublicKey(data).id, signature=bytes(64))
    assert not is_signed_by(signed, PublicKey(data))
