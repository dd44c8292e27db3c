"""Asking a remote replica: over real TCP, through its absences."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from deltad.errors import DeltadError, UnavailableError, UsageError
from tests.rollout_plugin.conftest import Running, StartReplica
from tests.rollout_plugin.region import Region
from trainer_plugin.rl.rollouts import Generated, RemoteReplica, insist

PROMPT = (72, 101, 108, 108, 111)


class Retries:
    """Remembers why something was tried again; calls `then` at the first time."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.reasons: list[str] = []
        self._then = then

    def __call__(self, attempt: int, error: DeltadError) -> None:
        self.reasons.append(str(error))
        if len(self.reasons) == 1:
            self._then()


def sample(replica: RemoteReplica, *, min_version: str = "v000000", seed: int = 1) -> Generated:
    return replica.generate(PROMPT, n=2, max_new_tokens=4, temperature=1.0, seed=seed, min_version=min_version)


@pytest.fixture
def served(region: Region, start_replica: StartReplica) -> Running:
    replica = start_replica()
    region.await_verified(region.history[0])
    return replica


def test_samples_and_logprobs_come_as_the_engine_gave_them(served: Running) -> None:
    retries = Retries()
    remote = RemoteReplica(served.url, patience=60, on_retry=retries)
    reply = sample(remote)
    assert reply.versions == ("v000000",)
    for one in reply.samples:
        assert len(one.token_ids) == len(one.logprobs) == len(one.versions)
    scored = remote.logprobs(PROMPT, min_version="v000000")
    assert scored.logprobs == served.engine.logprobs(PROMPT).logprobs
    assert retries.reasons == []


def test_a_replica_that_is_behind_is_asked_again_until_it_has_caught_up(region: Region, served: Running) -> None:
    publish = threading.Thread(target=region.publish_changed)
    remote = RemoteReplica(served.url, patience=60, on_retry=Retries())
    publish.start()
    assert sample(remote, min_version="v000001").versions == ("v000001",)
    publish.join()


def test_a_fenced_replica_is_asked_again_until_it_serves(served: Running) -> None:
    engine = served.engine
    engine.fence("a test")
    retries = Retries(then=engine.unfence)
    sample(RemoteReplica(served.url, patience=60, on_retry=retries))
    assert "fenced: a test" in retries.reasons[0]


def test_a_replica_that_is_gone_is_given_up_after_the_patience(served: Running) -> None:
    served.stop()
    with pytest.raises(UnavailableError, match=f"replica at {served.url}"):
        sample(RemoteReplica(served.url, patience=0.0, on_retry=Retries()))


def test_a_request_that_can_never_work_is_not_repeated(served: Running) -> None:
    retries = Retries()
    remote = RemoteReplica(served.url, patience=60, on_retry=retries)
    with pytest.raises(UsageError, match="token ids"):
        remote.logprobs((1,), min_version="v000000")
    assert retries.reasons == []


def test_work_is_repeated_while_its_error_says_that_this_can_help() -> None:
    left = [UnavailableError("a"), UnavailableError("b")]

    def work() -> str:
        if left:
            raise left.pop(0)
        return "done"

    retries = Retries()
    assert insist(work, 60, retries) == "done"
    assert retries.reasons == ["a", "b"]


@pytest.mark.parametrize("url", ["https://h:1", "h:1", "http://h", "http://h:1/path", "http://:1", "http://h:x"])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        RemoteReplica(url, patience=1, on_retry=Retries())
