"""Each attack of the catalogue costs a pulling daemon bounded memory, bytes and time, and changes nothing (P22)."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.kit.attacks import ATTACKS, HELLO, RUNS, TARGET
from tests.kit.hostile import Attack, Hostile
from tests.kit.victim import Looked

MEMORY_BYTES = 64 << 20
CPU_SECONDS = 2.0
SENT_BYTES = 96 << 20
"""What may have been written to all connections together, socket buffers included, until the victim had cut them."""
REPEATS = 2


class Victim:
    """The process, asked by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, word: str) -> Looked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        return msgspec.json.decode(await self._process.stdout.readline(), type=Looked)

    async def pulls(self) -> None:
        """Wait until it has a version."""
        while not (await self.ask("look")).runs:  # noqa: ASYNC110 - it tells only what it is asked
            await asyncio.sleep(0.02)


@pytest.fixture
async def hostile() -> AsyncIterator[Hostile]:
    async with Hostile() as hostile:
        yield hostile


@pytest.fixture
async def victim(tmp_path: Path, hostile: Hostile) -> AsyncIterator[Victim]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.kit.victim", str(tmp_path), hostile.url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    yield Victim(process)
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


async def suffers(victim: Victim, hostile: Hostile, attack: Attack) -> Looked:
    """What the victim is like once it has met the attack a few times, and said so."""
    await hostile.cut_all()
    hostile.begin(attack)
    await victim.ask("fresh")
    await hostile.until_told(REPEATS)
    while True:
        looked = await victim.ask("look")
        if any(re.search(attack.says, text) for text in looked.said) or not attack.says:
            return looked
        await asyncio.sleep(0.02)


async def test_every_attack_is_bounded_changes_nothing_and_is_named(victim: Victim, hostile: Hostile) -> None:
    assert len(ATTACKS) >= 30
    await victim.ask("fresh")
    await victim.pulls()
    resting = (await victim.ask("fresh")).peak
    for name, attack in ATTACKS.items():
        async with asyncio.timeout(60):
            looked = await suffers(victim, hostile, attack)
        assert looked.peak - resting < MEMORY_BYTES, (name, looked.peak - resting)
        assert looked.cpu < CPU_SECONDS, (name, looked.cpu)
        assert hostile.sent < SENT_BYTES, (name, hostile.sent)
        names = {digest.hex() for digest in hostile.objects}
        # Where the lie is about something else, the true version may come meanwhile.
        beside = attack.at in (HELLO, RUNS, TARGET)
        assert set(looked.runs) <= ({"policy"} if beside else set()), name
        assert set(looked.objects) <= names, name
        assert all(name.startswith("store-") for name in looked.names), name
        assert all(text.startswith(hostile.url) for text in looked.said), (name, looked.said)
    await hostile.cut_all()
    hostile.begin(None)
    await victim.ask("fresh")
    await victim.pulls()
