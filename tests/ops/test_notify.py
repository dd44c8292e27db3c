"""sd_notify, against a real socket where the service manager would listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.ops.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@deltad-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if name.startswith("@") else name)
        listener.setblocking(False)
        yield name, listener


def test_the_service_manager_hears_ready_status_and_stopping(manager: tuple[str, socket.socket]) -> None:
    name, listener = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready("serving 2 runs")
    notifier.status("policy at v000004")
    notifier.stopping()
    assert [listener.recv(4096) for _ in range(3)] == [
        b"READY=1\nSTATUS=serving 2 runs",
        b"STATUS=policy at v000004",
        b"STOPPING=1",
    ]


def test_the_service_manager_hears_of_reloads_of_progress_and_of_more_time(manager: tuple[str, socket.socket]) -> None:
    name, listener = manager
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "60000000"})
    notifier.reloading(12.5)
    notifier.alive("policy v000004")
    notifier.extend(30.0, "draining")
    assert [listener.recv(4096) for _ in range(3)] == [
        b"RELOADING=1\nMONOTONIC_USEC=12500000",
        b"WATCHDOG=1\nSTATUS=policy v000004",
        b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=draining",
    ]


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_watchdog_is_fed_only_where_this_process_is_asked_to(environment: dict[str, str], seconds: float) -> None:
    assert Notifier(environment, process=7).watchdog == seconds


def test_a_status_cannot_smuggle_in_another_word(manager: tuple[str, socket.socket]) -> None:
    name, listener = manager
    Notifier({"NOTIFY_SOCKET": name}).status("busy\nSTOPPING=1\r\n")
    assert listener.recv(4096) == b"STATUS=busy STOPPING=1"


def test_without_a_service_manager_nothing_happens() -> None:
    Notifier({}).ready()
    Notifier({"NOTIFY_SOCKET": ""}).stopping()


@pytest.mark.parametrize("left", ["nothing", "dead", "full"])
def test_a_service_manager_that_does_not_listen_never_fails_or_blocks_the_daemon(tmp_path: Path, left: str) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        if left != "nothing":
            listener.bind(str(path))
        if left == "dead":
            listener.close()
        for _ in range(2000 if left == "full" else 1):
            Notifier({"NOTIFY_SOCKET": str(path)}).status("x" * 200)
