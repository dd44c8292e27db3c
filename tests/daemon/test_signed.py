"""Real daemons: what one signs the other takes if it trusts the key, and else says whose signature it wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import PublishRequest
from deltad.config import KeyFile
from deltad.delta.keys import SigningKey
from deltad.delta.record import decode_record
from deltad.delta.signing import is_signed_by
from deltad.errors import PeerError
from deltad.types import Version
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

WAIT = 60.0
KEY, OTHER = SigningKey.from_seed(bytes([1] * 32)), SigningKey.from_seed(bytes([2] * 32))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """The trainer's daemon, which signs with KEY, and one that pulls from it and trusts the key in its file."""
    port = free_port()
    key = tmp_path / "a.key"
    key.write_bytes(KEY.pem())
    key.chmod(0o600)
    relay = f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n'
    run = '[[run]]\nid = "policy"\n'
    a = Daemon(tmp_path / "a", "a", f'{relay}[signing]\nkey_file = "{key}"\n{run}')
    assert KeyFile(key).read().public == KEY.public
    b = Daemon(
        tmp_path / "b", "b", f'[[upstream]]\nurl = "http://127.0.0.1:{port}"\ntoken_file = "token"\nruns = ["policy"]\n'
    )
    yield a, b
    for daemon in (a, b):
        daemon.stop()


def trusting(daemon: Daemon, key: SigningKey) -> Daemon:
    daemon.config.write_text(daemon.config.read_text() + f'[[trust]]\nkey = "{key.public}"\nname = "trainer"\n')
    return daemon


def test_what_a_trusted_key_signed_is_pulled_and_stays_signed(pair: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    a, b = pair
    a.start()
    a.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / "step_1", ArrayWeights.random(MODEL)))))
    trusting(b, KEY).start()
    assert b.client.latest("policy", wait=WAIT) is not None, b.log
    assert is_signed_by(decode_record(b.client.record_bytes("policy", Version(1, 1))), KEY.public)


def test_what_no_trusted_key_signed_is_refused_and_the_status_says_whose_signature_is_wanted(
    pair: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    a, b = pair
    a.start()
    a.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / "step_1", ArrayWeights.random(MODEL)))))
    trusting(b, OTHER).start()
    with pytest.raises(PeerError, match=f"found one of key {KEY.public.id}"):
        b.client.pull("policy", wait=1.0)
    (upstream,) = b.client.status().upstreams
    assert f"expected a signature of trainer ({OTHER.public.id})" in upstream.error
    assert not b.client.versions("policy")
