"""The page for those who come from something else: its configurations load, and its commands do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deltad
from deltad.config import load_config
from tests.interop.peers import PYTHON, needs_peers, run_peer
from tests.interop.site import DEPLOYMENT, Site
from tests.kit.authority import Authority
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import TOKEN
from tests.kit.disk_deltas import apply_delta, tensor_bytes, write_delta
from tests.kit.weights import ArrayWeights

PAGE = (Path(deltad.__file__).parent / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}


def blocks(section: str, language: str) -> list[str]:
    found = next(text for name, text in SECTIONS.items() if name.startswith(section))
    return re.findall(rf"```{language}\n(.*?)```", found, re.DOTALL)


def test_the_page_speaks_of_all_whom_people_come_from() -> None:
    for who in ("Fireworks", "CoreWeave", "slime, miles", "stitch", "TRL", "verl", "prime-rl", "Plain vLLM"):
        (section,) = [text for name, text in SECTIONS.items() if who in name]
        assert "You gain:" in section, who
        assert "You lose:" in section, who


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL), ids=lambda text: text.split()[1])
def test_a_configuration_on_the_page_can_be_used(text: str, tmp_path: Path) -> None:
    issued = Authority(tmp_path / "authority").issue("local")
    (tmp_path / "local.pem").write_bytes(issued.certificate.read_bytes())
    for name, data in (("local.key", issued.key.read_bytes()), ("trainer.token", TOKEN.encode())):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "deltad.toml"
    path.write_text(text)
    assert load_config(path).run(load_config(path).runs[0].id) is not None


def shell(commands: str, home: Path, **environment: str) -> str:
    bin_ = home / "bin"
    bin_.mkdir(exist_ok=True)
    for name, command in (("deltad", f"{sys.executable} -m deltad"), ("cwtrain", str(PYTHON.with_name("cwtrain")))):
        (bin_ / name).write_text(f'#!/bin/sh\nexec env PYTHONPATH="$FOR_{name.upper()}" {command} "$@"\n')
        (bin_ / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=home,
        env={
            **os.environ,
            "FOR_DELTAD": os.environ.get("PYTHONPATH", ""),
            "FOR_CWTRAIN": "",
            **environment,
            "PATH": f"{bin_}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_for_slime_take_its_deltas_and_give_one_back(tmp_path: Path) -> None:
    old = ArrayWeights.bell(MODEL)
    new = old.changed(0.05)
    write_checkpoint(tmp_path / "hf", old)
    delta = tmp_path / "weight_v000001"
    write_delta(delta, tensor_bytes(old), tensor_bytes(new), version="000001", base_version="000000")
    (tmp_path / "deltas").mkdir()
    (configuration,) = blocks("slime", "toml")
    (tmp_path / "deltad.toml").write_text(configuration)
    command = [sys.executable, "-m", "deltad", "serve", "--config", str(tmp_path / "deltad.toml")]
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            (commands,) = blocks("slime", "sh")
            socket = tmp_path / "deltad.sock"
            waiting = f"until [ -S {socket} ] && deltad status >/dev/null 2>&1; do sleep 0.1; done\n"
            shell(waiting + commands, tmp_path, DELTAD_SOCKET=str(socket))
        finally:
            daemon.terminate()
            daemon.wait(60)
    assert apply_delta(tmp_path / "out" / "weight_v000001", tensor_bytes(old)) == tensor_bytes(new)


@needs_peers
def test_the_commands_for_coreweave_and_fireworks_load_a_snapshot(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.start_replica()
    step = site.next_state("step_1")
    (site.home / "trainer.token").write_text(TOKEN)
    where = {**site.environment(), "DELTAD_URL": site.url, "DEPLOYMENT": DEPLOYMENT}
    (commands,) = blocks("CoreWeave", "sh")
    said = shell(commands, site.home, **where)
    assert '"result": "ok"' in said
    assert '"state": "COMPLETED"' in said
    (code,) = blocks("Fireworks", "python")
    monkeypatch.chdir(site.home)
    run_peer("-c", code, env=where)
    report = site.report(lambda report: bool(report.root))
    assert report.root == site.daemon.client.versions("policy")[-1].root
    assert len(site.daemon.client.versions("policy")) == 1, "the same snapshot is the same version"
    assert read_checkpoint(step).equals(site.state)
