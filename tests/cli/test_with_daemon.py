"""The commands that ask a daemon, against a real local API on a real socket."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from deltad.cli.publish import pull_all
from deltad.client.messages import RunVersion, VersionInfo
from deltad.errors import CheckpointError, ConflictError, DeltadError, PeerError, StoreFullError, UnavailableError
from deltad.types import Digest, RunId
from tests.cli.host import Host
from tests.cli.models import bits_of, write
from tests.cli.terminal import start
from tests.cli.views import version
from tests.kit.rot import lose
from tests.kit.versions import Lineage

POLICY = RunId("policy")


# Which run and which version.


async def test_a_run_may_be_left_out_where_there_is_only_one(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("log")
    assert ended.code == 0
    assert ended.out.startswith("run policy:")


async def test_of_several_runs_one_must_be_named(host: Host, lineage: Lineage) -> None:
    host.operations.add(1, run=RunId("other"))
    (await host.deltad("log")).assert_refused(64, "daemon a", "found other, policy", "say which one")
    assert (await host.deltad("log", "other")).code == 0


async def test_a_daemon_without_a_run_says_so(host: Host) -> None:
    (await host.deltad("log")).assert_refused(66, "daemon a", "expected a run, found none yet")


async def test_an_unknown_run_or_version_is_66(host: Host, lineage: Lineage) -> None:
    (await host.deltad("log", "nobody")).assert_refused(66, "run nobody")
    (await host.deltad("inspect", "policy/v000009")).assert_refused(66, "policy/v000009")
    (await host.deltad("export", "v9", "out")).assert_refused(66, "policy/v000009")


async def test_latest_is_the_newest_version(host: Host, lineage: Lineage) -> None:
    for name in ("latest", "policy/latest"):
        assert (await host.deltad("inspect", name, "--json")).reply["version"] == "policy/v000003"
    host.operations.held[RunId("empty")] = []
    (await host.deltad("inspect", "empty/latest")).assert_refused(66, "run empty", "none yet")


async def test_a_number_without_an_epoch_means_the_newest_epoch_that_has_it(host: Host, lineage: Lineage) -> None:
    held = host.operations.held[POLICY]
    held += [msgspec.structs.replace(held[1], version="v000002@e2"), msgspec.structs.replace(held[1], version="v5@e2")]
    for name, found in (("2", "v000002@e2"), ("v000002@e1", "v000002"), ("3", "v000003"), ("5", "v000005@e2")):
        ended = await host.deltad("export", name, "out", "--json")
        assert host.operations.exported[-1].version == found, (name, ended)


async def test_the_environment_points_at_a_daemon_as_an_option_does(
    host: Host, lineage: Lineage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path / "c", bits_of(lineage.versions[1]))
    monkeypatch.setenv("DELTAD_SOCKET", str(host.socket))
    assert "is policy/v000002" in (await asyncio.to_thread(host.command, "verify", directory)).out


async def test_verify_finds_a_directory_among_all_runs_of_a_daemon(
    host: Host, lineage: Lineage, tmp_path: Path
) -> None:
    directory = write(tmp_path / "c", bits_of(lineage.versions[1]))
    host.operations.held[RunId("another")] = []
    host.operations.held = dict(sorted(host.operations.held.items()))
    assert "is policy/v000002" in (await host.deltad("verify", directory)).out
    other = write(tmp_path / "d", {name: bits ^ 1 for name, bits in bits_of(lineage.versions[1]).items()})
    (await host.deltad("verify", other)).assert_refused(65, "runs another, policy", "--version")


# Publish and pull.


async def test_publish_sends_an_absolute_path_and_all_options(
    host: Host, lineage: Lineage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = await host.deltad("publish", "out/actor", "--number", 7, "--new-epoch", "--identity", "warm")
    assert ended.code == 0
    assert ended.out.startswith("policy/v000007 is published\n")
    (request,) = host.operations.published
    assert request.directory == f"{tmp_path}/out/actor"
    assert (request.number, request.new_epoch, request.identity) == (7, True, "warm")


async def test_publish_says_from_which_version_an_epoch_or_a_fork_begins(host: Host, lineage: Lineage) -> None:
    held = host.operations.held[POLICY]
    held.append(msgspec.structs.replace(held[1], version="v000002@e2"))
    for arguments, sent in (
        (("--resume-from", "2", "--epoch", 1), ("v000002@e2", None, 1)),
        (("--resume-from", "policy/v000003"), ("v000003", None, 0)),
        (("--fork-from", "policy/2"), ("", RunVersion("policy", "v000002@e2"), 0)),
    ):
        assert (await host.deltad("publish", "/out/step_3", "--run", "policy", *arguments)).code == 0
        request = host.operations.published[-1]
        assert (request.resume_from, request.fork_from, request.epoch) == sent
    publish = ("publish", "/out/step_3", "--run", "policy")
    (await host.deltad(*publish, "--resume-from", "other/2")).assert_refused(64, "--fork-from")
    (await host.deltad(*publish, "--fork-from", "2")).assert_refused(64, "a version with its run")
    (await host.deltad(*publish, "--resume-from", "9")).assert_refused(66, "policy/v000009")


async def test_publishing_the_same_again_says_that_nothing_changed(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("publish", "/out/step_3", "--json")
    assert ended.reply["already"] is True
    assert "nothing changed" in (await host.deltad("publish", "/out/step_3")).out


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("/out/step_3: tensor 'x'", expected="8 bytes", found="7"),
        ConflictError("/out/step_3", expected="root aa", found="root bb"),
        StoreFullError("/store", hint="free some space"),
        PeerError("daemon b"),
    ],
    ids=lambda error: error.kind,
)
async def test_a_refusal_of_the_daemon_keeps_its_words_and_its_exit_code(
    error: DeltadError, host: Host, lineage: Lineage
) -> None:
    host.operations.refusal = error
    (await host.deltad("publish", "/out/step_3", "--run", "policy")).assert_refused(error.exit_code, str(error))
    host.operations.refusal = error
    refusal = (await host.deltad("publish", "/out/step_3", "--run", "policy", "--json")).refusal
    assert refusal == {
        "error": error.kind,
        "message": str(error),
        "retryable": error.retryable,
        "exit_code": error.exit_code,
    }


async def test_a_fault_of_the_daemon_is_one_line_that_points_at_its_log(host: Host, lineage: Lineage) -> None:
    host.operations.refusal = ZeroDivisionError()
    (await host.deltad("publish", "/out/step_3", "--run", "policy")).assert_refused(70, "see the daemon's log")


async def test_pull_says_what_is_durable(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("pull", "--wait", "2s")
    assert ended.code == 0
    assert ended.out.startswith("policy/v000003 is durable here\n")
    assert (await host.deltad("pull", "--json")).reply["version"]["version"] == "v000003"


async def test_pull_of_a_run_that_nobody_has_is_69(host: Host) -> None:
    host.operations.held[POLICY] = []
    (await host.deltad("pull")).assert_refused(69, "run policy", "no version yet", "deltad status")


class SlowUpstream:
    """A client whose daemon needs `seconds` to pull, and for the first `away` of them cannot; owns the clock."""

    def __init__(self, seconds: float, *, away: float = 0.0) -> None:
        self.now = 0.0
        self.ready = seconds
        self.away = away
        self.waits: list[float] = []

    def pull(self, run: RunId, wait: float) -> VersionInfo:
        self.waits.append(wait)
        self.now = min(self.now + wait, max(self.ready, self.now))
        if self.now <= self.away:
            raise UnavailableError("http://a:7700", found="connection refused")
        return version("v000001")


def test_a_long_pull_is_asked_for_in_pieces_that_the_daemon_allows() -> None:
    slow = SlowUpstream(150.0)
    assert pull_all(slow, POLICY, 300.0, clock=lambda: slow.now).version == "v000001"  # type: ignore[arg-type]
    assert slow.waits == [60.0, 60.0, 60.0]
    assert slow.now == 150.0


def test_a_pull_that_takes_longer_than_allowed_says_how_far_it_came() -> None:
    slow = SlowUpstream(1000.0)
    with pytest.raises(UnavailableError, match=r"within 1 min 30 s, found v000001 so far"):
        pull_all(slow, POLICY, 90.0, clock=lambda: slow.now)  # type: ignore[arg-type]
    assert slow.waits == [60.0, 30.0]


def test_an_upstream_that_comes_back_in_time_is_pulled_from() -> None:
    slow = SlowUpstream(150.0, away=100.0)
    assert pull_all(slow, POLICY, 300.0, clock=lambda: slow.now).version == "v000001"  # type: ignore[arg-type]
    assert slow.waits == [60.0, 60.0, 60.0]


def test_an_upstream_that_stays_away_is_named() -> None:
    slow = SlowUpstream(1000.0, away=1000.0)
    with pytest.raises(UnavailableError, match=r"http://a:7700: connection refused"):
        pull_all(slow, POLICY, 90.0, clock=lambda: slow.now)  # type: ignore[arg-type]
    assert slow.waits == [60.0, 30.0]


# Log and status.


async def test_log_draws_versions_newest_first_and_lists_them_as_json(host: Host, lineage: Lineage) -> None:
    lines = (await host.deltad("log")).out.splitlines()
    assert [line.split()[1] for line in lines if line[0] in "*●"] == ["v000003", "v000002", "v000001"]
    reply = (await host.deltad("log", "--json", "-n", 2)).reply
    assert [info["version"] for info in reply["versions"]] == ["v000003", "v000002"]
    assert reply["targets"] == {"run": "policy", "target": None, "standing": [], "moves": []}


async def test_status_shows_the_daemon_and_its_runs_as_table_and_as_json(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("status")
    assert ended.code == 0
    assert "v000003 (latest)" in ended.out
    reply = (await host.deltad("status", "--json")).reply
    assert reply["region"]["runs"]["policy"]["latest"] == "v000003"


async def test_watching_prints_a_block_per_change_until_it_is_interrupted(host: Host, lineage: Lineage) -> None:
    process = start("status", "--watch", "--every", "100ms", "--json", "--socket", host.socket, stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = json.loads(await asyncio.to_thread(process.stdout.readline))
    assert first["region"]["runs"]["policy"]["latest"] == "v000003"
    host.operations.add(4)
    second = json.loads(await asyncio.to_thread(process.stdout.readline))
    assert second["region"]["runs"]["policy"]["latest"] == "v000004"
    process.send_signal(signal.SIGINT)
    rest, _ = await asyncio.to_thread(process.communicate)
    assert rest == b""
    assert process.returncode == 130


# Inspect, verify, export.


async def test_inspect_of_a_version_goes_down_to_its_chunks(host: Host, lineage: Lineage) -> None:
    published = lineage.versions[-1]
    ended = await host.deltad("inspect", "policy/v000003")
    assert ended.code == 0
    for word in ("record", "variant bf16", "delta on v000002", "manifest", "layer.001", published.layout.digest.hex()):
        assert word in ended.out
    edge = (await host.deltad("inspect", "3", "--json")).reply["variants"][0]["edges"][0]
    assert len(edge["chunks"]) > 1
    assert all(bytes.fromhex(chunk["digest"]) in published.objects for chunk in edge["chunks"])
    assert edge["chunks"][0]["digest"] in (await host.deltad("inspect", "v000003", "--all")).out


async def test_inspect_says_which_edge_the_daemon_does_not_hold(host: Host, tmp_path: Path) -> None:
    lineage = Lineage()
    lineage.publish()
    both = lineage.publish(anchor=True)
    host.hold(lineage)
    anchor = both.record.variants[0].edges[1]
    lose(host.store, Digest(anchor.manifest))
    assert "this daemon does not hold it" in (await host.deltad("inspect", "v2")).out


async def test_verify_of_a_version_says_that_all_tensors_are_as_published(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("verify", "policy/v000002")
    assert ended.code == 0
    assert "policy/v000002, rebuilt from the store" in ended.out
    assert lineage.versions[1].record.variants[0].root.hex() in ended.out
    assert (await host.deltad("verify", "latest", "--json")).reply["match"] is True


async def test_a_version_that_is_damaged_is_65_and_names_the_tensors(host: Host, lineage: Lineage) -> None:
    host.operations.found_root = "ee" * 32
    host.operations.wrong_tensors = ("layer.000", "layer.002")
    ended = await host.deltad("verify", "policy/v000002")
    ended.assert_refused(65, "expected root", "ee" * 32, "wrong in layer.000, layer.002")
    ended = await host.deltad("verify", "policy/v000002", "--json")
    assert ended.code == 65
    assert ended.reply["wrong_tensors"] == ["layer.000", "layer.002"]
    assert ended.refusal["error"] == "Integrity"


async def test_of_many_wrong_tensors_the_first_ten_are_named(host: Host, lineage: Lineage) -> None:
    host.operations.found_root = "ee" * 32
    host.operations.wrong_tensors = tuple(f"t{i:02d}" for i in range(25))
    (await host.deltad("verify", "v1")).assert_refused(65, "t00, t01", "t09 and 15 more")


async def test_a_directory_with_the_published_root_is_that_version(
    host: Host, lineage: Lineage, tmp_path: Path
) -> None:
    directory = write(tmp_path / "c", bits_of(lineage.versions[1]))
    ended = await host.deltad("verify", directory, "--version", "policy/v000002")
    assert ended.code == 0
    assert f"{directory} is policy/v000002" in ended.out
    assert "is policy/v000002" in (await host.deltad("verify", directory, "--version", "2")).out
    assert "is policy/v000002" in (await host.deltad("verify", directory)).out
    assert (await host.deltad("verify", directory, "--json")).reply["match"] is True


async def test_a_directory_with_other_weights_is_65_and_each_wrong_tensor_is_named(
    host: Host, lineage: Lineage, tmp_path: Path
) -> None:
    bits = bits_of(lineage.versions[1])
    bits["layer.001"][0, 0] ^= 1
    directory = write(tmp_path / "c", bits)
    root = lineage.versions[1].record.variants[0].root.hex()
    ended = await host.deltad("verify", directory, "--version", "policy/v000002")
    ended.assert_refused(65, str(directory), f"expected root {root} of policy/v000002", "wrong in layer.001\n")
    (await host.deltad("verify", directory)).assert_refused(65, "run policy", "none among 3 versions", "--version")


async def test_a_directory_of_another_model_is_65_and_says_in_which_tensors(
    host: Host, lineage: Lineage, tmp_path: Path
) -> None:
    bits = bits_of(lineage.versions[1])
    bits["extra"] = bits.pop("layer.002")
    bits["layer.001"] = bits["layer.001"].reshape(32, 128)
    directory = write(tmp_path / "c", bits)
    (await host.deltad("verify", directory, "--version", "policy/v000002")).assert_refused(
        65,
        "extra (not of this version), layer.001 (BF16 [32, 128], not BF16 [64, 64]), layer.002 (missing)",
    )


async def test_export_sends_the_version_and_an_absolute_path(
    host: Host, lineage: Lineage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = await host.deltad("export", "latest", "out")
    assert ended.code == 0
    assert f"policy/v000003 is in {tmp_path}/out" in ended.out
    assert lineage.versions[-1].record.variants[0].root.hex() in ended.out
    (request,) = host.operations.exported
    assert (request.version, request.directory) == ("v000003", f"{tmp_path}/out")
    assert (await host.deltad("export", "v1", "out", "--json")).reply["version"] == "v000001"
