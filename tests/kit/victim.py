"""A pulling daemon's core in a process of its own, so that what a peer costs it can be measured: its memory, its time.

    python -m tests.kit.victim HOME URL

It trusts the keys of `tests.kit.hostile`, and tries again at once. One line on stdin is one question, one line of JSON
on stdout the answer: `fresh` begins anew with an empty store; `look` tells what it is like now.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from deltad.protocol.trust import Scope, TrustedKey, TrustList
from tests.kit.hostile import DERIVER, TRAINER
from tests.kit.regions import QUICK, Downstream

TRUST = TrustList(
    [
        TrustedKey(TRAINER.public, frozenset({Scope.PUBLISH}), name="trainer"),
        TrustedKey(DERIVER.public, frozenset({Scope.DERIVE}), name="border"),
    ]
)


class Looked(msgspec.Struct, frozen=True):
    """`peak` is the most resident memory, in bytes, and `cpu` the processor's seconds, since `fresh`; `said` what was
    logged of the upstream, `objects` the SHA-256 of all that is stored, in hex."""

    peak: int
    cpu: float
    received: int
    runs: tuple[str, ...]
    objects: tuple[str, ...]
    said: tuple[str, ...]
    names: tuple[str, ...]
    """Of what lies in the victim's home."""


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


async def _serve(home: Path, url: str) -> None:
    said: list[str] = []

    def listen(logger: object, name: str, entry: MutableMapping[str, object]) -> str:
        if entry["event"] == "upstream_trouble":
            said.append(str(entry["error"])[:2000])
        raise structlog.DropEvent

    structlog.configure(processors=[listen])
    policy = replace(QUICK, pull=replace(QUICK.pull, trust=TRUST))
    downstream: Downstream | None = None
    began, lives = 0.0, 0
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == "fresh":
                if downstream is not None:
                    await downstream.stop()
                    downstream.store.close()
                said.clear()
                lives += 1
                downstream = Downstream(home / f"store-{lives}", url, runs=("policy", "*"), policy=policy)
                _reset_peak()
                began = time.process_time()
                downstream.start()
            assert downstream is not None
            looked = Looked(
                _peak(),
                time.process_time() - began,
                downstream.puller.view().bytes_received,
                tuple(downstream.store.runs()),
                tuple(digest.hex() for digest in downstream.objects()),
                tuple(said),
                tuple(sorted(os.listdir(home))),
            )
            print(msgspec.json.encode(looked).decode(), flush=True)
    finally:
        if downstream is not None:
            await downstream.stop()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2]))
