"""`deltad doctor` says what it found in words and as JSON, with a daemon and without one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cli.host import Host
from tests.cli.terminal import Deltad
from tests.kit.versions import Lineage


def configured(home: Path, more: str = "") -> Path:
    file = home / "deltad.toml"
    file.write_text(f'[daemon]\nname = "a"\nstore = "store"\nsocket = "d.sock"\n{more}')
    return file


def test_without_a_daemon_each_finding_says_what_was_expected_and_what_to_do(tmp_path: Path, deltad: Deltad) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("x")
    file = configured(tmp_path)
    ended = deltad("doctor", "--config", file)
    assert ended.code == 1
    (line,) = [line for line in ended.out.splitlines() if line.startswith("error ")]
    assert "store: " in line
    assert "holds 'thesis.tex' and no FORMAT file; expected an empty directory or a store; set another `store`" in line
    assert not any(line.startswith("ok ") for line in ended.out.splitlines())
    assert any(line.startswith("ok ") for line in deltad("doctor", "--config", file, "--all").out.splitlines())
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]


async def test_beside_a_running_daemon_it_looks_at_that_one(host: Host, lineage: Lineage, tmp_path: Path) -> None:
    ended = await asyncio.to_thread(host.command, "doctor", "--config", configured(tmp_path), "--json")
    assert ended.code == 0, ended
    about = {found["about"]: found for found in ended.reply["findings"]}
    assert "holds the store, and answers at" in about["daemon"]["found"]
    assert "3 versions" in about["store"]["found"]
    assert about["limits"]["found"].endswith("open files of the running daemon")
    assert ended.reply["counts"]["error"] == 0


def test_a_configuration_that_cannot_be_used_is_78_as_ever(tmp_path: Path, deltad: Deltad) -> None:
    deltad("doctor", "--config", configured(tmp_path, "[[nonsense]]\n")).assert_refused(78, "nonsense")
