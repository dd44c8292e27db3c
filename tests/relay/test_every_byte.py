"""P18, byte by byte: whatever happens at any offset of any reply, the answer is the true one or an error that
names the peer."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltad.client.messages import RegionReport
from deltad.delta import FORMAT
from deltad.delta.frame import CODERS
from deltad.errors import DeltadError
from deltad.protocol.pull_plan import Kind, check_arrival, want
from deltad.relay.client import RelayClient
from deltad.relay.wire import Hello
from tests.kit.chaos import ChaosProxy, Fault, Mishap
from tests.kit.regions import RUN, TOKEN, Upstream
from tests.kit.versions import Lineage, Published

REPORT = RegionReport("downstream", "boot-1", 1)


@dataclass(frozen=True)
class Question:
    """Something to ask of a peer, and the answers that are right; `None` only delays."""

    ask: Callable[[RelayClient], Awaitable[object]]
    right: tuple[object, ...]


def questions(first: Published) -> dict[str, Question]:
    digest, data = max(first.objects.items(), key=lambda item: len(item[1]))
    wanted = want(Kind.CHUNK, digest, len(data))

    async def fetch(client: RelayClient, had: int) -> bytes:
        buffer = bytearray(data[:had])
        await client.fetch(wanted, buffer, count=lambda count: None)
        return check_arrival(wanted, bytes(buffer), client.url).data

    return {
        "hello": Question(lambda c: c.hello(), (Hello("upstream", "boot-1", (FORMAT,), tuple(sorted(CODERS))),)),
        "runs": Question(lambda c: c.runs(), ((RUN,),)),
        "versions": Question(lambda c: c.versions(RUN, after=None), ((first.version,),)),
        "latest": Question(lambda c: c.latest(RUN, after=None, wait=0), (first.data, None)),
        "record": Question(lambda c: c.record(RUN, first.version, count=lambda count: None), (first.data,)),
        "object": Question(lambda c: fetch(c, 0), (data,)),
        "rest of an object": Question(lambda c: fetch(c, len(data) // 2), (data,)),
        "report": Question(lambda c: c.report(REPORT), (None,)),
    }


async def outcome_of(asked: Awaitable[object]) -> object:
    """The answer, or the error that came instead."""
    try:
        return await asked
    except DeltadError as error:
        return error


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.DROP, Fault.DOUBLE, Fault.SWAP, Fault.INSERT, Fault.CUT])
async def test_at_every_offset_of_every_reply(tmp_path: Path, fault: Fault) -> None:
    rng = random.Random(fault)
    first = Lineage(tensors=1, elements=128).publish()
    async with Upstream(tmp_path / "a") as upstream, ChaosProxy(upstream.port) as proxy:
        upstream.publish(first)
        received: list[int] = []
        async with (
            RelayClient(proxy.url, lambda: TOKEN, count=received.append) as patient,
            RelayClient(proxy.url, lambda: TOKEN, count=received.append, stall_seconds=0.05) as client,
        ):
            for name, question in questions(first).items():
                proxy.plan()
                assert await question.ask(patient) == question.right[0]
                length, caught = proxy.downstream, 0
                for at in range(0, length, 1 if fault is Fault.FLIP else 7):
                    mishap = Mishap(at, fault, bytes([rng.randrange(1, 256)]))
                    proxy.plan(mishap)
                    outcome = await outcome_of(question.ask(client))
                    caught += isinstance(outcome, DeltadError)
                    named = isinstance(outcome, DeltadError) and proxy.url in str(outcome)
                    assert named or outcome in question.right, f"{name}, {mishap}: {outcome}"
                assert caught, f"{name}: nothing happened in {length} bytes"
        assert all(report == REPORT for report in upstream.reports)
