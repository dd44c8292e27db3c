"""What `deltad status` says of a daemon, word by word."""

from __future__ import annotations

import msgspec

from deltad.cli.output import plain
from deltad.client.messages import (
    DamageView,
    RegionReport,
    RegionView,
    ReplicaState,
    RunReport,
    ScrubView,
    Seconds,
    StatusView,
    Target,
    UpstreamView,
)
from deltad.ops.overview import status_blocks, without_clocks
from tests.cli.views import region, replica, status, version

V1 = version("v000001", kind="anchor", reason="first version", density=1.0, changed=1000, delta_bytes=200 << 20)
V2 = version("v000002", parent="v000001")


def line_with(text: str, word: str) -> str:
    (line,) = (line for line in text.splitlines() if word in line)
    return line


def shown(view: StatusView) -> str:
    return plain(status_blocks(view))


def test_an_empty_daemon_says_what_it_lacks() -> None:
    text = shown(status())
    assert "border-a, deltad 0.1.0, up 1 h 2 min" in text
    assert "versions: none yet" in text
    assert "replicas: none registered" in text
    assert "upstreams: none" in text


def test_a_daemon_that_is_not_ready_says_why() -> None:
    text = shown(status(ready=False, reasons=("disk reserve reached", "watch of policy is silent")))
    assert line_with(text, "ready").endswith("no: disk reserve reached; watch of policy is silent")


def test_the_backend_comes_with_the_reason_why_it_is_that_one() -> None:
    text = shown(status(backend="numba", backend_reason="no GPU (cupy is not installed)"))
    assert line_with(text, "backend").endswith("numba: no GPU (cupy is not installed)")


def test_versions_stand_newest_first_with_their_cost() -> None:
    text = shown(status(V1, V2))
    newest = line_with(text, "v000002 (latest)")
    assert "delta" in newest
    assert "0.31 %" in newest
    assert "1.00 MiB" in newest
    assert "0.39 %" in newest
    assert "settle 1.02 s, encode 2.31 s" in newest
    assert text.index("v000002 (latest)") < text.index("v000001")


def test_a_version_is_shown_with_its_coder_and_the_reason_for_it() -> None:
    text = shown(status(version("v000003", coder="dense", coder_reason="border-b pulls at 2.5 MB/s")))
    assert "  dense  border-b pulls at 2.5 MB/s  " in line_with(text, "v000003 (latest)")


def test_what_a_region_pulls_at_is_shown_and_is_no_change_by_itself() -> None:
    slow, fast = (
        msgspec.structs.replace(seen, report=msgspec.structs.replace(seen.report, pull_rate=rate))
        for seen, rate in ((region("border-b"), 2.5e6), (region("border-b"), 9e6))
    )
    assert "2.38 MiB/s" in line_with(shown(status(V1, regions=(slow,))), "ago")
    assert without_clocks(status(V1, regions=(slow,))) == without_clocks(status(V1, regions=(fast,)))


def test_a_replica_with_the_published_root_matches_and_shows_its_pause() -> None:
    good = replica("r1", ReplicaState.VERIFIED, V2, seconds=Seconds(pause=0.083))
    text = shown(status(V1, V2, regions=(region("border-b", good, latest="v000002"),)))
    assert line_with(text, "r1").split() == [
        "border-b",
        "r1",
        "policy",
        "verified",
        "v000002",
        "match",
        "0",
        "83",
        "ms",
    ]
    assert "1 of 1" in line_with(text, "ago")


def test_a_replica_with_another_root_is_called_wrong_and_its_error_is_shown() -> None:
    bad = replica("r1", ReplicaState.UNKNOWN, V2, root="ee" * 32, error="served weights differ", staleness=1)
    text = shown(status(V1, V2, regions=(region("border-b", bad),)))
    line = line_with(text, "r1")
    assert "eeeeeeeeeeee… WRONG" in line
    assert line.endswith("served weights differ")
    assert "0 of 1" in line_with(text, "ago")


def test_a_replica_that_is_verified_at_an_older_version_does_not_count_at_the_newest() -> None:
    behind = replica("r1", ReplicaState.VERIFIED, V1, staleness=1)
    text = shown(status(V1, V2, regions=(region("border-b", behind, latest="v000002"),)))
    assert "match" in line_with(text, "r1")
    assert "0 of 1" in line_with(text, "ago")


def test_a_replica_that_read_nothing_back_does_not_count() -> None:
    silent = replica("r1", ReplicaState.COMMITTED, V2, root="")
    text = shown(status(V2, regions=(region("border-b", silent),)))
    assert "not read back" in line_with(text, "r1")
    assert "0 of 1" in line_with(text, "ago")


def test_a_root_of_a_version_that_is_not_known_here_is_not_called_a_match() -> None:
    ahead = replica("r1", ReplicaState.VERIFIED, version("v000009"))
    line = line_with(shown(status(V2, regions=(region("border-b", ahead),))), "r1")
    assert "unknown here" in line
    assert "match" not in line


def test_an_upstream_that_waits_says_why_in_words() -> None:
    down = UpstreamView("http://a:7700", False, "waits 4 s before it tries again", 0.0, 3 << 20, 0.0, "refused")
    line = line_with(shown(status(upstreams=(down,))), "http://a:7700")
    assert "down" in line
    assert "waits 4 s before it tries again" in line
    assert "3.00 MiB" in line
    assert line.endswith("refused")


def test_views_that_differ_in_clocks_alone_tell_the_same() -> None:
    up = UpstreamView("http://a:7700", True, "idle", 0.08, 10, 5.0)
    before = status(V1, upstreams=(up,), regions=(region("border-b", age=1.0),))
    later = msgspec.structs.replace(
        before,
        uptime=9999.0,
        free_bytes=1,
        regions=(region("border-b", age=8.0),),
        upstreams=(msgspec.structs.replace(up, rtt=0.09, bytes_received=11),),
    )
    assert without_clocks(before) == without_clocks(later)
    assert without_clocks(before) != without_clocks(status(V1, V2, upstreams=(up,), regions=(region("border-b"),)))
    assert without_clocks(before) != without_clocks(
        msgspec.structs.replace(before, regions=(region("border-b", age=99.0, fresh=False),))
    )


def test_a_scrub_says_how_far_it_has_come_and_a_sound_store_has_no_table_of_damage() -> None:
    text = shown(status(scrub=ScrubView(activity="reads", read_bytes=1 << 20)))
    assert line_with(text, "scrub").endswith("reads; no pass has ended yet; 1.00 MiB read")
    assert "damage" not in text
    later = ScrubView(covered=1_700_000_000.0, activity="reads", read_bytes=1 << 30)
    assert "what was stored by 2023-11-1" in line_with(shown(status(scrub=later)), "scrub")


def test_damage_is_told_with_its_place_its_bytes_and_what_follows_from_it() -> None:
    lost = DamageView("chunk of the delta to policy/v000003 (lm_head.weight)", "/packs/p1.pack from byte 64", False)
    healed = DamageView("mirror of policy/bf16", "v000002", True, "norm.weight: element [7] was 0x3f81, not 0x3f80")
    scrub = ScrubView(damaged=1, damage=(lost, healed), consequences="no newcomer can be given policy/v000003")
    text = shown(status(scrub=scrub))
    assert line_with(text, "1 damaged").endswith("0 B read; 1 damaged; no newcomer can be given policy/v000003")
    assert "damaged" in line_with(text, "lm_head.weight")
    assert "/packs/p1.pack from byte 64" in line_with(text, "lm_head.weight")
    assert "healed" in line_with(text, "element [7] was 0x3f81, not 0x3f80")


def test_a_scrub_that_goes_on_is_no_change_by_itself() -> None:
    one = status(scrub=ScrubView(read_bytes=1, covered=1.0, activity="reads"))
    other = status(scrub=ScrubView(read_bytes=9, covered=2.0, activity="gives way to other work"))
    assert without_clocks(one) == without_clocks(other)
    assert without_clocks(one) != without_clocks(status(scrub=ScrubView(damaged=1)))


def test_a_fleet_that_is_held_says_where_by_whom_since_when_why_and_what_is_newest() -> None:
    assert "targets" not in shown(status(V1, V2))
    target = Target("v000001", "", "root (uid 0)", "reward fell", 1_700_000_000.0, "border-a", 1)
    runs = {"policy": RunReport("v000002", replicas=(replica("r1", ReplicaState.VERIFIED, V1),), target=target)}
    held = RegionView(RegionReport("border-b", "boot-2", 1, runs), 0.0, True)
    text = shown(status(V1, V2, regions=(held,)))
    line = line_with(text, "held at")
    assert line.split()[:2] == ["border-b", "policy"]
    assert "held at v000001 by root (uid 0) at border-a since 2023-11-14" in line
    assert line.endswith(": reward fell; latest is v000002")
    assert "1 of 1" in line_with(text, "border-b  policy  v000002"), "it is where it should be"
    lacking = msgspec.structs.replace(target, here=False)
    runs = {"policy": msgspec.structs.replace(runs["policy"], target=lacking)}
    text = shown(status(V1, V2, regions=(RegionView(RegionReport("border-b", "boot-2", 1, runs), 0.0, True),)))
    assert "target v000001 is not held here, so each replica stays where it is" in text


def test_moving_a_target_is_a_change_that_is_shown() -> None:
    before = status(V1, V2)
    held = Target("v000001", "", "root", "", 1.0, "a", 1)
    runs = {"policy": msgspec.structs.replace(before.region.runs["policy"], target=held)}
    after = msgspec.structs.replace(before, region=msgspec.structs.replace(before.region, runs=runs))
    assert without_clocks(before) != without_clocks(after)
