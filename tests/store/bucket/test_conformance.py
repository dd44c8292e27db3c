"""Every kind of bucket keeps the promises of the port: a directory, memory and a server that speaks S3."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from deltad.errors import ConflictError, NotFoundError, PeerError
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.bucket.port import PART_BYTES, Bucket, Stamp

MOST = 1 << 20


async def content(bucket: Bucket, key: str) -> bytes:
    found = await bucket.read(key, MOST)
    assert found is not None
    return found[0]


async def test_a_key_is_created_once_and_stays_as_it_was(bucket: ObstoreBucket) -> None:
    assert await bucket.create("objects/a", b"one")
    assert not await bucket.create("objects/a", b"two")
    assert await content(bucket, "objects/a") == b"one"


async def test_a_put_replaces_what_was_there(bucket: ObstoreBucket) -> None:
    await bucket.put("objects/a", b"one")
    await bucket.put("objects/a", b"two!")
    assert await content(bucket, "objects/a") == b"two!"
    assert (await bucket.head("objects/a")).size == 4


async def test_what_is_large_goes_up_in_parts_and_comes_back_whole(bucket: ObstoreBucket) -> None:
    data = random.Random(1).randbytes(PART_BYTES + 123_457)
    await bucket.put("objects/large", data)
    pieces = [piece async for piece in bucket.stream("objects/large", 0, len(data))]
    assert b"".join(pieces) == data


@pytest.mark.parametrize("start", [0, 1, 70_000, 99_999])
async def test_a_read_begins_where_it_is_told_to(bucket: ObstoreBucket, start: int) -> None:
    data = random.Random(2).randbytes(100_000)
    await bucket.create("objects/a", data)
    assert b"".join([piece async for piece in bucket.stream("objects/a", start, len(data))]) == data[start:]


async def test_an_empty_content_is_one(bucket: ObstoreBucket) -> None:
    assert await bucket.create("objects/empty", b"")
    assert [piece async for piece in bucket.stream("objects/empty", 0, 0)] == []
    assert await content(bucket, "objects/empty") == b""


async def test_what_is_not_there_is_not_found_and_removing_it_is_no_error(bucket: ObstoreBucket) -> None:
    for ask in (
        bucket.head("objects/a"),
        bucket.read("objects/a", MOST),
        anext(aiter(bucket.stream("objects/a", 0, 1))),
    ):
        with pytest.raises(NotFoundError):
            await ask
    await bucket.remove("objects/a")
    await bucket.create("objects/a", b"one")
    await bucket.remove("objects/a")
    with pytest.raises(NotFoundError):
        await bucket.head("objects/a")


async def test_more_or_other_bytes_than_were_expected_are_refused_before_they_are_read(bucket: ObstoreBucket) -> None:
    await bucket.create("runs/a/latest", bytes(100))
    with pytest.raises(PeerError, match="at most 99 bytes, found 100"):
        await bucket.read("runs/a/latest", 99)
    for size in (99, 101):
        with pytest.raises(PeerError, match=f"{size} bytes, found 100"):
            await anext(aiter(bucket.stream("runs/a/latest", 0, size)))


async def test_a_pointer_that_has_not_changed_is_not_read_again(bucket: ObstoreBucket) -> None:
    stamp = await bucket.swap("runs/a/latest", b"one", None)
    found = await bucket.read("runs/a/latest", MOST)
    assert found == (b"one", stamp)
    assert await bucket.read("runs/a/latest", MOST, unlike=stamp) is None
    await bucket.swap("runs/a/latest", b"two", stamp)
    again = await bucket.read("runs/a/latest", MOST, unlike=stamp)
    assert again is not None
    assert again[0] == b"two"


async def test_a_swap_needs_the_content_that_was_read(bucket: ObstoreBucket) -> None:
    first = await bucket.swap("runs/a/latest", b"one", None)
    with pytest.raises(ConflictError):
        await bucket.swap("runs/a/latest", b"again", None)
    second = await bucket.swap("runs/a/latest", b"second", first)
    with pytest.raises(ConflictError, match="somebody else writes"):
        await bucket.swap("runs/a/latest", b"late", first)
    assert await content(bucket, "runs/a/latest") == b"second"
    await bucket.swap("runs/a/latest", b"third", second)


@pytest.mark.parametrize("before", [False, True])
async def test_of_swaps_at_the_same_time_one_wins(make_bucket: Callable[[], ObstoreBucket], before: bool) -> None:
    stamp: Stamp | None = await make_bucket().swap("runs/a/latest", b"before", None) if before else None
    contents = [f"from {i}".encode() for i in range(4)]
    swaps = [make_bucket().swap("runs/a/latest", data, stamp) for data in contents]
    done = await asyncio.gather(*swaps, return_exceptions=True)
    won = [data for data, result in zip(contents, done, strict=True) if isinstance(result, Stamp)]
    assert len(won) == 1
    assert all(isinstance(result, (Stamp, ConflictError)) for result in done)
    assert await content(make_bucket(), "runs/a/latest") == won[0]


async def test_all_keys_below_a_path_are_listed_and_no_others(bucket: ObstoreBucket) -> None:
    keys = {f"objects/{i:064x}" for i in range(120)}
    for key in (*keys, "owner", "runs/a/latest", "runs/b/latest"):
        await bucket.create(key, b"x")
    assert {key async for key in bucket.keys("objects/")} == keys
    assert {key async for key in bucket.keys("runs/")} == {"runs/a/latest", "runs/b/latest"}
    assert [key async for key in bucket.keys("nothing/")] == []
