"""The work directory: two regions that a real daemon could run in, and that share nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from deltad.config import load_config
from deltad.demo.place import make_place
from deltad.errors import StoreError, UsageError


def test_both_configurations_are_valid_and_meet_only_at_the_link(tmp_path: Path) -> None:
    place = make_place(tmp_path / "work")
    origin, remote = load_config(place.region_1.config), load_config(place.region_2.config)
    assert origin.watches[0].directory == place.region_1.checkpoints
    assert origin.daemon.socket == place.region_1.socket
    assert origin.relay is not None
    assert str(origin.relay.listen) == place.relay
    assert remote.daemon.socket == place.region_2.socket
    assert remote.relay is None
    assert [upstream.url for upstream in remote.upstreams] == [f"http://{place.relay_link}"]
    assert origin.relay.token_file.read() == remote.upstreams[0].token_file.read()
    for region, other in ((place.region_1, "region-2"), (place.region_2, "region-1")):
        assert other not in region.config.read_text()
        assert load_config(region.config).daemon.store.is_relative_to(region.directory)


def test_nobody_else_may_read_the_tokens(tmp_path: Path) -> None:
    place = make_place(tmp_path / "work")
    for region in (place.region_1, place.region_2):
        assert stat.S_IMODE(region.token.stat().st_mode) == 0o600


def test_every_address_is_another_one(tmp_path: Path) -> None:
    addresses = make_place(tmp_path / "work").addresses()
    assert len(set(addresses.values())) == len(addresses)


def test_the_files_of_an_earlier_demo_are_not_touched(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with pytest.raises(UsageError, match="expected one that is absent or empty, found links and 3 more"):
        make_place(tmp_path)
    place.remove()
    assert place.region_1.config.exists()


def test_a_directory_that_holds_anything_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(UsageError, match="found notes; name another directory"):
        make_place(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_temporary_place_is_removed_with_everything_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = make_place(None)
    assert place.directory.parent == tmp_path
    place.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_long_path_puts_the_sockets_where_their_addresses_fit(tmp_path: Path) -> None:
    place = make_place(tmp_path / ("deep" * 25))
    sockets = [load_config(region.config).daemon.socket for region in (place.region_1, place.region_2)]
    assert max(len(str(socket)) for socket in sockets) < 100
    assert len(set(sockets)) == 2
    place.remove()
    assert not sockets[0].parent.exists()
    assert place.region_1.config.exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file/work"):
        make_place(tmp_path / "file" / "work")
