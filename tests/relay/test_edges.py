"""Edges between daemons: what one says of them, and what crosses the wire for a laggard, a newcomer, a third (P23)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import choose
from deltad.delta.manifest import EdgeKind
from deltad.errors import DeltadError, NotFoundError
from deltad.relay.client import RelayClient
from deltad.relay.hints import HINTED_EDGES, EdgeHint, EdgeHints, offer, read_hints
from deltad.relay.wire import PREFIX, SEAL, seal
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version
from tests.kit.checkpoints import read_checkpoint
from tests.kit.derived import Derived, altered, anchor, edge_of, skip_delta
from tests.kit.regions import RUN, TOKEN, Downstream, Upstream
from tests.kit.versions import Lineage, Published

BEHIND = 40


@pytest.fixture(scope="module")
def chain() -> list[Published]:
    """v1, an anchor, to v41, each with a delta from the one before."""
    lineage = Lineage(tensors=1, elements=4096, density=0.01)
    return [lineage.publish() for _ in range(BEHIND + 1)]


@pytest.fixture(scope="module")
def ladder(chain: list[Published]) -> list[Derived]:
    """v1 → v33 → v37, v33 → v41 and an anchor of v33."""
    return [skip_delta(chain[0:33]), skip_delta(chain[32:37]), skip_delta(chain[32:41]), anchor(chain[32])]


def told(hints: EdgeHints) -> list[tuple[str, str, str]]:
    return [(hint.kind.value, hint.base, hint.target) for hint in hints.edges]


# What is said.


def test_the_edges_of_the_cheapest_path_are_told_from_what_is_held_or_else_from_an_anchor(
    tmp_path: Path, chain: list[Published], ladder: list[Derived]
) -> None:
    store = filled(tmp_path, chain, ladder)
    run = store.run(RUN)
    assert told(offer(run, Version(1, 1))) == [("skip-delta", "1.1", "1.33"), ("skip-delta", "1.33", "1.41")]
    assert told(offer(run, Version(1, 39))) == [("delta", "1.39", "1.40"), ("delta", "1.40", "1.41")]
    assert told(offer(run, None))[-1] == ("skip-delta", "1.33", "1.41")
    assert told(offer(run, Version(1, 41))) == []
    assert told(offer(run, Version(7, 7))) == told(offer(run, None)), "a version that is not held here"
    first, second = offer(run, Version(1, 1)).edges
    assert (first.bytes, first.size) == (ladder[0].bytes, ladder[0].ref.size)
    assert second.manifest == ladder[2].ref.manifest.hex()
    store.close()


def filled(path: Path, chain: list[Published], edges: list[Derived]) -> Store:
    store = Store.open(path / "store")
    for published in chain:
        published.commit_into(store)
    for made in edges:
        made.add_to(store)
    return store


def test_an_edge_that_stays_on_its_host_is_told_to_nobody(tmp_path: Path, chain: list[Published]) -> None:
    store = filled(tmp_path, chain[:3], [])
    made = skip_delta(chain[:3]).add_to(store, local=True)
    assert made.ref.manifest.hex() not in {hint.manifest for hint in offer(store.run(RUN), Version(1, 1)).edges}
    store.close()


def test_of_a_long_path_the_first_edges_are_told(tmp_path: Path) -> None:
    lineage = Lineage(tensors=1, elements=64, density=0.1)
    store = filled(tmp_path, [lineage.publish() for _ in range(HINTED_EDGES + 6)], [])
    hints = told(offer(store.run(RUN), Version(1, 1)))
    assert hints == [("delta", f"1.{n}", f"1.{n + 1}") for n in range(1, HINTED_EDGES + 1)]
    store.close()


def test_a_run_without_versions_is_not_found(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    with pytest.raises(NotFoundError):
        offer(store.run(RUN), None)
    store.close()


def test_what_is_told_is_read_as_it_was_told(tmp_path: Path, chain: list[Published], ladder: list[Derived]) -> None:
    store = filled(tmp_path, chain, ladder)
    body = msgspec.json.encode(offer(store.run(RUN), Version(1, 1)))
    assert read_hints(msgspec.json.decode(body, type=EdgeHints)) == (ladder[0].hint, ladder[2].hint)
    store.close()


GOOD = EdgeHint("bf16", EdgeKind.SKIP_DELTA, "1.1", "1.5", "ab" * 32, 300, 900, (1,))


@pytest.mark.parametrize(
    "flaw",
    [
        {"variant": "../bf16"},
        {"kind": EdgeKind.ANCHOR},
        {"base": ""},
        {"base": "v1"},
        {"target": "0.5"},
        {"target": ""},
        {"manifest": "AB" * 32},
        {"manifest": "ab"},
        {"size": 0},
        {"size": -1},
        {"size": 1 << 40, "bytes": 1 << 41},
        {"bytes": 299},
        {"coders": (0,) * 65},
    ],
    ids=str,
)
def test_an_answer_with_a_malformed_edge_is_refused(flaw: dict[str, object]) -> None:
    assert read_hints(EdgeHints((GOOD,)))
    with pytest.raises(DeltadError):
        read_hints(EdgeHints((GOOD, msgspec.structs.replace(GOOD, **flaw))))


def test_an_answer_with_too_many_edges_is_refused() -> None:
    assert len(read_hints(EdgeHints((GOOD,) * HINTED_EDGES))) == HINTED_EDGES
    with pytest.raises(DeltadError, match="at most 64"):
        read_hints(EdgeHints((GOOD,) * (HINTED_EDGES + 1)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda v: (
            st.lists(v)
            | st.dictionaries(
                st.sampled_from(["edges", "variant", "kind", "base", "target", "manifest", "size", "bytes", "coders"]),
                v,
            )
        ),
    )
)
def test_no_body_is_read_as_something_else(value: object) -> None:
    try:
        hints = read_hints(msgspec.json.decode(msgspec.json.encode(value), type=EdgeHints))
    except (DeltadError, msgspec.DecodeError):
        return
    assert hints == ()


# What crosses.


def paths_bytes(downstream: Downstream, after: Version) -> int:
    """Bytes of manifests, pages and chunks that versions above `after` took."""
    stats = [stats for record, stats in downstream.committed if record.version > after]
    return sum(stat.manifest + stat.page + stat.chunk for stat in stats)


def held(downstream: Downstream) -> list[int]:
    return [record.version.number for record in downstream.store.run(RUN).records()]


async def check_weights(downstream: Downstream, published: Published, path: Path) -> None:
    """The weights of a version, rebuilt here, are those that were published."""
    run = downstream.store.run(RUN)
    mirror = Mirror(downstream.store, run, Variant("bf16"), choose())
    root = await asyncio.to_thread(mirror.export, run.record(published.version), path)
    assert root == published.record.variants[0].root
    assert read_checkpoint(path).equals(published.weights)


async def test_a_laggard_pulls_over_skip_deltas_and_is_bit_equal(
    tmp_path: Path, chain: list[Published], ladder: list[Derived]
) -> None:
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(chain[0])
        await downstream.reaches(chain[0].version)
        await downstream.stop()
        for published in chain[1:]:
            published.commit_into(upstream.store)
        for made in ladder:
            made.add_to(upstream.store)
        downstream.start()
        await downstream.reaches(chain[40].version)
        assert held(downstream) == [1, 33, 41]
        assert paths_bytes(downstream, Version(1, 1)) == ladder[0].bytes + ladder[2].bytes
        single = sum(edge_of(published).bytes for published in chain[1:])
        assert ladder[0].bytes + ladder[2].bytes < 0.7 * single
        await check_weights(downstream, chain[40], tmp_path / "export")
        catalogue = {made.manifest for made in downstream.store.run(RUN).derived()}
        assert catalogue == {ladder[0].ref.manifest, ladder[2].ref.manifest}


async def test_a_newcomer_takes_one_anchor_and_one_skip_delta(
    tmp_path: Path, chain: list[Published], ladder: list[Derived]
) -> None:
    async with Upstream(tmp_path / "a") as upstream:
        for published in chain:
            published.commit_into(upstream.store)
        small = skip_delta(chain[36:41])
        for made in [*ladder, small]:
            made.add_to(upstream.store)
        first = edge_of(chain[0], EdgeKind.ANCHOR)
        async with Downstream(tmp_path / "b", upstream.url) as downstream:
            await downstream.reaches(chain[40].version)
            path = upstream.store.run(RUN).path(chain[40].record, "bf16")
            assert held(downstream) == [hop.record.version.number for hop in path.hops]
            assert [hop.edge.kind for hop in path.hops] == [EdgeKind.ANCHOR, EdgeKind.SKIP_DELTA]
            known = {first.ref.manifest: first} | {made.ref.manifest: made for made in [*ladder, small]}
            expected = sum(known[hop.edge.manifest].bytes for hop in path.hops)
            assert paths_bytes(downstream, Version(1, 0)) == expected
            await check_weights(downstream, chain[40], tmp_path / "export")


async def test_a_third_daemon_takes_the_same_edges_from_the_second(
    tmp_path: Path, chain: list[Published], ladder: list[Derived]
) -> None:
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as second:
        upstream.publish(chain[0])
        await second.reaches(chain[0].version)
        async with Upstream(tmp_path, store=second.store) as middle:
            third = Downstream(tmp_path / "c", middle.url)
            third.start()
            await third.reaches(chain[0].version)
            await third.stop()
            for published in chain[1:]:
                published.commit_into(upstream.store)
            for made in ladder:
                made.add_to(upstream.store)
            upstream.announcements.announce()
            await second.reaches(chain[40].version)
            third.start()
            await third.reaches(chain[40].version)
            assert held(third) == held(second) == [1, 33, 41]
            assert paths_bytes(third, Version(1, 1)) == ladder[0].bytes + ladder[2].bytes
            await check_weights(third, chain[40], tmp_path / "export")
            await third.stop()
            third.store.close()


async def test_a_restart_on_the_way_goes_on_over_the_same_edges(
    tmp_path: Path, chain: list[Published], ladder: list[Derived]
) -> None:
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(chain[0])
        await downstream.reaches(chain[0].version)
        await downstream.stop()
        for published in chain[1:]:
            published.commit_into(upstream.store)
        for made in ladder:
            made.add_to(upstream.store)
        some = sorted(ladder[0].chunks)[::2]
        for digest in some:
            downstream.store.put_chunk(ladder[0].objects[digest])
        downstream.store.put(ladder[0].objects[Digest(ladder[0].ref.manifest)])
        downstream.start()
        await downstream.reaches(chain[40].version)
        here = sum(len(ladder[0].objects[digest]) for digest in [*some, Digest(ladder[0].ref.manifest)])
        assert held(downstream) == [1, 33, 41]
        assert paths_bytes(downstream, Version(1, 1)) == ladder[0].bytes + ladder[2].bytes - here


async def test_a_newcomer_to_which_no_edge_of_its_upstream_leads_goes_on_when_one_has_been_derived(
    tmp_path: Path, chain: list[Published]
) -> None:
    """It holds the version before as an anchor; the upstream reached the next one without the edge from there."""
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        chain[0].commit_into(upstream.store)
        other = skip_delta([chain[0], chain[1], chain[2]])
        for digest, data in other.objects.items():
            (upstream.store.put_chunk if digest in other.chunks else upstream.store.put)(data)
        upstream.store.run(RUN).commit(chain[2].data, [Digest(other.ref.manifest)])
        chain[1].put_into(downstream.store)
        whole = anchor(chain[1])
        for digest, data in whole.objects.items():
            (downstream.store.put_chunk if digest in whole.chunks else downstream.store.put)(data)
        downstream.store.run(RUN).commit(chain[1].data, [Digest(whole.ref.manifest)])
        with pytest.raises(DeltadError):
            await downstream.puller.pull_once(RUN, 0.5)
        anchor(chain[2]).add_to(upstream.store)  # nothing is announced
        await downstream.reaches(chain[2].version)
        assert held(downstream) == [2, 3]


Lie = Callable[[EdgeHints], EdgeHints | bytes]


def nonsense(hints: EdgeHints) -> bytes:
    return b'{"edges": [{"variant": 1}]}'


def endless(hints: EdgeHints) -> bytes:
    return b'{"edges": [' + b" " * (2 << 20)


def unknown_objects(hints: EdgeHints) -> EdgeHints:
    return EdgeHints(tuple(msgspec.structs.replace(hint, manifest="ab" * 32) for hint in hints.edges))


def unknown_versions(hints: EdgeHints) -> EdgeHints:
    hint = hints.edges[0]
    return EdgeHints((
        msgspec.structs.replace(hint, target="1.500"),
        msgspec.structs.replace(hint, target="1.8", base="1.5", manifest="ab" * 32),
        msgspec.structs.replace(hint, base="1.8", target="1.13", manifest="cd" * 32),
    ))  # fmt: skip


def other_versions(hints: EdgeHints) -> EdgeHints:
    return EdgeHints(tuple(msgspec.structs.replace(hint, base="1.2", target="1.13") for hint in hints.edges))


def other_sizes(hints: EdgeHints) -> EdgeHints:
    return EdgeHints(tuple(msgspec.structs.replace(hint, size=hint.size - 1) for hint in hints.edges))


def backwards(hints: EdgeHints) -> EdgeHints:
    return EdgeHints(tuple(msgspec.structs.replace(hint, base=hint.target, target=hint.base) for hint in hints.edges))


@pytest.mark.parametrize(
    "lie", [None, nonsense, endless, unknown_objects, unknown_versions, other_versions, other_sizes, backwards]
)
async def test_a_peer_that_does_not_know_the_question_or_lies_costs_time_and_nothing_else(
    tmp_path: Path, chain: list[Published], lie: Lie | None
) -> None:
    await lied_to(tmp_path, chain, lie, skip_delta(chain[:13]))


async def test_a_delta_that_no_record_names_is_left_and_another_way_taken(
    tmp_path: Path, chain: list[Published]
) -> None:
    forged = altered(skip_delta(chain[:13]), kind=EdgeKind.DELTA)

    def name_it(hints: EdgeHints) -> EdgeHints:
        (hint,) = hints.edges
        changes = {"kind": EdgeKind.DELTA, "manifest": forged.ref.manifest.hex(), "size": forged.ref.size}
        return EdgeHints((msgspec.structs.replace(hint, **changes),))

    await lied_to(tmp_path, chain, name_it, skip_delta(chain[:13]), forged)


async def lied_to(
    tmp_path: Path, chain: list[Published], lie: Lie | None, made: Derived, forged: Derived | None = None
) -> None:
    """The weights of v13 arrive, whatever the peer says of the edges from v1; it has the objects of what is forged."""

    @web.middleware
    async def answer(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not request.path.startswith(f"{PREFIX}/runs/policy/edges"):
            return await handler(request)
        if lie is None:
            raise web.HTTPNotFound
        told = lie(offer(upstream.store.run(RUN), Version(1, 1)))
        body = told if isinstance(told, bytes) else msgspec.json.encode(told)
        return web.Response(body=body, headers={SEAL: seal(body)})

    def wrap(app: web.Application) -> web.Application:
        app.middlewares.append(answer)
        return app

    upstream = Upstream(tmp_path / "a", wrap=wrap)
    async with upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(chain[0])
        await downstream.reaches(chain[0].version)
        await downstream.stop()
        for published in chain[1:13]:
            published.commit_into(upstream.store)
        made.add_to(upstream.store)
        if forged is not None:
            upstream.store.put(forged.objects[Digest(forged.ref.manifest)])
        downstream.start()
        await downstream.reaches(chain[12].version)
        await check_weights(downstream, chain[12], tmp_path / "export")


async def test_the_client_asks_from_what_is_held(tmp_path: Path, chain: list[Published]) -> None:
    async with Upstream(tmp_path / "a") as upstream:
        upstream.publish(*chain[:4])
        async with RelayClient(upstream.url, lambda: TOKEN, count=lambda n: None) as client:
            assert [hint.target for hint in await client.edges(RUN, after=Version(1, 2))] == [
                Version(1, 3),
                Version(1, 4),
            ]
            assert len(await client.edges(RUN, after=None)) == 4
            with pytest.raises(NotFoundError):
                await client.edges(RunId("absent"), after=None)
