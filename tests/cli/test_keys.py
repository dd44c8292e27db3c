"""`deltad keys`: keys are made once, shown without their secret, trusted and rotated without losing anything."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from deltad.config import KeyFile, load_config
from deltad.delta.keys import SigningKey
from tests.cli.terminal import Deltad

PUBLIC = SigningKey.from_seed(bytes(32)).public


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "deltad.toml"
    file.write_text('# ours\n[daemon]\nname = "a"  # the first')
    return file


def test_a_new_key_is_for_its_owner_alone_and_its_public_half_is_printed(deltad: Deltad, tmp_path: Path) -> None:
    file = tmp_path / "k"
    reply = deltad("keys", "new", file, "--json").reply
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    public = KeyFile(file).read().public
    assert (reply["id"], reply["key"]) == (public.id, str(public))
    shown = deltad("keys", "show", file)
    assert str(public) in shown.out
    assert file.read_text().splitlines()[1] not in shown.out


def test_a_key_is_never_overwritten(deltad: Deltad, tmp_path: Path) -> None:
    file = tmp_path / "k"
    deltad("keys", "new", file)
    before = file.read_bytes()
    ended = deltad("keys", "new", file)
    assert ended.code == 64
    assert "keys rotate" in ended.err
    assert file.read_bytes() == before


def test_trusting_adds_a_section_and_leaves_the_rest_of_the_file_alone(
    deltad: Deltad, tmp_path: Path, config: Path
) -> None:
    before = config.read_text()
    ended = deltad("keys", "trust", PUBLIC, "--config", config, "--run", "policy", "--scope", "derive", "--name", "b")
    assert ended.code == 0
    assert config.read_text().startswith(before)
    [trust] = load_config(config).trusts
    assert (trust.key, trust.scope, trust.runs, trust.name) == (PUBLIC, ("derive",), ("policy",), "b")
    assert PUBLIC.id in deltad("keys", "show", "--config", config).out


def test_a_configuration_that_would_not_load_is_left_as_it_is(deltad: Deltad, config: Path) -> None:
    deltad("keys", "trust", PUBLIC, "--config", config)
    before = sorted(config.parent.iterdir()), config.read_bytes()
    again = deltad("keys", "trust", PUBLIC, "--config", config)
    assert again.code == 78
    assert "each value once" in again.err
    wrong = deltad("keys", "trust", PUBLIC, "--config", config, "--run", "Not A Run")
    assert wrong.code == 78
    assert (sorted(config.parent.iterdir()), config.read_bytes()) == before


def test_what_is_no_key_is_refused(deltad: Deltad, config: Path) -> None:
    ended = deltad("keys", "trust", "ed25519:abc", "--config", config)
    assert ended.code == 65
    assert "deltad keys show" in ended.err


def test_rotating_keeps_the_old_key_under_its_id(deltad: Deltad, tmp_path: Path) -> None:
    file = tmp_path / "k"
    deltad("keys", "new", file)
    old = KeyFile(file).read().public
    ended = deltad("keys", "rotate", file)
    assert ended.code == 0
    new = KeyFile(file).read().public
    assert new != old
    assert KeyFile(file.with_name(f"k.{old.id}")).read().public == old
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["k", f"k.{old.id}"])
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_a_key_file_that_others_may_write_or_that_holds_no_key_is_refused(deltad: Deltad, tmp_path: Path) -> None:
    file = tmp_path / "k"
    file.write_text("hunter2")
    file.chmod(0o600)
    ended = deltad("keys", "show", file)
    assert ended.code == 78
    assert "Ed25519" in ended.err
    assert "hunter2" not in ended.err + ended.out
    deltad("keys", "new", tmp_path / "open")
    (tmp_path / "open").chmod(0o666)
    assert "chmod 600" in deltad("keys", "show", tmp_path / "open").err
