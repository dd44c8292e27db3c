"""What is shipped for systemd, judged by systemd's own programs; where it is installed; and what a unit provides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.config import load_config
from deltad.config.values import credential
from deltad.errors import ConfigError, NotFoundError
from deltad.ops import shipped

MOST_EXPOSED = 20
"""In tenths, as `systemd-analyze --threshold` counts."""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def deltad(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "deltad", *words, **environment)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("host")
    ended = deltad("ops", "install", "--root", root, "--gpu", "--no-warm")
    assert ended.returncode == 0, ended.stderr
    assert "systemctl daemon-reload" in ended.stdout
    return root


@pytest.mark.parametrize("gpu", [False, True])
def test_systemd_finds_nothing_wrong_with_the_unit(gpu: bool, host: Path, tmp_path: Path) -> None:
    for file in shipped.system_files(tmp_path, gpu=gpu):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text)
    found = run("systemd-analyze", "verify", "--man=no", tmp_path / "etc/systemd/system/deltad.service")
    assert (found.returncode, found.stderr) == (0, "")


def test_systemd_finds_nothing_wrong_with_the_unit_of_a_user(tmp_path: Path) -> None:
    ended = deltad("ops", "install", "--user", "--no-warm", XDG_CONFIG_HOME=str(tmp_path), XDG_STATE_HOME="/home/u/s")
    assert ended.returncode == 0
    unit = tmp_path / "systemd/user/deltad.service"
    found = run("systemd-analyze", "verify", "--user", "--man=no", unit, XDG_RUNTIME_DIR=str(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")
    config = load_config(tmp_path / "deltad/deltad.toml") if _named(tmp_path / "deltad/deltad.toml") else None
    assert config is not None
    assert config.daemon.store == Path("/home/u/s/deltad")


def _named(config: Path) -> bool:
    """An operator gives the daemon a name; the placeholder is none that could be used by mistake."""
    with pytest.raises(ConfigError, match=r"daemon\.name"):
        load_config(config)
    config.write_text(config.read_text().replace("CHANGE-ME", "mine"))
    return True


def test_the_service_is_exposed_to_little(host: Path) -> None:
    unit = host / "etc/systemd/system/deltad.service"
    found = run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", unit)
    assert found.returncode == 0, found.stdout.splitlines()[-1:]
    [level] = re.findall(r"Overall exposure level for deltad.service: ([0-9.]+)", found.stdout)
    assert float(level) <= MOST_EXPOSED / 10


def test_installing_again_leaves_the_configuration_and_renews_the_unit(host: Path) -> None:
    unit, config = host / "etc/systemd/system/deltad.service", host / "etc/deltad/deltad.toml"
    expected = unit.read_text()
    unit.write_text("[Service]\nExecStart=/opt/old/bin/deltad\n")
    config.write_text("# mine\n")
    ended = deltad("ops", "install", "--root", host, "--no-warm", "--json")
    assert f'"{unit}": "written anew"' in ended.stdout
    assert (unit.read_text(), config.read_text()) == (expected, "# mine\n")
    assert f"ExecStart={shipped.command()} serve" in expected
    assert "@" not in expected.replace("@system-service", "").replace("@privileged", "").replace("@resources", "")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file")
    ended = deltad("ops", "install", "--root", tmp_path, "--no-warm")
    assert (ended.returncode, str(tmp_path / "etc") in ended.stderr) == (74, True)


def test_every_shipped_file_can_be_shown_and_another_is_refused_with_those_that_there_are() -> None:
    for name in shipped.names():
        assert shipped.read(name)
    assert shipped.read("deltad.service") == shipped.read("systemd/deltad.service")
    with pytest.raises(NotFoundError, match=r"systemd/deltad\.service"):
        shipped.read("nothing")
    assert "systemd/gpu.conf" in deltad("ops", "show").stdout
    assert deltad("ops", "show", "gpu.conf").stdout == shipped.read("gpu.conf")


def test_a_secret_is_read_where_the_service_manager_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = tmp_path / "credentials"
    secrets.mkdir()
    (secrets / "secret_relay").write_text("0123456789abcdef0123")
    (secrets / "secret_relay").chmod(0o400)
    config = tmp_path / "deltad.toml"
    text = '[daemon]\nname = "a"\n[relay]\nlisten = "127.0.0.1:7700"\ntoken_file = "credential:secret_relay"\n'
    config.write_text(text)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(secrets))
    relay = load_config(config).relay
    assert relay is not None
    assert relay.token_file is not None
    assert relay.token_file.read() == "0123456789abcdef0123"
    config.write_text(text.replace("secret_relay", "../../etc/passwd"))
    with pytest.raises(ConfigError, match="the name of a credential"):
        load_config(config)


def test_without_a_service_manager_the_place_of_the_shipped_unit_is_meant() -> None:
    unit, source = Path("/run/credentials/deltad.service"), Path("/etc/deltad/secrets")
    assert credential("own", {}) == unit / "own"
    assert credential("secret_relay", {}) == (unit / "secret_relay" if unit.exists() else source / "relay")
    assert f"LoadCredential=secret:{source}" in shipped.read("deltad.service").splitlines()


FORBIDDEN = """
import ctypes, sys
if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
    sys.exit("no MDWE")
from deltad.delta.backend.choice import candidates, probe
import time
choice = probe("auto", candidates(0, 2 << 30), clock=time.monotonic, on_switch=print)
print(choice.backend.name, choice.reason)
from deltad.cli.main import run
print(run(["ops", "warm"]))
"""


def test_where_machine_code_is_forbidden_numpy_computes_and_the_reason_is_told() -> None:
    ended = run(sys.executable, "-c", FORBIDDEN)
    if "no MDWE" in ended.stderr:
        pytest.skip("this kernel knows no PR_SET_MDWE (Linux 6.3)")
    assert ended.returncode == 0, ended.stderr
    first, warmed, code = ended.stdout.splitlines()
    assert first.startswith("numpy ")
    assert "machine code may not be made here" in first
    assert "computes with numpy" in warmed
    assert code == "0"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    assert "_DELTAD_COMPLETE" in deltad("ops", "completion", shell).stdout
    words = {"COMP_WORDS": "deltad sta", "COMP_CWORD": "sta" if shell == "fish" else "1"}
    found = deltad(_DELTAD_COMPLETE=f"{shell}_complete", **words)
    assert "status" in found.stdout
