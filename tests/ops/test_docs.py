"""What the documents tell people to type works: the quick start as it stands, every other command by its words."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest

import deltad as package
from deltad.cli.main import deltad as commands
from deltad.client import Client
from deltad.errors import UnavailableError
from deltad.ops import shipped
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import free_port
from tests.kit.weights import ArrayWeights

DOCS = Path(package.__file__).parent / "docs"
_BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`((?:sudo )?deltad [^`]+)`")
_PLACEHOLDERS = {"VERSION": "v000001", "DIRECTORY": "/c", "FILE": "/f", "RUN": "policy", "NAME": "n"}


def told() -> Iterator[tuple[str, str]]:
    """Every command of deltad that a document tells of, with the document."""
    for path in sorted({*DOCS.glob("*.md")} - {DOCS / "FORMAT.md", DOCS / "STORE.md"}):
        text = path.read_text(encoding="utf-8")
        for block in _BLOCK.findall(text):
            for line in re.sub(r"<<'EOF'\n.*?^EOF$", "", block, flags=re.MULTILINE | re.DOTALL).splitlines():
                if match := re.match(r"(?:sudo )?(?:/opt/deltad/bin/)?(deltad .*)", line.partition("#")[0].strip()):
                    yield path.name, match[1]
        for span in _SPAN.findall(_BLOCK.sub("", text)):
            yield path.name, " ".join(span.split()).removeprefix("sudo ")


@pytest.mark.parametrize(("page", "line"), sorted(set(told())))
def test_every_command_in_the_documents_is_one_that_there_is(page: str, line: str) -> None:
    words = [_PLACEHOLDERS.get(word, word) for word in shlex.split(line.replace("…", ""))[1:]]
    if "|" in line or not words:
        words = [word.split("|")[0] for word in words]
    command: click.Command = commands
    context = click.Context(commands, info_name="deltad")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{page}: no command {name!r} in {line!r}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    options = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h"}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{page}: {line!r}"


def test_the_quick_start_brings_a_checkpoint_to_the_other_host_as_it_is_written(tmp_path: Path) -> None:
    port = free_port()
    text = (DOCS / "QUICKSTART.md").read_text(encoding="utf-8")
    _, on_trainer, on_rollout, see = _BLOCK.findall(text)
    hosts = {"trainer-1": on_trainer, "rollout-1": on_rollout}
    started: list[subprocess.Popen[bytes]] = []
    weights = ArrayWeights.random(MODEL)
    try:
        for place, (name, script) in enumerate(hosts.items()):
            home = tmp_path / name
            home.mkdir()
            run_script(_moved(script, home, port, 7701 + place), tmp_path / "trainer-1", place, port)
            started.append(start(home))
        write_checkpoint(tmp_path / "trainer-1/checkpoints/policy/step_000001", weights)
        client = Client(tmp_path / "rollout-1/run/deltad.sock", timeout=60.0)
        deadline = time.monotonic() + 60
        while not arrived(client):
            assert time.monotonic() < deadline, (tmp_path / "rollout-1/log").read_text()
            time.sleep(0.2)
        out = run_script(_moved(see, tmp_path / "rollout-1", port, 0), tmp_path / "rollout-1", 1, port)
        assert "policy" in out
        assert read_checkpoint(tmp_path / "rollout-1/tmp/policy").equals(weights)
    finally:
        for process in started:
            process.terminate()
            process.wait(60)


def arrived(client: Client) -> bool:
    """Whether the daemon answers and has a version."""
    with suppress(UnavailableError):
        return bool(client.status().region.runs) and client.latest("policy", wait=5.0) is not None
    return False


def _moved(script: str, home: Path, port: int, page: int) -> str:
    """The script for a host that is a directory here; what root's service manager does is left to `start`."""
    moves = {
        "/etc/deltad": f"{home}/etc",
        "/var/lib/deltad": f"{home}/store",
        "/run/deltad": f"{home}/run",
        "/checkpoints": f"{home}/checkpoints",
        "/tmp/policy": f"{home}/tmp/policy",
        "trainer-1:7700": f"127.0.0.1:{port}",
        "0.0.0.0:7700": f"127.0.0.1:{port}",
        "127.0.0.1:7701": f"127.0.0.1:{port + 1 + page - 7701}",
        "deltad ops install": f"deltad ops install --no-warm --root {home}/root",
        "credential:secret_relay-token": f"{home}/etc/secrets/relay-token",
        "systemd-sysusers": "mkdir -p etc",
        "systemd-tmpfiles --create": f"mkdir -p {home}/etc/secrets",
        "systemctl daemon-reload": "true",
        "systemctl enable --now deltad": "true",
    }
    for word, instead in moves.items():
        script = script.replace(word, instead)
    return script


def run_script(script: str, cwd: Path, place: int, port: int) -> str:
    """Run it as a shell does, `deltad` being that of the test; the token lies where it was made."""
    shim = cwd / "bin"
    shim.mkdir(exist_ok=True)
    (shim / "deltad").write_text(f'#!/bin/sh\nexec {sys.executable} -m deltad "$@"\n')
    (shim / "deltad").chmod(0o755)
    if place:
        token = cwd / "etc/secrets/relay-token"
        if token.exists():
            (cwd / "relay-token").write_bytes(token.read_bytes())
    environment = {
        **os.environ,
        "PATH": f"{shim}:{os.environ['PATH']}",
        "PYTHONPATH": str(DOCS.parents[1]),
        "DELTAD_SOCKET": str(cwd / "run/deltad.sock"),
    }
    (cwd / "run").mkdir(exist_ok=True)
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def start(home: Path) -> subprocess.Popen[bytes]:
    (home / "run").mkdir(exist_ok=True)
    with (home / "log").open("wb") as log:
        command = [sys.executable, "-m", "deltad", "serve", "--config", str(home / "etc/deltad.toml")]
        return subprocess.Popen(command, stdout=log, stderr=log)


def test_what_is_shipped_for_clusters_is_what_their_schemas_allow() -> None:
    import kubernetes_validate
    import yaml

    for name in ("daemonset.yaml", "sidecar.yaml"):
        documents = list(yaml.safe_load_all(shipped.read(name)))
        assert len(documents) == 2
        for document in documents:
            kubernetes_validate.validate(document, "1.30", strict=True)
        spec = documents[1]["spec"]["template"]["spec"]
        daemon = next(container for container in spec["containers"] if container["name"] == "deltad")
        volumes = {volume["name"] for volume in spec["volumes"]} | {
            claim["metadata"]["name"] for claim in documents[1]["spec"].get("volumeClaimTemplates", ())
        }
        mounts = [mount for container in spec["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} <= volumes
        assert daemon["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_configurations_in_the_manifests_can_be_used(tmp_path: Path) -> None:
    import yaml

    from deltad.config import load_config

    (tmp_path / "token").write_text("0123456789abcdef0123")
    (tmp_path / "token").chmod(0o440)
    for name in ("daemonset.yaml", "sidecar.yaml"):
        text = next(yaml.safe_load_all(shipped.read(name)))["data"]["deltad.toml"]
        (tmp_path / "deltad.toml").write_text(text.replace("/etc/deltad-secrets/relay-token", "token"))
        assert load_config(tmp_path / "deltad.toml").metrics is not None


def test_the_script_for_slurm_is_one_that_bash_reads_and_names_options_that_there_are() -> None:
    text = shipped.read("rollout.sbatch")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    help_text = subprocess.run(
        [sys.executable, "-m", "rollout_plugin", "--help"], capture_output=True, text=True, check=True
    ).stdout
    [line] = [line for line in text.splitlines() if "rollout_plugin" in line]
    for option in re.findall(r"--[a-z-]+", line):
        assert option in help_text
