"""`deltad gc` asks the daemon, and shows what goes, what stays, and why."""

from __future__ import annotations

from deltad.client.messages import CollectRequest
from deltad.errors import StoreFullError
from tests.cli.host import Host
from tests.kit.versions import Lineage


async def test_a_dry_run_says_of_every_version_whether_it_stays_and_why(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("gc", "--dry-run")
    assert host.operations.collected == [CollectRequest(dry_run=True)]
    assert ended.code == 0
    assert "2 versions and 1 object would be removed (7 B" in ended.out
    assert "1 version and 3 objects stay" in ended.out
    rows = [line.split() for line in ended.out.splitlines() if line.strip().startswith("policy/")]
    assert [(row[0], "goes" in row) for row in rows] == [
        ("policy/v000001", True),
        ("policy/v000002", True),
        ("policy/v000003", False),
    ]
    assert all(row[-1] == "because" for row in rows)
    assert "led nowhere" in ended.out


async def test_without_dry_run_it_removes(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("gc", "--json")
    assert host.operations.collected == [CollectRequest(dry_run=False)]
    assert ended.reply["dropped_bytes"] == 7


async def test_a_refusal_has_its_exit_code(host: Host) -> None:
    host.operations.refusal = StoreFullError("/store", found="no space")
    (await host.deltad("gc")).assert_refused(75, "/store")
