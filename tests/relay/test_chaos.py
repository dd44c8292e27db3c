"""The chaos proxy does what its plan says, to the byte, whatever pieces the sockets deliver."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.kit.chaos import ChaosProxy, Fault, Mishap, random_mishaps

PASSING = (Fault.FLIP, Fault.DROP, Fault.DOUBLE, Fault.SWAP, Fault.INSERT)
DATA = random.Random(0).randbytes(4000)


async def through(*mishaps: Mishap, pieces: int = 1, rate: float | None = None) -> tuple[bytes, ChaosProxy]:
    """What comes out of `DATA` where the upstream sends it in so many pieces."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        size = -(-len(DATA) // pieces)
        for start in range(0, len(DATA), size):
            writer.write(DATA[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(send, "127.0.0.1", 0)
    async with server, ChaosProxy(server.sockets[0].getsockname()[1], rate=rate) as proxy:
        proxy.plan(*mishaps)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"go\n")
        out = await reader.read()
        writer.close()
        await writer.wait_closed()
    return out, proxy


@pytest.mark.parametrize(
    ("mishap", "out"),
    [
        (Mishap(7, Fault.FLIP, b"\x80"), DATA[:7] + bytes([DATA[7] ^ 0x80]) + DATA[8:]),
        (Mishap(7, Fault.DROP), DATA[:7] + DATA[8:]),
        (Mishap(7, Fault.DOUBLE), DATA[:8] + DATA[7:]),
        (Mishap(7, Fault.SWAP), DATA[:7] + DATA[8:9] + DATA[7:8] + DATA[9:]),
        (Mishap(7, Fault.INSERT, b"more"), DATA[:7] + b"more" + DATA[7:]),
        (Mishap(7, Fault.CUT), DATA[:7]),
        (Mishap(3999, Fault.SWAP), DATA),
    ],
)
async def test_each_fault_befalls_its_byte(mishap: Mishap, out: bytes) -> None:
    found, proxy = await through(mishap)
    assert found == out
    assert proxy.happened == [mishap]
    assert proxy.downstream == len(DATA)


@pytest.mark.parametrize("seed", range(8))
async def test_what_comes_out_does_not_depend_on_the_pieces(seed: int) -> None:
    plan = random_mishaps(seed, count=30, within=len(DATA), faults=PASSING)
    whole, proxy = await through(*plan)
    assert proxy.happened == plan
    assert {(await through(*plan, pieces=pieces))[0] for pieces in (2, 37, 1000)} == {whole}


async def test_a_plan_is_the_same_for_the_same_seed() -> None:
    assert random_mishaps(5, count=9, within=100) == random_mishaps(5, count=9, within=100)
    assert random_mishaps(5, count=9, within=100) != random_mishaps(6, count=9, within=100)
