"""A run through a bucket: a twin on one side, a puller on the other, and nothing else between them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from deltad.delta.encoding import sha256
from deltad.delta.keys import SigningKey
from deltad.errors import ConflictError, DeltadError, FormatError, UnavailableError
from deltad.limits import DEFAULT_LIMITS
from deltad.protocol.pull_plan import Kind, check_arrival, want
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.relay.bucket_client import BucketClient
from deltad.relay.wire import Hello
from deltad.store.bucket.index import OBJECTS, OWNER, Index, object_key, parse_index, pointer_key
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.bucket.port import Bucket
from deltad.store.bucket.sweep import Sweep
from deltad.store.bucket.twin import Twin
from deltad.store.store import Store
from deltad.types import RunId, Version
from tests.kit.buckets import BreakingBucket, S3Server
from tests.kit.chaos import ChaosProxy, Fault, Mishap
from tests.kit.regions import QUICK, RUN, Downstream
from tests.kit.versions import Lineage, Published, Skip

MOST = 1 << 20
STEP = 31 if os.environ.get("DELTAD_TEST_FULL") else 251
"""Between the offsets at which something happens to a reply."""


async def at_once(run: RunId, size: int) -> None:
    """No cap."""


def twin_of(store: Store, bucket: Bucket, *, daemon: str = "origin", boot: str = "boot-1") -> Twin:
    return Twin(store, bucket, daemon=daemon, boot=boot, pace=at_once)


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(tmp_path / "origin")
    yield store
    store.close()


@pytest.fixture
def memory() -> ObstoreBucket:
    return ObstoreBucket("memory:///")


@asynccontextmanager
async def reader(path: Path, bucket: Bucket, trust: TrustList | None = None) -> AsyncIterator[Downstream]:
    """A region that knows nothing but the bucket."""
    pull = replace(QUICK.pull, trust=trust or TrustList())
    async with Downstream(
        path,
        bucket.url,
        policy=replace(QUICK, pull=pull),
        source=lambda count: BucketClient(bucket, count=count, poll=0.02),
    ) as downstream:
        yield downstream


def assert_whole(downstream: Downstream, *versions: Published) -> None:
    for published in versions:
        assert downstream.store.run(published.run).record_bytes(published.version) == published.data
        for digest, data in published.objects.items():
            assert downstream.store.read(digest) == data


async def outcome_of(asked: Awaitable[object]) -> object:
    """The answer, or the error that came instead."""
    try:
        found = await asked
    except DeltadError as error:
        return error
    return (found.daemon, found.boot) if isinstance(found, Hello) else found


async def pointer(bucket: Bucket) -> Index | None:
    try:
        found = await bucket.read(pointer_key(RUN), MOST)
    except DeltadError:
        return None
    assert found is not None
    return parse_index(found[0], RUN)


def add_skip(store: Store, lineage: Lineage, base: Published, target: Published) -> Skip:
    skip = lineage.skip(base, target)
    skip.put_into(store)
    store.run(RUN).add_edge(skip.manifest)
    return skip


async def test_versions_cross_verbatim_and_each_costs_what_is_new(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    log = BreakingBucket(memory)
    twin = twin_of(origin, log)
    async with reader(tmp_path / "b", memory) as downstream:
        first.commit_into(origin)
        advanced = await twin.advance(RUN)
        assert advanced is not None
        assert (advanced.newest, advanced.bytes) == (first.version, first.bytes)
        await downstream.reaches(first.version)
        assert await twin.advance(RUN) is None, "nothing is new"
        log.log.clear()
        second.commit_into(origin)
        await twin.advance(RUN)
        await downstream.reaches(second.version)
        assert_whole(downstream, first, second)
    new = {sha256(second.data), *(second.objects.keys() - first.objects.keys())}
    assert {key for _, key in log.log} == {*map(object_key, new), pointer_key(RUN)}
    assert log.log[-1] == ("swap", pointer_key(RUN)), "the pointer is the last that is written"


async def test_a_newcomer_starts_at_the_newest_anchor_and_one_that_was_away_takes_a_skip_delta(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    lineage = Lineage()
    versions = [lineage.publish() for _ in range(6)]
    twin = twin_of(origin, memory)
    versions[0].commit_into(origin)
    await twin.advance(RUN)
    async with reader(tmp_path / "b", memory) as downstream:
        await downstream.reaches(versions[0].version)
        await downstream.stop()
        for version in versions[1:]:
            version.commit_into(origin)
        add_skip(origin, lineage, versions[0], versions[5])
        anchor = add_skip(origin, lineage, versions[5], versions[5])
        await twin.advance(RUN)
        downstream.start()
        await downstream.reaches(versions[5].version)
        assert [record.version.number for record in downstream.store.run(RUN).records()] == [1, 6]
    async with reader(tmp_path / "c", memory) as newcomer:
        await newcomer.reaches(versions[5].version)
        assert [record.version.number for record in newcomer.store.run(RUN).records()] == [6]
        assert anchor.objects.keys() <= newcomer.objects()


async def test_versions_that_the_link_has_no_time_for_are_passed_over_and_counted(
    origin: Store, memory: ObstoreBucket
) -> None:
    lineage = Lineage()
    versions = [lineage.publish() for _ in range(7)]
    twin = twin_of(origin, memory)
    versions[0].commit_into(origin)
    await twin.advance(RUN)
    for version in versions[1:]:  # while the first one was on its way
        version.commit_into(origin)
    add_skip(origin, lineage, versions[0], versions[6])
    advanced = await twin.advance(RUN)
    assert advanced is not None
    assert (advanced.newest, advanced.skipped) == (versions[6].version, 5)
    index = await pointer(memory)
    assert index is not None
    assert index.skipped == 5


@pytest.mark.parametrize("lost_reply", [False, True])
async def test_killed_at_any_write_only_whole_versions_are_seen_and_the_next_life_goes_on(
    origin: Store, tmp_path: Path, lost_reply: bool
) -> None:
    lineage = Lineage(tensors=2, elements=1024)
    first, second = lineage.publish(), lineage.publish()
    first.commit_into(origin)
    writes = 0
    while True:
        memory = ObstoreBucket("memory:///")
        breaking = BreakingBucket(memory, writes=writes, lost_reply=lost_reply)
        life = twin_of(origin, breaking)
        killed = False
        try:
            await life.advance(RUN)
        except UnavailableError:
            killed = True
        index = await pointer(memory)
        if index is not None:
            assert [entry.version for entry in index.entries] == [first.version]
            for digest in (sha256(first.data), *first.objects):
                assert (await memory.head(object_key(digest))).size
        again = BreakingBucket(memory)
        await twin_of(origin, again, boot="boot-2").advance(RUN)
        assert await pointer(memory) is not None
        made = [key for verb, key in life.bucket.log if verb == "create"]
        assert not killed or len([key for verb, key in again.log if verb == "create"]) <= len(first.objects) + 1
        if not killed:
            break
        assert len(made) <= writes + 1
        writes += 1
    assert writes > len(first.objects)
    second.commit_into(origin)
    twin = twin_of(origin, memory, boot="boot-3")
    await twin.advance(RUN)
    async with reader(tmp_path / "b", memory) as downstream:
        await downstream.reaches(second.version)
        assert_whole(downstream, first, second)


async def test_a_prefix_has_one_daemon_and_of_two_lives_of_it_the_later(origin: Store, memory: ObstoreBucket) -> None:
    Lineage().publish().commit_into(origin)
    twin = twin_of(origin, memory)
    await twin.advance(RUN)
    with pytest.raises(ConflictError, match="found one of origin; give each daemon a prefix of its own"):
        await twin_of(origin, memory, daemon="other").advance(RUN)
    await twin_of(origin, memory, boot="boot-2").advance(RUN)
    with pytest.raises(ConflictError, match="a second daemon of that name runs"):
        await Sweep(twin, grace=0.0, clock=lambda: 0.0).run()


async def test_a_pointer_never_goes_back(origin: Store, memory: ObstoreBucket, tmp_path: Path) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    first.commit_into(origin)
    second.commit_into(origin)
    await twin_of(origin, memory).advance(RUN)
    before = await pointer(memory)
    older = Store.open(tmp_path / "older")
    first.commit_into(older)
    with pytest.raises(ConflictError, match="the bucket is ahead of this store"):
        await twin_of(older, memory, boot="boot-2").advance(RUN)
    older.close()
    assert await pointer(memory) == before


async def test_of_two_who_write_at_once_the_slower_one_changes_nothing(origin: Store, memory: ObstoreBucket) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    first.commit_into(origin)
    zombie, heir = twin_of(origin, memory), twin_of(origin, memory, boot="boot-2")
    await zombie.advance(RUN)
    await heir.index(RUN)
    second.commit_into(origin)
    await heir.advance(RUN)
    written = await pointer(memory)
    with pytest.raises(ConflictError, match="somebody else writes"):
        await zombie.advance(RUN)
    assert await pointer(memory) == written
    assert await zombie.advance(RUN) is None, "it has read it anew, and nothing is new"


async def test_a_bucket_that_was_away_while_its_newest_version_was_let_go_goes_on_from_an_anchor(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    lineage = Lineage()
    versions = [lineage.publish(anchor=i == 3) for i in range(5)]
    versions[0].commit_into(origin)
    twin = twin_of(origin, memory)
    await twin.advance(RUN)
    for version in versions[1:]:
        version.commit_into(origin)
    origin.run(RUN).sift(lambda candidates: [c.record.version for c in candidates][:3])
    await twin.advance(RUN)
    index = await pointer(memory)
    assert index is not None
    assert [entry.version.number for entry in index.entries] == [4, 5]
    async with reader(tmp_path / "b", memory) as newcomer:
        await newcomer.reaches(versions[4].version)


async def test_a_twin_leases_the_newest_version_that_it_has_and_so_holds_up_no_retention(
    origin: Store, memory: ObstoreBucket
) -> None:
    lineage = Lineage(tensors=1, elements=512)
    twin = twin_of(origin, memory)
    for _ in range(3):
        published = lineage.publish()
        published.commit_into(origin)
        await twin.advance(RUN)
    await twin.advance(RUN)
    assert list(origin.leases.of(RUN)) == [published.version]


async def test_a_pointer_that_grows_too_large_lets_the_oldest_versions_go_first(tmp_path: Path) -> None:
    lineage = Lineage(tensors=1, elements=512)
    versions = [lineage.publish(anchor=i == 19) for i in range(20)]
    store = Store.open(tmp_path / "small", limits=replace(DEFAULT_LIMITS, json_body_bytes=2000))
    memory = ObstoreBucket("memory:///")
    twin = twin_of(store, memory)
    for version in versions:
        version.commit_into(store)
        if version is not versions[-1] and version.version.number < 5:
            await twin.advance(RUN)
    await twin.advance(RUN)
    index = await pointer(memory)
    assert index is not None
    assert index.newest == versions[-1].version
    assert len(index.encode()) <= 2000
    store.close()


async def objects_in(bucket: Bucket) -> set[str]:
    return {key async for key in bucket.keys(OBJECTS)}


async def test_what_no_version_needs_goes_after_the_grace_and_comes_back_if_somebody_removed_too_much(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    lineage = Lineage()
    versions = [lineage.publish() for _ in range(4)]
    now = 0.0
    twin = twin_of(origin, memory)
    sweep = Sweep(twin, grace=100.0, clock=lambda: now)
    for version in versions:
        version.commit_into(origin)
    await twin.advance(RUN)
    old = await objects_in(memory)
    anchor = add_skip(origin, lineage, versions[3], versions[3])
    origin.run(RUN).sift(lambda candidates: [c.record.version for c in candidates][:3])
    await twin.advance(RUN)
    await memory.create(object_key(bytes(32)), b"left by a killed upload")
    assert (await sweep.run()).removed == 0
    now = 99.0
    assert (await sweep.run()).removed == 0, "a reader of the pointer before may still want it"
    assert old <= await objects_in(memory)
    now = 100.0
    assert (await sweep.run()).removed > 0
    layout = versions[3].layout
    needed = {sha256(versions[3].data), layout.digest, *(file.digest for file in layout.files), *anchor.objects}
    assert await objects_in(memory) == set(map(object_key, needed))
    await memory.remove(object_key(anchor.manifest))
    assert (await sweep.run()).restored == 1
    async with reader(tmp_path / "b", memory) as newcomer:
        await newcomer.reaches(versions[3].version)


async def test_what_is_needed_again_within_the_grace_stays(origin: Store, memory: ObstoreBucket) -> None:
    now = 0.0
    first = Lineage().publish()
    first.commit_into(origin)
    twin = twin_of(origin, memory)
    await twin.bring(RUN, first.objects)
    sweep = Sweep(twin, grace=100.0, clock=lambda: now)
    await sweep.run()
    now = 99.0
    await twin.advance(RUN)
    await sweep.run()
    now = 500.0
    assert (await sweep.run()).removed == 0
    assert await objects_in(memory) == set(map(object_key, [sha256(first.data), *first.objects]))


async def test_nothing_is_removed_while_a_pointer_cannot_be_read(origin: Store, memory: ObstoreBucket) -> None:
    Lineage().publish().commit_into(origin)
    twin = twin_of(origin, memory)
    await twin.advance(RUN)
    before = await objects_in(memory)
    written = await pointer(memory)
    assert written is not None
    (entry,) = written.entries
    edges = tuple(replace_fields(edge, variant="fp8") for edge in entry.edges)
    odd = replace_fields(written, run="foreign", entries=(replace_fields(entry, edges=edges),))
    for content in (b"{}", odd.encode()):
        await memory.put(pointer_key(RunId("foreign")), content)
        with pytest.raises(FormatError):
            await Sweep(twin, grace=0.0, clock=lambda: 0.0).run()
        assert await objects_in(memory) == before


async def test_a_run_that_the_store_no_longer_has_stays_whole_in_the_bucket(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    first = Lineage().publish()
    first.commit_into(origin)
    await twin_of(origin, memory).advance(RUN)
    before = await objects_in(memory)
    empty = Store.open(tmp_path / "empty")
    sweep = Sweep(twin_of(empty, memory, boot="boot-2"), grace=0.0, clock=lambda: 0.0)
    assert (await sweep.run()).removed == 0
    empty.close()
    assert await objects_in(memory) == before


@pytest.mark.parametrize("seed", range(4))
async def test_a_bucket_that_lies_anywhere_changes_nothing_here(
    origin: Store, memory: ObstoreBucket, tmp_path: Path, seed: int
) -> None:
    lineage = Lineage(tensors=2, elements=1024)
    versions = [lineage.publish() for _ in range(2)]
    twin = twin_of(origin, memory)
    for version in versions:
        version.commit_into(origin)
    await twin.advance(RUN)
    rng = random.Random(seed)
    lies = 0

    def lie(key: str, data: bytes) -> bytes:
        nonlocal lies
        if rng.random() < 0.7 and lies < 200 and data:
            lies += 1
            at = rng.randrange(len(data))
            turned = bytes([data[at] ^ (1 << rng.randrange(8))])
            return rng.choice([data[:at] + turned + data[at + 1 :], data[:at], data + b"x"])
        return data

    lying = BreakingBucket(memory, lie=lie)
    async with reader(tmp_path / "b", lying) as downstream:
        await downstream.reaches(versions[1].version)
        assert_whole(downstream, versions[1])
        known = {*lineage.objects()}
        assert downstream.objects() <= known, "nothing else was stored"
    assert lies > 3


async def test_where_signatures_are_demanded_an_unsigned_version_in_a_bucket_is_refused(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    Lineage().publish().commit_into(origin)
    await twin_of(origin, memory).advance(RUN)
    trust = TrustList([TrustedKey(SigningKey.new().public, frozenset([Scope.PUBLISH]))])
    async with reader(tmp_path / "b", memory, trust) as downstream:
        with pytest.raises(DeltadError, match="expected a signature"):
            await downstream.puller.pull_once(RUN, 1.0)
        assert downstream.store.run(RUN).latest() is None


async def test_statements_about_the_target_come_through_too(
    origin: Store, memory: ObstoreBucket, tmp_path: Path
) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    first.commit_into(origin)
    second.commit_into(origin)
    twin = twin_of(origin, memory)
    await twin.advance(RUN)

    def hold(version: Version) -> None:
        origin.run(RUN).move_target(
            lambda now: now.say(version, "", by="an operator", why="a bad step", when=0.0, daemon="origin")
        )

    async with reader(tmp_path / "b", memory) as downstream:
        await downstream.reaches(second.version)
        await asyncio.to_thread(hold, first.version)
        await twin.advance(RUN)
        heard: Callable[[], bool | None] = lambda: bool(downstream.store.run(RUN).targets().heard) or None  # noqa: E731
        assert await downstream.announcements.wait_until(heard, 30)
        assert downstream.store.run(RUN).targets().heard == origin.run(RUN).targets().heard


async def test_a_bucket_that_nobody_has_written_to_is_empty_and_well(memory: ObstoreBucket, tmp_path: Path) -> None:
    async with reader(tmp_path / "b", memory) as downstream:
        assert await downstream.puller.pull_once(RUN, 10)
        assert downstream.puller.view().up
        assert downstream.puller.view().activity == "no version yet"
    assert await memory.create(OWNER, b"still free")


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.DROP, Fault.DOUBLE, Fault.SWAP, Fault.INSERT, Fault.CUT])
async def test_whatever_happens_to_a_reply_of_a_bucket_the_answer_is_the_true_one_or_an_error_that_names_it(
    origin: Store, fault: Fault
) -> None:
    first = Lineage(tensors=1, elements=128).publish()
    first.commit_into(origin)
    digest, data = max(first.objects.items(), key=lambda item: len(item[1]))
    wanted = want(Kind.CHUNK, digest, len(data))
    rng = random.Random(fault)
    with S3Server() as server:
        bucket = server.bucket("p")
        await twin_of(origin, bucket).advance(RUN)

        async def fetch(client: BucketClient, had: int) -> bytes:
            buffer = bytearray(data[:had])
            await client.fetch(wanted, buffer, count=lambda count: None)
            return check_arrival(wanted, bytes(buffer), client.url).data

        questions: dict[str, tuple[Callable[[BucketClient], Awaitable[object]], tuple[object, ...]]] = {
            "hello": (lambda c: c.hello(), (("origin", "boot-1"),)),
            "latest": (lambda c: c.latest(RUN, after=None, wait=0.0), (first.data,)),
            "object": (lambda c: fetch(c, 0), (data,)),
            "rest of an object": (lambda c: fetch(c, len(data) // 2), (data,)),
        }
        async with ChaosProxy(int(server.endpoint.rpartition(":")[2])) as proxy:
            settings = server.settings() | {"AWS_ENDPOINT_URL": proxy.url}
            for name, (ask, right) in questions.items():
                length, caught = 0, 0
                for at in [None, *range(0, 100_000, STEP)]:
                    if at is not None and at >= length:
                        break
                    await proxy.cut_all()
                    proxy.plan(*([] if at is None else [Mishap(at, fault, bytes([rng.randrange(1, 256)]))]))
                    # Whole replies may take as long as they like; of broken ones, some end by never ending.
                    stall = 30.0 if at is None else 0.1
                    fresh = ObstoreBucket(bucket.url, lambda: settings, stall_seconds=stall, connect_seconds=stall)
                    client = BucketClient(fresh, count=lambda count: None, poll=0.0)
                    outcome = await outcome_of(ask(client))
                    if at is not None and isinstance(outcome, DeltadError):
                        assert bucket.url in str(outcome)
                        caught += 1
                    else:
                        assert outcome in right, f"{name}, {fault} at {at}"
                    length = length or proxy.downstream
                assert caught, f"{name}: nothing happened in {length} bytes"
