"""The doctor on real hosts: file systems, limits, network name spaces, users and a daemon that runs."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltad.config import Config, load_config
from deltad.ops.doctor import Level, examine, gather
from deltad.ops.doctor.kernel import flock_holder, holder, inotify_used, seconds_lived
from deltad.store.store import Store
from tests.kit.versions import Lineage

CONFIG = '[daemon]\nname = "a"\nstore = "store"\nsocket = "a.sock"\n'
UPSTREAM = '[[upstream]]\nurl = "http://127.0.0.1:9"\ntoken_file = "token"\n'
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, name spaces and other users take root")


def configured(home: Path, more: str = "") -> Config:
    (home / "token").write_text("0123456789abcdef")
    (home / "token").chmod(0o600)
    (home / "deltad.toml").write_text(CONFIG + more)
    return load_config(home / "deltad.toml")


def found(home: Path, *before: str, **options: Any) -> dict[str, dict[str, str]]:
    """`deltad doctor`, in a process of its own behind `before`: the worst finding about each thing."""
    command = [*before, sys.executable, "-m", "deltad", "doctor", "--json", "--config", str(home / "deltad.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode in (0, 1), done.stderr
    reply = json.loads(done.stdout)
    assert done.returncode == (1 if reply["counts"]["error"] else 0)
    return {finding["about"]: finding for finding in reversed(reply["findings"])}


@contextmanager
def mounted(at: Path, *how: str) -> Iterator[None]:
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *how, str(at)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_before_the_first_start_nothing_is_made_and_nothing_is_left(tmp_path: Path) -> None:
    config = configured(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    facts = gather(config)
    assert sorted(tmp_path.rglob("*")) == before
    assert (facts.store.exists, facts.store_parent.path) == (False, tmp_path)
    assert not facts.running.answers
    assert facts.running.process is None
    assert len(facts.disk.syncs) == 5
    assert facts.disk.free > 0
    assert facts.disk.file_system is not None
    assert all(one.level is not Level.ERROR for one in examine(config, facts))


def test_a_store_is_measured_and_its_holder_named_while_it_is_held(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with_store = Store.open(tmp_path / "store")
    lineage = Lineage()
    for _ in range(3):
        lineage.publish()
    lineage.fill(with_store)
    facts = gather(config)
    assert facts.running.process == os.getpid()
    assert facts.look.runs[0].held == 3
    assert facts.disk.elsewhere == ()
    assert facts.foreign_owned == ()
    about = {one.about: one for one in reversed(examine(config, facts))}
    assert about["store"].level is Level.OK
    assert f"process {os.getpid()} holds the store, and nothing answers" in about["daemon"].found
    with_store.close()
    assert gather(config).running.process is None
    Store.open(tmp_path / "store").close()


def test_a_clock_that_was_set_since_the_daemon_started_is_noticed(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from deltad.store.store import Store\n"
    code += "store = Store.open(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        lock = tmp_path / "store" / "lock"
        process, locked_at = holder(lock)
        assert process == daemon.pid
        assert locked_at is not None
        # As if the clock had been put an hour ahead since.
        os.utime(lock, (locked_at - 3600, locked_at - 3600))
        facts = gather(configured(tmp_path))
        daemon.communicate()
    (jumped,) = [one for one in examine(configured(tmp_path), facts) if "was set" in one.found]
    assert jumped.level is Level.WARNING
    assert jumped.found.startswith("it was set forward by ")


def test_the_holder_of_a_lock_is_told_from_those_that_wait_for_it_and_from_other_kinds_of_lock() -> None:
    locks = """1: POSIX  ADVISORY  WRITE 11 fe:00:2196 0 EOF
2: FLOCK  ADVISORY  WRITE 7638 fe:00:2196 0 EOF
2: -> FLOCK  ADVISORY  WRITE 99 fe:00:2196 0 EOF
3: FLOCK  ADVISORY  READ 0 fe:00:2197 0 EOF"""
    assert flock_holder(locks, "fe:00:2196") == 7638
    assert flock_holder(locks, "fe:00:2197") is None, "a process of another name space"
    assert flock_holder(locks, "fe:00:219") is None


def test_a_processes_age_is_that_of_a_clock_that_is_never_set() -> None:
    lived = seconds_lived(os.getpid())
    assert lived is not None
    assert lived > 0
    assert seconds_lived(2**22 + 1) is None


@needs_root
def test_a_store_in_memory_and_one_that_is_read_only_are_told_apart(tmp_path: Path) -> None:
    configured(tmp_path)
    store = tmp_path / "store"
    with mounted(store, "-t", "tmpfs", "tmpfs"):
        disk = found(tmp_path)["disk"]
        assert disk["level"] == "warning"
        assert "tmpfs, in memory" in disk["found"]
    (tmp_path / "real").mkdir()
    with mounted(store, "--bind", str(tmp_path / "real")):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(store)], check=True)
        disk = found(tmp_path)["disk"]
        assert disk["level"] == "error"
        assert "mounted read-only" in disk["found"]


@needs_root
def test_a_part_of_the_store_on_another_file_system_is_found(tmp_path: Path) -> None:
    configured(tmp_path)
    Store.open(tmp_path / "store").close()
    with mounted(tmp_path / "store" / "packs", "-t", "tmpfs", "tmpfs"):
        assert found(tmp_path)["disk"]["found"].startswith("packs lies on another file system")


def test_a_process_that_may_open_few_files_is_told_so(tmp_path: Path) -> None:
    configured(tmp_path, UPSTREAM)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    limits = found(tmp_path, preexec_fn=limited)["limits"]
    assert (limits["level"], limits["found"]) == ("error", "100 open files here (a service may have others)")


@needs_root
def test_small_windows_and_slow_starts_of_the_kernel_are_found(tmp_path: Path) -> None:
    configured(tmp_path, UPSTREAM)
    settings = "echo 4096 65536 262144 > tcp_rmem; echo 1 > tcp_slow_start_after_idle"
    script = f'cd /proc/sys/net/ipv4 && ({settings}) && cd "$0" && exec "$@"'
    command = ("unshare", "--net", "sh", "-c", script, os.getcwd())
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network name space can be made here")
    about = found(tmp_path, *command)
    assert about["link to http://127.0.0.1:9"]["level"] == "warning"
    assert "16 connections with 256 KiB of buffer" in about["link to http://127.0.0.1:9"]["found"]
    assert "tcp_slow_start_after_idle = 1" in about["TCP"]["found"]


@needs_root
def test_another_user_is_told_what_it_may_not_do() -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "watched").mkdir(mode=0o700)
        more = f'[[run]]\nid = "r"\n[[watch]]\nrun = "r"\ndirectory = "{home / "watched"}"\n'
        config = configured(home, more)
        Store.open(home / "store").close()
        lines = as_nobody(lambda: [f"{one.level} {one.about}: {one.found}" for one in examine(config, gather(config))])
        assert (home / "store").stat().st_mode & 0o777 == 0o750
    said = "\n".join(lines)
    assert f"error permissions: user {NOBODY} may not write {home}/store (owner 0, mode 0750)" in said
    assert f"error watched directory {home}/watched: user {NOBODY} may not read it" in said
    assert f"error socket: user {NOBODY} may make no socket below {home}" in said
    assert f"error disk: no file can be made and synced at {home}/store: Permission denied" in said


@needs_root
def test_what_a_start_as_root_has_left_in_a_users_store_is_found(tmp_path: Path) -> None:
    config = configured(tmp_path)
    Store.open(tmp_path / "store").close()
    os.chown(tmp_path / "store", NOBODY, NOBODY)
    (one,) = [one for one in examine(config, gather(config)) if "does not belong" in one.found]
    assert one.level is Level.ERROR
    assert f"chown -R {NOBODY}" in one.advice


def test_watches_that_are_in_use_are_counted() -> None:
    libc = ctypes.CDLL(None)
    before = inotify_used(os.geteuid())
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    try:
        assert libc.inotify_add_watch(descriptor, b"/", 0x100) >= 0
        watches, instances = inotify_used(os.geteuid())
    finally:
        os.close(descriptor)
    assert watches > before[0] - 1
    assert instances >= 1


def as_nobody(work: Callable[[], list[str]]) -> list[str]:
    """The result of `work` in a child that gave all rights away."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return list(json.loads(data))
