"""Turns at a link: in order, as many as its width allows, and whoever goes away holds nobody up."""

import asyncio
import tracemalloc

from deltad.protocol.width import FIRST
from deltad.relay.slots import Body, Slots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def hold(slots: Slots) -> None:
    async with slots.turn():
        await asyncio.Event().wait()


def test_a_body_is_what_came_in_whatever_the_pieces() -> None:
    body = Body()
    pieces = [b"a", b"bc", bytes(100_000), b"d" * 50_000, b"e", *(b"f" for _ in range(5_000))]
    for piece in pieces:
        body.extend(piece)
    assert bytes(body) == b"".join(pieces)
    assert len(body) == len(b"".join(pieces))
    body.clear()
    assert (len(body), bytes(body)) == (0, b"")


def test_a_body_in_very_small_pieces_takes_little_more_memory_than_its_bytes() -> None:
    tracemalloc.start()
    body = Body()
    for _ in range(200_000):
        body.extend(b"x")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2 * len(body)


async def test_those_who_wait_go_on_in_their_order_and_one_that_is_cancelled_holds_nobody_up() -> None:
    slots, began, go = Slots(2), list[int](), asyncio.Event()

    async def work(number: int) -> None:
        async with slots.turn():
            began.append(number)
            await go.wait()

    tasks = [asyncio.create_task(work(number)) for number in range(6)]
    await settle()
    assert began == [0, 1]
    tasks[2].cancel()
    tasks[0].cancel()
    await settle()
    assert began == [0, 1, 3]
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert began == [0, 1, 3, 4, 5]
    assert slots.width.used == 0


async def test_one_that_is_cancelled_in_its_turn_gives_it_back() -> None:
    slots = Slots(1)
    async with slots.turn():
        waiting = asyncio.create_task(hold(slots))
        await settle()
    waiting.cancel()  # its turn has come, and it has not noticed yet
    await asyncio.gather(waiting, return_exceptions=True)
    assert slots.width.used == 0


async def test_a_link_that_has_become_wider_lets_more_in() -> None:
    slots, inside = Slots(16), list[int]()
    go = asyncio.Event()

    async def work(number: int) -> None:
        async with slots.turn():
            inside.append(number)
            await go.wait()

    tasks = [asyncio.create_task(work(number)) for number in range(20)]
    await settle()
    assert len(inside) == FIRST
    now = 0.0
    while slots.width.size == FIRST:
        slots.received(1000, now)
        now += 0.1
    await settle()
    assert len(inside) == slots.width.size > FIRST
    go.set()
    await asyncio.gather(*tasks)
