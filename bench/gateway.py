"""What the gateway adds to an answer, beside a plain proxy that adds nothing, and what held requests take.

An engine streams by the clock. Thirty-two clients read it directly, through a plain aiohttp proxy and through the
gateway, one after the other in rounds; a token tells when it was sent. What is added is what it takes longer than
directly, of the same round.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from bench.gateway_end import RUN, now
from bench.harness import ROOT, Measurement, Spec

PATHS = (
    "rollout_plugin/gateway",
    "rollout_plugin/messages.py",
    "deltad/client",
    "bench/gateway.py",
    "bench/gateway_end.py",
)

STREAMS = 32
TOKENS = 60
HELD = 1000
_MIB = 1 << 20

FIRST = "added to the first token / a plain proxy's"
EACH = "added to a token / a plain proxy's"
KEPT = "streamed tokens a second / directly"
MEMORY = f"resident with {HELD:,} held requests"

SPECS = (
    Spec(name=f"{FIRST}, median", unit="×", direction="min", must=1.5),
    Spec(name=f"{FIRST}, 99th percentile", unit="×", direction="min", must=2.0),
    Spec(name=f"{EACH}, median", unit="×", direction="min", must=1.5),
    Spec(name=f"{EACH}, 99th percentile", unit="×", direction="min", must=2.0),
    Spec(name=KEPT, unit="×", direction="max", must=0.95),
    Spec(name="added to a token by the plain proxy, median", unit="ms", direction="min"),
    Spec(name="added to a token by the gateway, median", unit="ms", direction="min"),
    Spec(name=MEMORY, unit="MiB", direction="min", must=300.0),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients of one round saw: seconds to first tokens, seconds that tokens took, tokens a second."""

    firsts: list[float]
    each: list[float]
    rate: float


def measure(quick: bool) -> Iterator[Measurement]:
    """One measurement for each row."""
    rounds, tokens = (3, 20) if quick else (9, TOKENS)
    with tempfile.TemporaryDirectory(prefix="deltad-gateway-") as name, _ends(Path(name)) as (engine, proxy, gateway):
        seen: list[tuple[Seen, Seen, Seen]] = []
        for at in range(rounds + 1):
            ways = [(engine, "/v1/generate"), (proxy, "/v1/generate"), (gateway.url, "/v1/completions")]
            # Whoever goes first in a round finds another machine than who goes last: they take turns.
            order = [(at + place) % 3 for place in range(3)]
            got = {place: uvloop.run(_round(*ways[place], tokens)) for place in order}
            if at:  # the first one warms up
                seen.append((got[0], got[1], got[2]))
        yield from _rows(seen)
        yield _held(gateway)


def _rows(seen: Sequence[tuple[Seen, Seen, Seen]]) -> Iterator[Measurement]:
    yield _ratio(f"{FIRST}, median", [_added(s, _middle, first=True) for s in seen])
    yield _ratio(f"{FIRST}, 99th percentile", [_added(s, _late, first=True) for s in seen])
    each = [_added(s, _middle, first=False) for s in seen]
    yield _ratio(f"{EACH}, median", each)
    yield _ratio(f"{EACH}, 99th percentile", [_added(s, _late, first=False) for s in seen])
    yield _median(KEPT, [through.rate / direct.rate for direct, _, through in seen], f"{STREAMS} streams")
    yield _median("added to a token by the plain proxy, median", [plain * 1e3 for plain, _ in each])
    yield _median("added to a token by the gateway, median", [ours * 1e3 for _, ours in each])


def _added(seen: tuple[Seen, Seen, Seen], of: object, *, first: bool) -> tuple[float, float]:
    """Seconds that the proxy and the gateway add, by the same measure of all three."""
    assert callable(of)
    direct, plain, ours = (of(s.firsts if first else s.each) for s in seen)
    return plain - direct, ours - direct


def _middle(values: list[float]) -> float:
    return statistics.median(values)


def _late(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _ratio(name: str, added: Sequence[tuple[float, float]]) -> Measurement:
    """Of the medians over all rounds, with the rounds' own ratios as spread: one alone may be divided by noise."""
    plain, ours = (statistics.median(values) for values in zip(*added, strict=True))
    ratios = [b / a for a, b in added if a > 0]
    note = f"{STREAMS} streams; {plain * 1e3:.2f} ms by the proxy, {ours * 1e3:.2f} ms by the gateway"
    if plain <= 0 or not ratios:
        return Measurement(name=name, skipped="the proxy added nothing that could be measured", note=note)
    return Measurement(name=name, value=ours / plain, spread=(min(ratios), max(ratios)), runs=len(added), note=note)


def _median(name: str, values: Sequence[float], note: str = "") -> Measurement:
    return Measurement(
        name=name, value=statistics.median(values), spread=(min(values), max(values)), runs=len(values), note=note
    )


async def _round(url: str, path: str, tokens: int) -> Seen:
    """All streams at once, begun over one interval."""
    connector = aiohttp.TCPConnector(limit=0)
    firsts: list[float] = []
    each: list[float] = []
    async with aiohttp.ClientSession(connector=connector) as session:
        begun = time.monotonic()
        await asyncio.gather(
            *(_read(session, url, path, tokens, at * 0.03 / STREAMS, firsts, each) for at in range(STREAMS))
        )
        rate = STREAMS * tokens / (time.monotonic() - begun)
    return Seen(firsts, each, rate)


async def _read(  # noqa: PLR0917 (what one stream adds goes into the lists of all)
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    tokens: int,
    delay: float,
    firsts: list[float],
    each: list[float],
) -> None:
    await asyncio.sleep(delay)
    prompt = [1, 2, 3]
    direct = path == "/v1/generate"
    body = (
        {"prompt_ids": prompt, "max_new_tokens": tokens, "stream": True}
        if direct
        else {"prompt": prompt, "max_tokens": tokens, "stream": True}
    )
    begun, got = now(), 0
    async with session.post(f"{url}{path}", data=msgspec.json.encode(body)) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            arrived = now()
            if line in (b"\n", b"data: [DONE]\n"):
                continue
            chunk = msgspec.json.decode(line if direct else line.removeprefix(b"data: "))
            found = chunk.get("token_ids", []) if direct else [t for c in chunk["choices"] for t in c["token_ids"]]
            for sent in found:
                if not got:
                    firsts.append((arrived - begun) / 1e6)
                got += 1
                each.append((arrived - sent) / 1e6)
    assert got == tokens, f"{got} of {tokens} tokens came through {url}"


@dataclass(frozen=True, slots=True)
class _Gateway:
    url: str
    process: subprocess.Popen[bytes]


def _held(gateway: _Gateway) -> Measurement:
    resident = uvloop.run(_hold(gateway))
    return Measurement(name=MEMORY, value=resident / _MIB, runs=1, note="the whole process, tokenizer not loaded")


async def _hold(gateway: _Gateway) -> int:
    """Resident bytes while so many requests wait for a version that does not come."""
    body = {"prompt": [1, 2, 3], "weight_version": {"min": "v000002", "wait": 60}}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        posts = [asyncio.ensure_future(session.post(f"{gateway.url}/v1/completions", json=body)) for _ in range(HELD)]
        while True:
            async with session.get(f"{gateway.url}/v1/replicas") as response:
                if (await response.json())["held"] == HELD:
                    break
        status = Path(f"/proc/{gateway.process.pid}/status").read_text()  # noqa: ASYNC240
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024


@contextmanager
def _ends(home: Path) -> Iterator[tuple[str, str, _Gateway]]:
    """The engine's URL, the proxy's, and a gateway before the engine."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes: list[subprocess.Popen[bytes]] = []

    def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *arguments]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL))
        return processes[-1]

    try:
        start("bench.gateway_end", "engine", str(home))
        engine = _address(home / "engine")
        start("bench.gateway_end", "proxy", engine, str(home))
        proxy = _address(home / "proxy")
        process = start(
            "rollout_plugin.gateway",
            *("--socket", str(home / "deltad.sock"), "--run", RUN, "--ready-file", str(home / "gateway")),
        )
        yield engine, proxy, _Gateway(_address(home / "gateway"), process)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _address(file: Path) -> str:
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file}: expected an address within 60 s, found none")
        time.sleep(0.02)
    return file.read_text().strip()
