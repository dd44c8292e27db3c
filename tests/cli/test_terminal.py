"""What a person at a terminal sees, and what a pipe does not."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

from tests.cli.host import Host
from tests.cli.models import bits, write
from tests.cli.terminal import start
from tests.kit.versions import Lineage

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """A terminal of 160 columns with a command on it."""

    def __init__(self, *arguments: object, stdout: int | None = None, **environment: str) -> None:
        self._screen, there = pty.openpty()
        settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", **environment}
        self.process = start(*arguments, stdin=there, stdout=stdout or there, stderr=there, env=settings)
        os.close(there)

    def read(self) -> str:
        """More of what is shown; empty once the command has ended."""
        try:
            return os.read(self._screen, 65536).decode(errors="replace")
        except OSError:  # the way a terminal says that its last user has gone
            return ""

    def rest(self) -> str:
        """All that is shown until the command ends."""
        text = "".join(iter(self.read, ""))
        self.process.wait()
        os.close(self._screen)
        return text

    def read_until(self, word: str) -> str:
        """All that is shown until a word appears."""
        text = ""
        while word not in text:
            more = self.read()
            assert more, f"{word!r} is not in {text!r}"
            text += more
        return text


async def test_the_log_is_drawn_with_boxes_where_the_terminal_has_them_and_in_ascii_elsewhere(
    host: Host, lineage: Lineage
) -> None:
    for encoding, node in (("utf-8", "●"), ("ascii", "*")):
        environment = {"PYTHONIOENCODING": encoding, "COLUMNS": "60"}
        shown = await asyncio.to_thread(lambda env=environment: Screen("log", "--socket", host.socket, **env).rest())
        assert _COLOUR.search(shown)
        lines = _COLOUR.sub("", shown).splitlines()
        assert [line.split()[1] for line in lines if line.startswith(node)] == ["v000003", "v000002", "v000001"]


async def test_a_terminal_shows_colours_and_an_environment_can_turn_them_off(host: Host, lineage: Lineage) -> None:
    coloured = await asyncio.to_thread(lambda: Screen("status", "--socket", host.socket).rest())
    assert _COLOUR.search(coloured)
    assert "v000003 (latest)" in _COLOUR.sub("", coloured)
    bare = await asyncio.to_thread(lambda: Screen("status", "--socket", host.socket, NO_COLOR="1").rest())
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", bare)
    assert "v000003 (latest)" in _COLOUR.sub("", bare)


async def test_watching_on_a_terminal_redraws_it_and_leaves_it_as_it_was(host: Host, lineage: Lineage) -> None:
    screen = Screen("status", "--watch", "--every", "100ms", "--socket", host.socket)
    await asyncio.to_thread(screen.read_until, "v000003")
    host.operations.add(4)
    await asyncio.to_thread(screen.read_until, "v000004")
    screen.process.send_signal(signal.SIGINT)
    rest = await asyncio.to_thread(screen.rest)
    assert "\x1b[?1049l" in rest
    assert "Traceback" not in rest
    assert screen.process.returncode == 130


async def test_watching_outlives_a_daemon_that_stops_and_says_so(host: Host, lineage: Lineage, tmp_path: Path) -> None:
    process = start("status", "--watch", "--every", "100ms", "--socket", host.socket, stdout=subprocess.PIPE)
    assert process.stdout is not None
    while b"upstreams" not in await asyncio.to_thread(process.stdout.readline):
        pass
    host.socket.rename(tmp_path / "elsewhere")
    while b"is `deltad serve` running?" not in await asyncio.to_thread(process.stdout.readline):
        pass
    (tmp_path / "elsewhere").rename(host.socket)
    while b"ready" not in await asyncio.to_thread(process.stdout.readline):
        pass
    process.send_signal(signal.SIGINT)
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 130


def test_long_work_shows_progress_on_a_terminal_and_leaves_standard_output_clean(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", bits()), write(tmp_path / "new", bits())
    out = tmp_path / "out"
    with out.open("wb") as file:
        screen = Screen("diff", old, new, "--json", stdout=file.fileno())
        text = screen.rest()
    assert screen.process.returncode == 0
    assert "comparing" in text
    assert out.read_text().startswith("{")
    assert "comparing" not in out.read_text()


async def test_publishing_on_a_terminal_shows_what_the_daemon_does(host: Host, lineage: Lineage) -> None:
    host.operations.hold_publish = asyncio.Event()
    host.operations.activity = "encoding step_9"
    screen = Screen("publish", "/out/step_9", "--socket", host.socket)
    await asyncio.to_thread(screen.read_until, "encoding step_9")
    host.operations.hold_publish.set()
    rest = await asyncio.to_thread(screen.rest)
    assert "policy/v000009 is published" in rest
    assert screen.process.returncode == 0
