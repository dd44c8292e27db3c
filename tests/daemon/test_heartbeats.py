"""Heartbeats over real relays: numbered over restarts, and told of where they are replayed or forged (P27)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from deltad.daemon.heartbeats import BEAT_SECONDS, Heartbeats
from deltad.delta.heartbeat import Heartbeat, decode_heartbeat
from deltad.delta.keys import SigningKey
from deltad.delta.signing import is_signed_by, sign
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.store.store import Store
from deltad.types import RunId
from tests.kit.hostile import signed
from tests.kit.regions import QUICK, RUN, Downstream, Upstream
from tests.kit.versions import Lineage

KEY, STRANGER = SigningKey.from_seed(bytes([1] * 32)), SigningKey.from_seed(bytes([9] * 32))
TRUSTING = replace(QUICK, pull=replace(QUICK.pull, trust=TrustList([TrustedKey(KEY.public, frozenset(Scope))])))


def test_each_is_newer_than_all_before_it_over_restarts_too(tmp_path: Path) -> None:
    now, last = [0.0], 0
    for _ in range(3):
        store = Store.open(tmp_path / "store")
        beats = Heartbeats(store, (RUN,), KEY, clock=lambda: now[0])
        beats.make_ready()
        for _ in range(3):
            data = beats.give(RUN)
            assert data is not None
            beat = decode_heartbeat(data)
            assert beat.number > last
            assert is_signed_by(beat, KEY.public)
            assert beats.give(RUN) == data, "within a few seconds it is the same one"
            last, now[0] = beat.number, now[0] + BEAT_SECONDS
        store.close()


def test_a_new_version_is_told_of_at_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    beats = Heartbeats(store, (RUN,), KEY, clock=lambda: 0.0)
    beats.make_ready()
    before = decode_heartbeat(beats.give(RUN) or b"")
    published = Lineage(tensors=1).publish()
    published.commit_into(store)
    after = decode_heartbeat(beats.give(RUN) or b"")
    assert (before.latest, after.latest) == (None, published.version)
    assert after.number > before.number
    store.close()


def test_without_a_key_or_for_a_run_of_others_there_is_none_of_its_own(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    for beats in (Heartbeats(store, (RUN,), None), Heartbeats(store, (), KEY)):
        beats.make_ready()
        assert beats.give(RUN) is None
        heard = [sign(Heartbeat(1, RUN, number, None), STRANGER) for number in (5, 7, 6)]
        for beat in heard:
            beats.heard(beat)
        assert beats.give(RUN) == heard[1].encode(), "what was heard is passed on as it came, the newest of all"
        assert beats.give(RunId("other")) is None
    store.close()


@pytest.mark.parametrize(
    ("beats", "trouble"),
    [
        ([sign(Heartbeat(1, RUN, n, None), KEY) for n in (7, 6)], "expected a number above 7, found 6"),
        ([Heartbeat(1, RUN, 7, None)], "found none"),
        ([sign(Heartbeat(1, RUN, 7, None), STRANGER)], f"found one of key {STRANGER.public.id}"),
        ([sign(Heartbeat(1, "other", 7, None), KEY)], "expected one of policy, found one of other"),
    ],
)
async def test_one_that_was_replayed_or_forged_is_told_of_and_versions_come_all_the_same(
    tmp_path: Path, beats: list[Heartbeat], trouble: str
) -> None:
    given = iter(beats)
    now = [next(given)]

    def give(run: RunId) -> bytes:
        data = now[0].encode()
        now[0] = next(given, now[0])
        return data

    published = signed(Lineage(tensors=1).publish(), KEY)
    async with (
        Upstream(tmp_path / "a", heartbeat=give) as upstream,
        Downstream(tmp_path / "b", upstream.url, policy=TRUSTING) as downstream,
    ):
        upstream.publish(published)
        await downstream.reaches(published.version)
        async with asyncio.timeout(30):
            while trouble not in downstream.puller.view().error:  # noqa: ASYNC110 - a view tells nobody that it changed
                await asyncio.sleep(0.01)
        assert downstream.puller.view().up
