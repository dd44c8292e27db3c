"""A minute of trouble in each test run, an hour of it by `make soak`: nothing is lost, wrong, or grows."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from tests.soak.history import (
    Durable,
    Event,
    Exported,
    Fault,
    Measured,
    Offered,
    Published,
    figures,
    unreached,
    violations,
)
from tests.soak.world import RUNS, World

SECONDS = float(os.environ.get("DELTAD_SOAK_SECONDS", "45"))
SEED = int(os.environ.get("DELTAD_SOAK_SEED", "20"))
CALM_SECONDS = 90.0
"""Within what all regions have to have the newest version once the trouble is over."""


@pytest.mark.timeout(SECONDS + 300)
async def test_whatever_happens_nothing_is_lost_or_wrong_and_nothing_grows(tmp_path: Path) -> None:
    async with World(tmp_path, SEED) as world:
        looking = [asyncio.create_task(world.look(name)) for name in world.daemons]
        looking.append(asyncio.create_task(world.measure()))
        busy = [asyncio.create_task(world.train(run)) for run in RUNS]
        trouble = asyncio.create_task(world.trouble())
        ended, _ = await asyncio.wait([*looking, *busy, trouble], timeout=SECONDS, return_when="FIRST_COMPLETED")
        assert not ended, [task.exception() for task in ended]
        await calm(world, trouble, busy)
        deadline = time.monotonic() + CALM_SECONDS
        while missing := unreached(world.events, sorted(world.daemons)):
            if time.monotonic() > deadline:
                pytest.fail(f"{missing}\n{await world.where_it_hangs()}")
            await asyncio.sleep(0.5)
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
        found = figures(world.events)
    print(json.dumps({"seconds": SECONDS, "seed": SEED, **found}))
    assert list(violations(world.events)) == []
    assert found["versions_published"] >= SECONDS / 10  # type: ignore[operator]
    assert {"kill", "cut", "pause", "skew"} & set(found["faults"])  # type: ignore[call-overload]


async def calm(world: World, trouble: asyncio.Task[None], busy: list[asyncio.Task[None]]) -> None:
    """Let the fault that is under way end, and the training, and have every daemon run."""
    world.enough.set()
    await trouble
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    for name, daemon in world.daemons.items():
        assert daemon.process is not None
        if daemon.process.poll() is not None:
            await world.start(name)


GOOD: list[Event] = [
    Offered("r", 0),
    Published("r", 0),
    Durable("a", "r", 0),
    Durable("b", "r", 0),
    Exported("b", "r", 0, equal=True),
    Measured("a", 1, 65.0, 100 << 20, 40),
    Measured("a", 1, 90.0, 110 << 20, 41),
]


def test_a_history_in_which_all_is_well_has_no_violation() -> None:
    assert list(violations(GOOD)) == []
    assert unreached(GOOD, ["a", "b"]) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([Durable("b", "r", 1)], "nobody offered"),
        ([Offered("r", 1), Durable("b", "r", 1), Durable("b", "r", 0)], "went back"),
        ([Offered("r", 1), Published("r", 1), Durable("a", "r", 0)], "which it had acknowledged"),
        ([Exported("b", "r", 0, equal=False)], "with other bytes"),
        ([Measured("b", 1, 1.0, 900 << 20, 40)], "900 MiB"),
        ([Measured("b", 1, 1.0, 1, 400)], "400 descriptors"),
        ([Measured("a", 1, 99.0, 200 << 20, 41)], "100 MiB more"),
        ([Measured("a", 1, 99.0, 100 << 20, 90)], "50 more descriptors"),
    ],
)
def test_what_may_not_happen_is_told(more: list[Event], words: str) -> None:
    [found] = violations([*GOOD, *more])
    assert words in found


def test_a_region_that_lags_at_the_end_and_faults_that_were_made_are_told() -> None:
    events = [*GOOD, Offered("r", 1), Published("r", 1), Fault("kill", "b")]
    assert unreached(events, ["b", "c"]) == [
        "b has r 0, and 1 was published",
        "c has r never, and 1 was published",
    ]
    assert figures(events)["faults"] == {"kill": 1}
