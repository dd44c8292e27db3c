"""The watchdog hears of progress, and of nothing else."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from deltad.daemon.pulse import STATUS_SECONDS, Pulse
from deltad.ops.notify import Notifier
from tests.kit.daemons import Daemon


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(tmp_path / "notify"), **more}


async def test_a_beat_is_told_once_a_worker_thread_had_its_turn(manager: socket.socket, tmp_path: Path) -> None:
    asked, turn = asyncio.Event(), asyncio.get_running_loop().create_future()

    def stuck(function: Callable[[], None]) -> asyncio.Future[None]:
        asked.set()
        return turn

    pulse = Pulse(Notifier(environment(tmp_path, WATCHDOG_USEC="60000000")), lambda: "well", work=stuck)
    beat = asyncio.create_task(pulse.beat())
    await asked.wait()
    with pytest.raises(BlockingIOError):
        manager.recv(4096)
    turn.set_result(None)
    await beat
    assert manager.recv(4096) == b"WATCHDOG=1\nSTATUS=well"


async def test_the_threads_that_do_the_daemons_work_are_those_that_are_asked(
    manager: socket.socket, tmp_path: Path
) -> None:
    await Pulse(Notifier(environment(tmp_path)), lambda: "well").beat()
    assert manager.recv(4096) == b"STATUS=well", "and without a watchdog only the status is told"


@pytest.mark.parametrize(("microseconds", "every"), [("6000000", 2.0), ("600000000", STATUS_SECONDS), ("", 5.0)])
def test_the_watchdog_is_fed_three_times_within_its_time(microseconds: str, every: float) -> None:
    assert Pulse(Notifier({"WATCHDOG_USEC": microseconds}), str).every == every


def test_a_service_manager_hears_the_whole_life_of_a_daemon(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "a", "a", '[[run]]\nid = "policy"\n')
    daemon.environment["WATCHDOG_USEC"] = "300000"
    with daemon.listening() as manager:

        def until(word: str) -> list[str]:
            heard: list[str] = []
            while not heard or word not in heard[-1]:
                heard.append(manager.recv(4096).decode())
            return heard

        daemon.start(wait=False)
        assert until("READY=1")[-1] == "READY=1\nSTATUS=policy without a version"
        assert until("WATCHDOG=1")[-1] == "WATCHDOG=1\nSTATUS=policy without a version"
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        reloading = until("RELOADING=1")[-1]
        assert reloading.partition("MONOTONIC_USEC=")[2].isdigit()
        assert until("READY=1")
        daemon.config.write_text("nonsense")
        daemon.process.send_signal(signal.SIGHUP)
        assert until("RELOADING=1")
        assert until("READY=1"), "a file that cannot be used ends the reload as well"
        daemon.process.send_signal(signal.SIGTERM)
        assert until("STOPPING=1")
        assert until("EXTEND_TIMEOUT_USEC=30000000")[-1].endswith("STATUS=draining: 0 publishes may end")
        assert daemon.process.wait(60) == 0


def test_a_daemon_that_hangs_stops_feeding_the_watchdog(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "a", "a")
    daemon.environment["WATCHDOG_USEC"] = "300000"
    with daemon.listening() as manager:
        daemon.start(wait=False)
        while b"WATCHDOG=1" not in manager.recv(4096):
            pass
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        manager.settimeout(1.0)
        sent = iter(lambda: manager.recv(4096), b"")
        with pytest.raises(TimeoutError):
            list(islice(sent, 10))
        daemon.kill()
