"""A daemon that passed versions over: what the commands say of those that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.types import Digest
from tests.cli.host import Host
from tests.cli.models import bits_of, write
from tests.kit.derived import Derived, skip_delta
from tests.kit.versions import Lineage


@pytest.fixture
def gap(host: Host) -> tuple[Lineage, Derived]:
    """v1 and v5 are held, and a skip delta between them; nothing of v2 to v4, and no edge that a record names."""
    lineage = Lineage()
    for _ in range(5):
        lineage.publish()
    made = skip_delta(lineage.versions)
    first, last = lineage.versions[0], lineage.versions[-1]
    first.commit_into(host.store)
    for digest, data in made.objects.items():
        (host.store.put_chunk if digest in made.chunks else host.store.put)(data)
    host.store.put(last.layout.encode())
    host.store.run(last.run).commit(last.data, [Digest(made.ref.manifest)])
    host.describe(last.run, last.layout.weight_bytes)
    return lineage, made


async def test_log_says_from_which_version_a_gap_was_crossed(host: Host, gap: tuple[Lineage, Derived]) -> None:
    drawn = (await host.deltad("log")).out
    newest, oldest = [line for line in drawn.splitlines() if "delta  " in line or "anchor  " in line]
    assert "v000005" in newest
    assert "skip-delta" in newest
    assert "v000001" in oldest
    assert "reached from v000001" in drawn
    versions = (await host.deltad("log", "--json")).reply["versions"]
    assert [(v["version"], v["base"], v["sequence"]) for v in versions] == [
        ("v000005", "v000001", 5),
        ("v000001", "", 1),
    ]


async def test_inspect_shows_derived_edges_beside_those_of_the_record(host: Host, gap: tuple[Lineage, Derived]) -> None:
    _, made = gap
    named, derived = (await host.deltad("inspect", "v5", "--json")).reply["variants"][0]["edges"]
    assert (named["derived"], named["kind"], named["manifest"]) == (False, "delta", None)
    assert (derived["derived"], derived["kind"]) == (True, "skip-delta")
    assert derived["digest"] == made.ref.manifest.hex()
    assert len(derived["chunks"]) == sum(page.chunks for page in made.manifest.pages)
    out = (await host.deltad("inspect", "v5")).out
    assert f"derived edge: skip-delta on v000001, manifest {made.ref.manifest.hex()}" in out


async def test_verify_of_a_directory_compares_with_the_manifest_of_a_derived_edge(
    host: Host, gap: tuple[Lineage, Derived], tmp_path: Path
) -> None:
    lineage, _ = gap
    last = lineage.versions[-1]
    right = write(tmp_path / "right", bits_of(last))
    assert "is policy/v000005" in (await host.deltad("verify", right, "--version", "5")).out
    wrong = write(tmp_path / "wrong", bits_of(lineage.versions[-2]))
    (await host.deltad("verify", wrong, "--version", "5")).assert_refused(65, "layer.000")
