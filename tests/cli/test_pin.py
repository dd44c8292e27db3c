"""`deltad pin` and `unpin` ask the daemon; `log` and `status` tell who pinned what, and why."""

from __future__ import annotations

import os
import re

from tests.cli.host import Host
from tests.kit.versions import Lineage

WHO = f"(uid {os.getuid()})"


async def test_a_pin_is_shown_with_who_and_why_until_it_is_taken_away(host: Host, lineage: Lineage) -> None:
    ended = await host.deltad("pin", "2", "--reason", "the one in the paper")
    assert ended.code == 0
    assert ended.out.startswith("policy/v000002 is pinned, by ")
    for words in (WHO, " on 20", "the one in the paper"):
        assert words in ended.out
    # The note stands below its version, which is the last one drawn before it.
    drawn, _, note = (await host.deltad("log")).out.partition("pinned by")
    assert re.findall(r"[*●][ |│]*(v[0-9]{6})", drawn)[-1] == "v000002"
    assert "the one in the paper" in " ".join(note.replace("|", " ").replace("│", " ").split())
    assert "v000002 (pinned)" in (await host.deltad("status")).out
    assert "was pinned before" in (await host.deltad("pin", "2", "--reason", "the one in the paper")).out

    assert "policy/v000002 is not pinned any more" in (await host.deltad("unpin", "policy/v000002")).out
    assert "was not pinned; nothing changed" in (await host.deltad("unpin", "policy/v000002")).out
    assert "pinned by" not in (await host.deltad("log")).out


async def test_latest_is_pinned_by_its_number_and_the_reply_is_one_for_programs(host: Host, lineage: Lineage) -> None:
    reply = (await host.deltad("pin", "latest", "--json")).reply
    assert (reply["version"], reply["changed"], reply["pin"]["why"]) == ("v000003", True, "")
    reply = (await host.deltad("unpin", "latest", "--json")).reply
    assert reply == {"version": "v000003", "pin": None, "changed": True}


async def test_a_version_that_is_not_held_is_66(host: Host, lineage: Lineage) -> None:
    for command in ("pin", "unpin"):
        (await host.deltad(command, "9")).assert_refused(66, "policy/v000009", "not held here")
