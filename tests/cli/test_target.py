"""`deltad hold`, `release` and `rollback` ask the daemon for what was typed, and say in words what stands then."""

from __future__ import annotations

import os
import pwd

import msgspec
import pytest

from deltad.cli.connect import VersionName
from deltad.cli.target import RunAt, parse_run_at
from deltad.client.messages import Act, Target, TargetReply, TargetRequest
from deltad.errors import LimitError, UsageError
from deltad.types import RunId, Version
from tests.cli.host import Host
from tests.kit.versions import Lineage

POLICY = RunId("policy")
ME = f"{pwd.getpwuid(os.getuid()).pw_name} (uid {os.getuid()})"
HELD = Target("v000002", "", "ana (uid 1000)", "reward fell", 1_700_000_000.0, "border-a", 3)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("policy", RunAt(POLICY, None)),
        ("policy@12", RunAt(POLICY, VersionName(POLICY, Version(1, 12), False))),
        ("policy@v000012", RunAt(POLICY, VersionName(POLICY, Version(1, 12), False))),
        ("policy@12@e2", RunAt(POLICY, VersionName(POLICY, Version(2, 12)))),
        ("policy@latest", RunAt(POLICY, VersionName(POLICY, None, False))),
        ("@12", RunAt(None, VersionName(None, Version(1, 12), False))),
        ("policy/v000012@e2", RunAt(POLICY, VersionName(POLICY, Version(2, 12)))),
    ],
)
def test_a_run_and_its_version_are_typed_in_one_word(text: str, meant: RunAt) -> None:
    assert parse_run_at(text) == meant


@pytest.mark.parametrize("text", ["", "policy@", "@", "policy@v", "Policy@1", "policy@1@2", "a/b/1"])
def test_what_is_no_run_or_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_run_at(text)


async def test_what_is_asked_reaches_the_daemon_with_who_asked_as_the_kernel_knows_it(
    host: Host, lineage: Lineage
) -> None:
    ended = await host.deltad("hold", "policy@2", "--fleet", "region-2", "--reason", "evaluating")
    assert ended.code == 0, ended
    assert host.operations.moved == [(TargetRequest(Act.HOLD, "v000002", "region-2", "evaluating"), ME)]
    assert ended.out.startswith(f"run policy: the fleet of region-2 is held at v000002 by {ME} at a since 2023-11-1")
    assert ended.out.endswith(": evaluating; latest is v000003\n")


async def test_the_run_may_be_left_out_where_there_is_only_one(host: Host, lineage: Lineage) -> None:
    for arguments, request in (
        (("hold",), TargetRequest(Act.HOLD)),
        (("rollback", "@1"), TargetRequest(Act.ROLLBACK, "v000001")),
        (("rollback", "policy/latest"), TargetRequest(Act.ROLLBACK, "v000003")),
        (("release",), TargetRequest(Act.RELEASE)),
    ):
        assert (await host.deltad(*arguments)).code == 0
        assert host.operations.moved[-1][0] == request
    host.operations.add(1, run=RunId("other"))
    (await host.deltad("hold", "@1")).assert_refused(64, "expected one run, found other, policy")
    (await host.deltad("hold", "policy@9")).assert_refused(66, "policy/v000009", "not held here")


WORDS = [
    (TargetReply("policy", None, "v000003", True), "run policy: follows the newest version, v000003"),
    (TargetReply("policy", None, "v000003", False), "follows the newest version, v000003; nothing changed"),
    (TargetReply("policy", HELD, "v000003", False), ": reward fell; latest is v000003; that was said at border-a, and"),
    (
        TargetReply("policy", msgspec.structs.replace(HELD, here=False), "v000003", True),
        "target v000002 is not held here, so each replica stays where it is",
    ),
    (TargetReply("policy", None, "v000003", True, heard=False), "no daemon named b has been heard of here"),
]


@pytest.mark.parametrize(("reply", "words"), WORDS)
async def test_what_stands_then_is_told_in_words(host: Host, lineage: Lineage, reply: TargetReply, words: str) -> None:
    host.operations.move_reply = reply
    ended = await host.deltad("release", "policy", *([] if reply.heard else ["--fleet", "b"]))
    assert words in ended.out


async def test_the_reply_is_json_where_that_is_asked_for_and_errors_are_too(host: Host, lineage: Lineage) -> None:
    reply = (await host.deltad("hold", "policy", "--json")).reply
    assert (reply["run"], reply["target"]["version"], reply["changed"]) == ("policy", "v000003", True)
    host.operations.refusal = LimitError("target", expected="fewer")
    refused = await host.deltad("release", "policy", "--json")
    assert (refused.code, refused.refusal["error"]) == (65, "Limit")


async def test_a_reason_is_bounded(host: Host, lineage: Lineage) -> None:
    assert (await host.deltad("hold", "policy", "--reason", "x" * 256)).code == 0
    (await host.deltad("hold", "policy", "--reason", "x" * 257)).assert_refused(64, "reason", "at most 256 characters")


async def test_control_characters_in_a_reason_do_not_reach_the_terminal(host: Host, lineage: Lineage) -> None:
    host.operations.move_reply = TargetReply("policy", msgspec.structs.replace(HELD, why="\x1b[2J\n"), "v000003", True)
    out = (await host.deltad("hold", "policy")).out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
