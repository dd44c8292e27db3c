"""Every finding of the doctor, over facts that are made up: what is good, what is not, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deltad.config import Config, load_config
from deltad.delta.keys import SigningKey
from deltad.limits import DEFAULT_LIMITS, MIB
from deltad.ops.doctor import Facts, Finding, Level, examine
from deltad.ops.doctor.facts import Ceilings, Clock, Disk, Place, Running, Tcp, Watched
from deltad.ops.doctor.network import ASSUMED_RATE, window_for, windows_carry
from deltad.ops.doctor.space import NEXT, grows_by
from deltad.store.look import Look, RecentRun

GIB = 1 << 30
KEY = SigningKey.from_seed(bytes(32))
NOW = 1_700_000_000.0
EXT4, NFS, TMPFS, STRANGE = 0xEF53, 0x6969, 0x01021994, 0x12345
STORE = Path("/srv/store")
RECENT = RecentRun("r", held=20, deltas=(4 * MIB, 6 * MIB), anchors=(GIB,), weight_bytes=2 * GIB, created=(NOW - 60,))
SOUND = Facts(
    user=1000,
    store=Place(STORE, owner=1000),
    store_parent=Place(STORE, owner=1000),
    look=Look("deltad store 2\n", ("FORMAT", "lock"), 9 * GIB, (RECENT,)),
    disk=Disk(STORE, EXT4, free=1000 * GIB, free_inodes=10**6, reflink=True, syncs=(0.001, 0.002, 0.003)),
    socket=Place(Path("/run/deltad"), owner=1000),
    clock=Clock(NOW, synchronised=True),
    running=Running(77, answers=True, clock_jump=0.5),
    ceilings=Ceilings(True, 65_536, None, 8 * GIB, 64 * GIB, 500_000, 10, 128, 3),
    tcp=Tcp(64 * MIB, 64 * MIB, "bbr", ("bbr", "cubic"), False),
    watched=(Watched(Place(Path("/checkpoints"), owner=1000, file_system=EXT4), 40),),
)
BASE = f"""
[daemon]
name = "a"
store = "/srv/store"
socket = "/run/deltad/deltad.sock"
[relay]
listen = "127.0.0.1:7700"
token_file = "token"
[[watch]]
run = "r"
directory = "/checkpoints"
[[upstream]]
url = "https://far:7700"
connections = 4
token_file = "token"
[[trust]]
key = "{KEY.public}"
[signing]
key_file = "border.key"
[[run]]
id = "r"
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


def configured(home: Path, run: str = "keep_versions = 50\n", more: str = "") -> Config:
    (home / "token").write_text("0123456789abcdef")
    (home / "token").chmod(0o600)
    (home / "border.key").write_bytes(KEY.pem())
    (home / "border.key").chmod(0o600)
    (home / "deltad.toml").write_text(BASE + run + more)
    return load_config(home / "deltad.toml")


def bad(config: Config, facts: Facts) -> list[Finding]:
    """All that is worse than good, the worst first."""
    return [found for found in examine(config, facts) if found.level is not Level.OK]


def test_a_sound_host_is_told_so_part_by_part(config: Config) -> None:
    found = examine(config, SOUND)
    assert bad(config, SOUND) == []
    about = {finding.about for finding in found}
    parts = {"store", "daemon", "disk", "reflink", "sync", "space", "permissions", "limits", "memory", "inotify"}
    assert parts | {"clock", "link to https://far:7700", "regions that pull from here", "TCP"} == about


LOOK, DISK, CEILINGS, TCP = SOUND.look, SOUND.disk, SOUND.ceilings, SOUND.tcp


def of_format(content: str) -> Look:
    return replace(LOOK, format=content)


ONE_OFF: list[tuple[dict[str, object], Level, str, tuple[str, ...]]] = [
    # The store.
    ({"store": Place(STORE, is_directory=False, owner=1000)}, Level.ERROR, "store", ("is a file", "another `store`")),
    ({"store": Place(STORE, owner=1000, error="Permission denied")}, Level.ERROR, "store", ("Permission denied",)),
    ({"look": of_format("deltad store 7\n")}, Level.ERROR, "store", ("'deltad store 7'", "nothing in it is")),
    ({"look": of_format("deltad store 2")}, Level.ERROR, "store", ("a format that this deltad reads",)),
    ({"look": replace(LOOK, format="", names=("thesis.tex",))}, Level.ERROR, "store", ("'thesis.tex' and no FORMAT",)),
    ({"look": replace(LOOK, runs=(replace(RECENT, unreadable=2),))}, Level.WARNING, "run r", ("2 records",)),
    ({"running": Running(77)}, Level.WARNING, "daemon", ("process 77 holds", "nothing answers", "is refused")),
    ({"running": Running(answers=True)}, Level.WARNING, "daemon", ("something answers", "nobody is seen")),
    # The file system under it.
    ({"disk": Disk(STORE, EXT4, frozenset({"ro"}), refused="Read-only")}, Level.ERROR, "disk", ("read-only", "dmesg")),
    ({"disk": Disk(STORE, EXT4, refused="Permission denied")}, Level.ERROR, "disk", ("Permission denied",)),
    ({"disk": replace(DISK, file_system=NFS)}, Level.WARNING, "disk", ("NFS, a network file system", "lock")),
    ({"disk": replace(DISK, file_system=TMPFS)}, Level.WARNING, "disk", ("tmpfs, in memory", "reboot")),
    ({"disk": replace(DISK, elsewhere=("packs",))}, Level.ERROR, "disk", ("packs lies on another file system",)),
    ({"disk": replace(DISK, reflink=False)}, Level.NOTE, "reflink", ("FICLONE is refused", "XFS or btrfs")),
    ({"disk": replace(DISK, syncs=(4e-6,) * 5)}, Level.WARNING, "sync", ("4 µs", "not to reach a disk")),
    ({"disk": replace(DISK, syncs=(0.2,) * 5)}, Level.WARNING, "sync", ("200 ms", "a faster or a less busy disk")),
    ({"disk": replace(DISK, options=frozenset({"nobarrier"}))}, Level.WARNING, "sync", ("nobarrier", "power cut")),
    # Space.
    (
        {"disk": replace(DISK, free=DEFAULT_LIMITS.disk_reserve_bytes)},
        Level.ERROR,
        "space",
        ("64.0 MiB free",),
    ),
    ({"disk": replace(DISK, free=66 * MIB)}, Level.ERROR, "space", ("room for one version",)),
    ({"disk": replace(DISK, free=GIB)}, Level.WARNING, "space", ("room for one version",)),
    ({"disk": replace(DISK, free=3 * GIB + 164 * MIB)}, Level.WARNING, "space", ("about 20 versions fit",)),
    ({"disk": replace(DISK, free_inodes=12)}, Level.WARNING, "space", ("12 free inodes",)),
    ({"look": replace(LOOK, runs=())}, Level.NOTE, "space", ("not known before there is one",)),
    # Permissions.
    ({"store": Place(STORE, owner=33, writable=False)}, Level.ERROR, "permissions", ("user 1000 may not write", "33")),
    ({"store": Place(STORE, owner=1000, mode=0o777)}, Level.ERROR, "permissions", ("everybody may write", "chmod 750")),
    ({"store": Place(STORE, owner=1000, mode=0o755)}, Level.NOTE, "permissions", ("may read /srv/store",)),
    ({"store": Place(STORE, owner=33)}, Level.WARNING, "permissions", ("belongs to user 33",)),
    ({"user": 0}, Level.NOTE, "permissions", ("belongs to user 1000, and you are user 0", "ask as the daemon's user")),
    ({"foreign_owned": (STORE / "packs",)}, Level.ERROR, "permissions", ("/srv/store/packs", "chown -R 1000")),
    ({"socket": Place(Path("/run"), writable=False)}, Level.ERROR, "socket", ("below /run", "RuntimeDirectory")),
    ({"socket": replace(SOUND.socket, mode=0o777)}, Level.WARNING, "socket", ("everybody may write", "of its own")),
    ({"socket": replace(SOUND.socket, mode=0o1777)}, Level.NOTE, "socket", ("mode 1777", "of its own")),
    # Limits.
    ({"ceilings": replace(CEILINGS, files=256)}, Level.WARNING, "limits", ("256 open files", "LimitNOFILE=65536")),
    ({"ceilings": replace(CEILINGS, files=64)}, Level.ERROR, "limits", ("64 open files of the running daemon",)),
    ({"ceilings": replace(CEILINGS, memory=100 * MIB)}, Level.ERROR, "memory", ("100 MiB", "MemoryMax")),
    ({"ceilings": replace(CEILINGS, memory=None, host_memory=MIB)}, Level.ERROR, "memory", ("this host has 1.00 MiB",)),
    # The clock.
    ({"clock": Clock(NOW, synchronised=False)}, Level.NOTE, "clock", ("nothing keeps it synchronised", "chrony")),
    ({"clock": Clock(NOW - 7200, synchronised=True)}, Level.WARNING, "clock", ("1 h 59 min from now", "behind")),
    ({"running": replace(SOUND.running, clock_jump=-3600.0)}, Level.WARNING, "clock", ("set back by 1 h since",)),
    ({"running": replace(SOUND.running, clock_jump=3600.0)}, Level.WARNING, "clock", ("set forward by 1 h since",)),
    # The network.
    ({"tcp": replace(TCP, receive=MIB)}, Level.WARNING, "link to https://far:7700", ("20.0 MiB/s", "tcp_rmem=")),
    ({"tcp": replace(TCP, receive=4 * MIB)}, Level.NOTE, "link to https://far:7700", ("80.0 MiB/s", "8388608")),
    ({"tcp": replace(TCP, send=MIB)}, Level.WARNING, "regions that pull from here", ("tcp_wmem",)),
    ({"tcp": replace(TCP, slow_start_after_idle=True)}, Level.NOTE, "TCP", ("tcp_slow_start_after_idle=0",)),
    ({"tcp": replace(TCP, congestion="cubic")}, Level.NOTE, "TCP", ("congestion control is cubic", "`sysctl -w")),
    ({"tcp": replace(TCP, congestion="reno", available=())}, Level.NOTE, "TCP", ("modprobe tcp_bbr",)),
    ({"doubts": ("token file t: can be guessed",)}, Level.WARNING, "configuration", ("can be guessed",)),
]


@pytest.mark.parametrize(("change", "level", "about", "words"), ONE_OFF, ids=lambda part: "")
def test_what_is_amiss_is_found_alone_and_named(
    change: dict[str, object], level: Level, about: str, words: tuple[str, ...], config: Config
) -> None:
    (found,) = bad(config, replace(SOUND, **change))  # type: ignore[arg-type]
    assert (found.level, found.about) == (level, about)
    for word in words:
        assert word in str(found)
    assert found.advice or about == "configuration", "what to do about it is said"


def watched(**change: object) -> dict[str, object]:
    (sound,) = SOUND.watched
    return {"watched": (replace(sound, place=replace(sound.place, **change)),)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "level", "word"),
    [
        (watched(exists=False), Level.NOTE, "not there yet"),
        (watched(is_directory=False), Level.ERROR, "a file"),
        (watched(readable=False), Level.ERROR, "may not read it"),
        (watched(owner=33), Level.NOTE, "read instead of mapped"),
        (watched(file_system=NFS), Level.NOTE, "on NFS: no events come"),
        (watched(file_system=STRANGE), Level.OK, ""),
    ],
)
def test_a_watched_directory_is_one_that_can_be_read_and_gives_events(
    change: dict[str, object], level: Level, word: str, config: Config
) -> None:
    found = bad(config, replace(SOUND, **change))  # type: ignore[arg-type]
    assert [(one.level, one.about) for one in found] == (
        [(level, "watched directory /checkpoints")] if level is not Level.OK else []
    )
    assert all(word in str(one) for one in found)


@pytest.mark.parametrize("scarce", [{"watches": 30}, {"instances": 3}])
def test_events_that_will_not_come_are_told_before_the_daemon_asks_for_them(
    scarce: dict[str, int], config: Config
) -> None:
    ceilings = replace(CEILINGS, **scarce)  # type: ignore[arg-type]
    (found,) = bad(config, replace(SOUND, running=Running(), ceilings=ceilings))
    assert (found.level, found.about) == (Level.WARNING, "inotify")
    assert "the rescan each 5.00 s" in found.advice
    assert bad(config, replace(SOUND, ceilings=replace(ceilings, watches_used=20))) == [], "it has them already"


def test_a_socket_path_that_no_unix_socket_can_have_is_an_error(tmp_path: Path) -> None:
    long = "/run/deltad/" + "x" * 100
    text = BASE.replace("/run/deltad/deltad.sock", long)
    configured(tmp_path)
    (tmp_path / "deltad.toml").write_text(text + "keep_versions = 50\n")
    (found,) = bad(load_config(tmp_path / "deltad.toml"), SOUND)
    assert (found.level, found.about) == (Level.ERROR, "socket")
    assert "112 bytes" in found.found


def test_before_the_first_start_a_store_that_can_be_made_is_good(config: Config) -> None:
    facts = replace(SOUND, store=Place(STORE, exists=False), look=Look(), running=Running())
    assert [(one.level, one.about) for one in bad(config, facts)] == [(Level.NOTE, "space")]
    refused = replace(facts, store_parent=Place(Path("/srv"), writable=False))
    assert bad(config, refused)[0].found.startswith("user 1000 may not write /srv (owner 0")


def test_what_is_unknown_is_called_neither_good_nor_bad(config: Config) -> None:
    unknown = replace(
        SOUND,
        disk=Disk(STORE, free=1000 * GIB),
        clock=Clock(NOW),
        running=Running(),
        ceilings=Ceilings(),
        tcp=Tcp(),
    )
    found = examine(config, unknown)
    assert [one for one in found if one.level is not Level.OK] == []
    about = {one.about for one in found}
    assert not about & {"limits", "memory", "inotify", "reflink", "sync", "TCP", "link to https://far:7700"}
    assert "unknown" in next(one.found for one in found if one.about == "clock")


def test_the_worst_comes_first(config: Config) -> None:
    facts = replace(SOUND, doubts=("weak",), clock=Clock(NOW, synchronised=False), foreign_owned=(STORE / "packs",))
    levels = [found.level for found in examine(config, facts)]
    assert levels[:3] == [Level.ERROR, Level.WARNING, Level.NOTE]
    assert set(levels[3:]) == {Level.OK}


@pytest.mark.parametrize(
    ("keep", "versions"),
    [("", NEXT), ("keep_versions = 50", 30), ("keep_versions = 5", 0), ('keep_for = "5m"', 10), ('keep_for = "1m"', 0)],
)
def test_a_run_grows_by_what_its_retention_does_not_let_go(keep: str, versions: int, tmp_path: Path) -> None:
    declared = configured(tmp_path, keep + "\n").runs[0]
    run = replace(RECENT, created=tuple(NOW + 10.0 * i for i in range(20)))
    assert grows_by(run, declared) == versions * 5 * MIB


def test_bytes_bound_the_growth_too_and_a_run_that_nothing_bounds_is_told_of(tmp_path: Path) -> None:
    config = configured(tmp_path, 'keep_bytes = "100MiB"\n')
    assert grows_by(RECENT, config.runs[0]) == 100 * MIB
    (found,) = bad(configured(tmp_path, ""), SOUND)
    assert (found.level, found.about) == (Level.NOTE, "retention of run r")
    assert "204,787 versions" in found.found
    pulled = replace(SOUND, look=replace(LOOK, runs=(replace(RECENT, run="pulled"),)))
    assert "declare it in a [[run]]" in bad(config, pulled)[0].advice


def test_a_measured_round_trip_replaces_the_assumed_one(config: Config) -> None:
    facts = replace(SOUND, tcp=replace(TCP, receive=MIB), round_trips={"https://far:7700": 0.002})
    link = next(found for found in examine(config, facts) if found.about == "link to https://far:7700")
    assert link.level is Level.OK
    assert "at 2 ms (measured)" in link.found


def test_a_host_without_links_is_asked_nothing_of_its_network(tmp_path: Path) -> None:
    configured(tmp_path)
    (tmp_path / "deltad.toml").write_text('[daemon]\nname = "a"\n')
    facts = replace(SOUND, tcp=Tcp(1, 1, "reno", (), True), watched=())
    found = examine(load_config(tmp_path / "deltad.toml"), facts)
    assert not {one.about for one in found} & {"TCP", "regions that pull from here", "inotify"}


@pytest.mark.parametrize(("connections", "round_trip"), [(1, 0.1), (4, 0.1), (8, 0.25)])
def test_the_window_that_is_asked_for_carries_the_assumed_rate(connections: int, round_trip: float) -> None:
    window = window_for(connections, round_trip)
    assert (
        windows_carry(window + 1, connections, round_trip)
        >= ASSUMED_RATE
        > windows_carry(window - 1, connections, round_trip)
    )


def test_what_others_on_the_network_could_read_or_do_is_noted(tmp_path: Path) -> None:
    config = configured(tmp_path)
    text = config.path.read_text().replace("127.0.0.1:7700", "0.0.0.0:7700").replace("https://far", "http://far")
    config.path.write_text(text[: text.index("[[trust]]")] + text[text.index("[signing]") :])
    exposed = bad(load_config(config.path), SOUND)
    assert {finding.level for finding in exposed} == {Level.NOTE}
    assert [finding.about for finding in exposed] == ["relay", "link to http://far:7700", "trust"]
    assert "versions of all runs are taken unsigned" in str(exposed[2])
