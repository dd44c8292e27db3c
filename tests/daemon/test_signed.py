"""Real daemons: what one signs the other takes if it trusts the key, and else says whose signature it wants."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import PublishRequest
from deltad.config import KeyFile, load_config, warnings
from deltad.delta.keys import SigningKey
from deltad.delta.record import decode_record
from deltad.delta.signing import is_signed_by
from deltad.errors import NotFoundError, PeerError
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


def unsigned(daemon: Daemon) -> str:
    """The configuration of a daemon that signs nothing; returns the one that it had."""
    signing = daemon.config.read_text()
    daemon.config.write_text(re.sub(r"\[signing\]\nkey_file = .*\n", "", signing))
    return signing


@pytest.mark.parametrize("held", [False, True], ids=["new", "holds what was not signed"])
def test_a_run_that_is_signed_from_some_version_on_reaches_regions_that_trust_the_key_alone(
    pair: tuple[Daemon, Daemon], tmp_path: Path, held: bool
) -> None:
    """The first version that is signed is there as an anchor too; a region that is told by SIGHUP begins there anew."""
    a, b = pair
    signing = unsigned(a)
    a.start()
    weights = ArrayWeights.random(MODEL)
    for number in (1, 2):
        a.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / f"step_{number}", weights))))
        weights = weights.changed(0.01, seed=number)
    if held:
        b.start()
        assert b.client.latest("policy", after="v000001", wait=WAIT) is not None, b.log
    a.stop()
    a.config.write_text(signing)
    a.start()
    a.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / "step_3", weights))))
    assert a.client.version("policy", "v000003").kind == "delta", "whoever has the one before pulls that"
    if held:
        assert b.client.latest("policy", after="v000002", wait=WAIT) is not None, b.log
        trusting(b, KEY)
        assert b.process is not None
        b.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + WAIT
        while [(info.version, info.kind) for info in b.client.versions("policy")] != [("v000003", "anchor")]:
            assert time.monotonic() < deadline, b.log
            time.sleep(0.05)
    else:
        trusting(b, KEY).start()
        assert b.client.latest("policy", wait=WAIT) is not None, b.log
    (arrived,) = b.client.versions("policy")
    assert (arrived.version, arrived.kind) == ("v000003", "anchor")
    assert b.client.verify("policy", "v000003").match


def test_while_the_wrong_key_is_trusted_the_status_says_so_in_words_and_not_that_there_is_no_version(
    pair: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    a, b = pair
    a.start()
    a.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / "step_1", ArrayWeights.random(MODEL)))))
    trusting(b, OTHER).start()
    with pytest.raises(PeerError):
        b.client.pull("policy", wait=1.0)
    (upstream,) = b.client.status().upstreams
    assert upstream.up
    assert upstream.activity.startswith("waiting: ")
    assert f"expected a signature of trainer ({OTHER.public.id}), found one of key {KEY.public.id}" in upstream.activity


def test_what_was_stored_before_a_key_was_trusted_is_neither_served_nor_activated_until_it_is_vouched_for(
    pair: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    a, b = pair
    a.start()
    a.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / "step_1", ArrayWeights.random(MODEL)))))
    plain = b.config.read_text()
    b.start()
    assert b.client.latest("policy", wait=WAIT) is not None, b.log
    b.stop()
    a.stop()
    trusting(b, OTHER).start()
    assert not b.client.versions("policy")
    with pytest.raises(NotFoundError):
        b.client.record_bytes("policy", Version(1, 1))
    status = b.client.status()
    assert not status.ready
    (reason,) = [reason for reason in status.reasons if reason.startswith("run policy: v000001 lie")]
    assert f"found one of key {KEY.public.id}" in reason
    assert "versions_not_believed" in b.log
    b.client.collect()
    b.stop()
    b.config.write_text(plain)
    trusting(b, KEY).start()
    assert b.client.verify("policy").match, "nothing was removed meanwhile"


@pytest.mark.parametrize("signing", ["", '[signing]\nkey_file = "a.key"\n'])
def test_a_publisher_that_no_trusted_key_speaks_for_is_warned_of(tmp_path: Path, signing: str) -> None:
    daemon = Daemon(tmp_path / "a", "a", signing + '[[run]]\nid = "policy"\n')
    (tmp_path / "a" / "a.key").write_bytes(KEY.pem())
    (tmp_path / "a" / "a.key").chmod(0o600)
    (doubt,) = warnings(load_config(trusting(daemon, OTHER).config))
    assert "takes no version that is published here" in doubt
    daemon.config.write_text(daemon.config.read_text().replace(str(OTHER.public), str(KEY.public)))
    assert len(warnings(load_config(daemon.config))) == (0 if signing else 1)
