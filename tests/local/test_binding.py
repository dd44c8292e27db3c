"""The socket file: who may use it, when it is replaced and when it is left alone."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.errors import ConfigError
from deltad.local.binding import bind_unix_socket


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(str(path))


def test_only_owner_and_group_may_connect_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with bind_unix_socket(tmp_path / "run" / "deltad.sock"):
            assert stat.S_IMODE((tmp_path / "run" / "deltad.sock").stat().st_mode) == 0o660
            connect(tmp_path / "run" / "deltad.sock")
    finally:
        os.umask(before)


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deltad.sock"
    code = (
        "import os, signal, sys; from pathlib import Path; from deltad.local.binding import bind_unix_socket\n"
        "held = bind_unix_socket(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -9
    assert path.is_socket()
    with bind_unix_socket(path):
        connect(path)


def test_the_socket_of_a_living_process_is_refused_and_goes_on_serving(tmp_path: Path) -> None:
    path = tmp_path / "deltad.sock"
    with bind_unix_socket(path):
        with pytest.raises(ConfigError, match="another process that listens"):
            bind_unix_socket(path)
        connect(path)


def test_a_living_process_that_accepts_nobody_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "deltad.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(path))  # fills the backlog
            with pytest.raises(ConfigError, match="another process that listens"):
                bind_unix_socket(path)
    assert path.is_socket()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "deltad.sock"
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a free path or a socket"):
        bind_unix_socket(path)
    assert os.path.lexists(path)


def test_a_path_that_no_socket_can_have_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 120), Path("/proc/no/deltad.sock")):
        with pytest.raises(ConfigError) as caught:
            bind_unix_socket(path)
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 78
