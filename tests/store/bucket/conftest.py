"""One bucket a test, of each kind: a directory, memory, and a server that speaks S3."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltad.store.bucket.obstore import ObstoreBucket
from tests.kit.buckets import S3Server

KINDS = ("disk", "memory", "s3")
_prefixes = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_bucket(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Callable[[], ObstoreBucket]:
    """Opens the same place each time; one in memory is the same object."""
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3")
        prefix = f"test-{next(_prefixes)}/deep"
        return lambda: server.bucket(prefix)
    if kind == "disk":
        return lambda: ObstoreBucket(f"file://{tmp_path}/bucket")
    memory = ObstoreBucket("memory:///")
    return lambda: memory


@pytest.fixture
def bucket(make_bucket: Callable[[], ObstoreBucket]) -> ObstoreBucket:
    return make_bucket()
