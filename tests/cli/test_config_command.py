"""`deltad config`: what it says of good files, and of every kind of bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.config import load_config
from tests.cli.terminal import Deltad

GOOD = """
[daemon]
name = "border-a"
store = "store"
socket = "d.sock"
[relay]
listen = "127.0.0.1:0"
token_file = "token"
[[run]]
id = "policy"
[[watch]]
run = "policy"
directory = "checkpoints"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    token = tmp_path / "token"
    token.write_text("s3cret-s3cret\n")
    token.chmod(0o600)
    return tmp_path


def written(directory: Path, text: str) -> Path:
    file = directory / "deltad.toml"
    file.write_text(text)
    return file


def test_a_good_file_is_said_to_be_good_in_a_few_lines(deltad: Deltad, directory: Path) -> None:
    ended = deltad("config", "check", written(directory, GOOD))
    assert ended.code == 0
    assert "can be used" in ended.out
    assert "border-a" in ended.out
    assert "relay on 127.0.0.1:0" in ended.out
    assert "1 run, 1 watched directory, 0 upstreams" in ended.out
    assert deltad("config", "check", "--json", directory / "deltad.toml").reply["valid"] is True


def test_what_is_shown_loads_to_the_same_configuration_and_hides_the_token(deltad: Deltad, directory: Path) -> None:
    file = written(directory, GOOD)
    ended = deltad("config", "show", file)
    assert ended.code == 0
    assert "s3cret" not in ended.out
    again = directory / "again.toml"
    again.write_text(ended.out)
    assert load_config(again).watches == load_config(file).watches
    assert load_config(again).daemon == load_config(file).daemon
    assert deltad("config", "show", "--json", file).reply["watch"][0]["pattern"] == "step_{number}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("socket", "sokcet"), ["daemon.sokcet", "'socket'"]),
        (GOOD + 'quiet = "2 fortnights"\n', ["quiet", "a duration such as"]),
        (GOOD + "[[upstreem]]\n", ["upstreem", "[[upstream]]"]),
        ("[daemon", ["TOML"]),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_key_and_the_nearest_valid_one(
    text: str, words: list[str], deltad: Deltad, directory: Path
) -> None:
    file = written(directory, text)
    for command in (["config", "check"], ["config", "show"], ["serve", "--config"], ["status", "--config"]):
        deltad(*command, file).assert_refused(78, str(file), *words)


def test_all_keys_are_listed_with_default_and_meaning(deltad: Deltad) -> None:
    ended = deltad("config", "keys")
    assert ended.code == 0
    for words in ("[metrics] the operator's page", "[[fleet]]", 'rescan       "5s"', "listen       required", "512MiB"):
        assert words in ended.out
    sections = deltad("config", "keys", "--json").reply["sections"]
    assert [section["name"] for section in sections][:2] == ["[daemon]", "[relay]"]


def test_a_token_that_all_may_read_is_a_warning_and_no_refusal(deltad: Deltad, directory: Path) -> None:
    file = written(directory, GOOD)
    (directory / "token").write_text("0123456789abcdef")
    assert "warning" not in deltad("config", "check", file).out
    (directory / "token").chmod(0o644)
    ended = deltad("config", "check", file)
    assert ended.code == 0
    assert f"warning: token file {directory}/token: everybody on this host may read it" in ended.out
    assert len(deltad("config", "check", "--json", file).reply["warnings"]) == 1


def test_a_wrong_token_file_is_one_line_that_names_it(deltad: Deltad, directory: Path) -> None:
    file = written(directory, GOOD)
    token = directory / "token"
    token.write_text("two words\n")
    deltad("config", "check", file).assert_refused(78, str(token))
    token.unlink()
    deltad("serve", "--config", file).assert_refused(78, str(token), "a readable file")


def test_a_missing_file_is_one_line_that_names_it(deltad: Deltad, tmp_path: Path) -> None:
    deltad("config", "check", tmp_path / "no.toml").assert_refused(78, f"{tmp_path}/no.toml", "a readable file")


def test_the_daemon_is_found_by_its_configuration(deltad: Deltad, directory: Path) -> None:
    deltad("status", "--config", written(directory, GOOD)).assert_refused(69, f"{directory}/d.sock")
