"""Over every kind of bucket a run crosses verbatim, a large object in parts, and what nobody needs goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deltad.delta.encoding import sha256
from deltad.limits import DEFAULT_LIMITS
from deltad.relay.bucket_client import BucketClient
from deltad.store.bucket.index import OBJECTS, object_key
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.bucket.port import PART_BYTES
from deltad.store.bucket.sweep import Sweep
from deltad.store.bucket.twin import Twin
from deltad.store.store import Store
from deltad.types import Digest, RunId
from tests.kit.regions import RUN, Downstream
from tests.kit.versions import Lineage


async def at_once(run: RunId, size: int) -> None:
    """No cap."""


async def test_a_run_crosses_and_its_leftovers_go(make_bucket: Callable[[], ObstoreBucket], tmp_path: Path) -> None:
    lineage = Lineage(tensors=2, elements=64 << 10, limits=DEFAULT_LIMITS)
    bucket = make_bucket()
    store = Store.open(tmp_path / "a")
    now = 0.0
    twin = Twin(store, bucket, daemon="a", boot="1", pace=at_once)
    sweep = Sweep(twin, grace=10.0, clock=lambda: now)
    async with Downstream(
        tmp_path / "b",
        bucket.url,
        source=lambda count: BucketClient(make_bucket(), count=count, poll=0.05),
    ) as downstream:
        for _ in range(3):
            published = lineage.publish()
            published.commit_into(store)
            await twin.advance(RUN)
            await downstream.reaches(published.version)
            assert downstream.store.run(RUN).record_bytes(published.version) == published.data
    assert downstream.objects() == set(lineage.objects())
    large = bytes(range(256)) * (PART_BYTES // 256 + 1)
    await twin.bring(RUN, [store.put(large)])
    assert await twin.bring(RUN, [Digest(sha256(large))]) == 0, "it is there"
    assert (await sweep.run()).removed == 0
    now = 10.0
    assert (await sweep.run()).removed == 1
    left = {key async for key in bucket.keys(OBJECTS)}
    records = [sha256(published.data) for published in lineage.versions]
    assert left == set(map(object_key, [*lineage.objects(), *records]))
    store.close()
