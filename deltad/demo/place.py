"""Where the demo lives: one work directory with two regions in it that share nothing, and their configuration.

It may not start anything. Its invariant: whatever is in `region-1` is named by no file of `region-2`, and the
other way round; between them there are only the addresses of the links.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deltad.errors import StoreError, UnavailableError, UsageError

RUN = "policy"
VARIANT = "bf16"
REPLICA = "replica-1"
STATE_FILE = "demo-state.json"

_SOCKET_PATH_BYTES = 100
"""Unix socket addresses hold 107 bytes; a store beside it needs a few for the directory's own files."""

_PORTS = range(20_000, 30_000)
"""Below what systems hand out for outgoing connections: a daemon that is started again finds its port free."""


@dataclass(frozen=True, slots=True)
class Region:
    """One region's files: nothing outside of `directory` belongs to it, but for a socket with too long a path."""

    name: str
    directory: Path
    socket: Path
    metrics: str

    @property
    def config(self) -> Path:
        """The daemon's configuration."""
        return self.directory / "deltad.toml"

    @property
    def token(self) -> Path:
        """The bearer token of the relay: the same secret in both regions, each in its own file."""
        return self.directory / "token"

    @property
    def checkpoints(self) -> Path:
        """What the trainer writes and the daemon watches; used in region 1 alone."""
        return self.directory / "checkpoints"

    @property
    def temporary(self) -> Path:
        """For the temporary files of the region's programs: they go when the region goes."""
        return self.directory / "tmp"

    @property
    def ready(self) -> Path:
        """What the replica writes once it serves; used in region 2 alone."""
        return self.directory / "replica-url"


@dataclass(frozen=True, slots=True)
class Place:
    """The work directory, both regions, and the addresses (`host:port`) of everything that listens."""

    directory: Path
    temporary: bool
    sockets: Path | None
    region_1: Region
    region_2: Region
    relay: str
    relay_link: str
    replica: str
    rollout_link: str

    @property
    def state_file(self) -> Path:
        """Process ids and addresses, for whoever wants to disturb the demo."""
        return self.directory / STATE_FILE

    def log(self, program: str) -> Path:
        """The log file of a program."""
        return self.directory / "logs" / f"{program}.log"

    def link_stats(self, program: str) -> Path:
        """Where a link keeps its counts."""
        return self.directory / "links" / f"{program}.json"

    def addresses(self) -> dict[str, str]:
        """Every address by what listens there."""
        return {
            "socket-a": str(self.region_1.socket),
            "socket-b": str(self.region_2.socket),
            "metrics-a": self.region_1.metrics,
            "metrics-b": self.region_2.metrics,
            "relay": self.relay,
            "relay-link": self.relay_link,
            "replica": self.replica,
            "rollout-link": self.rollout_link,
        }

    def remove(self) -> None:
        """Remove what is temporary."""
        if self.sockets is not None:
            shutil.rmtree(self.sockets, ignore_errors=True)
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def make_place(keep: Path | None) -> Place:
    """Create the work directory: `keep`, or a temporary one. Raises UsageError, StoreError, UnavailableError."""
    directory = Path(tempfile.mkdtemp(prefix="deltad-demo-")) if keep is None else keep.absolute()
    names = ("region-1", "region-2")
    if keep is not None and directory.is_dir() and (held := sorted(path.name for path in directory.iterdir())):
        raise UsageError(
            f"directory {directory}",
            expected="one that is absent or empty",
            found=held[0] if len(held) == 1 else f"{held[0]} and {len(held) - 1} more",
            hint="name another directory, or empty that one",
        )
    sockets = None
    if max(len(os.fsencode(directory / name / "deltad.sock")) for name in names) > _SOCKET_PATH_BYTES:
        sockets = Path(tempfile.mkdtemp(prefix="deltad-"))
    metrics_a, metrics_b, relay, relay_link, replica, rollout_link = (f"127.0.0.1:{p}" for p in _free_ports(6))
    region_1, region_2 = (
        Region(
            name=name,
            directory=directory / name,
            socket=sockets / f"{name}.sock" if sockets else directory / name / "deltad.sock",
            metrics=metrics,
        )
        for name, metrics in zip(names, (metrics_a, metrics_b), strict=True)
    )
    place = Place(directory, keep is None, sockets, region_1, region_2, relay, relay_link, replica, rollout_link)
    try:
        _write(place)
    except OSError as error:
        raise StoreError(f"directory {directory}", found=error.strerror or str(error)) from None
    return place


def _write(place: Place) -> None:
    place.directory.mkdir(parents=True, exist_ok=True)
    regions = (place.region_1.temporary, place.region_2.temporary, place.region_1.checkpoints)
    for directory in (place.log("x").parent, place.link_stats("x").parent, *regions):
        directory.mkdir(parents=True)
    token = secrets.token_urlsafe(32)
    for region, text in ((place.region_1, origin_config(place)), (place.region_2, remote_config(place))):
        region.config.write_text(text)
        descriptor = os.open(region.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")


def origin_config(place: Place) -> str:
    """The configuration of daemon A, beside the trainer."""
    region = place.region_1
    return f"""\
# The daemon beside the trainer: publishes what the trainer writes, and serves it to other regions.
[daemon]
name = "{region.name}"
store = "store"
socket = {json.dumps(str(region.socket))}

[relay]
listen = "{place.relay}"
token_file = "{region.token.name}"

[metrics]
listen = "{region.metrics}"

[[run]]
id = "{RUN}"
variant = "{VARIANT}"

[[watch]]
run = "{RUN}"
directory = "{region.checkpoints.name}"
pattern = "step_{{number}}"
quiet = "300ms"
rescan = "2s"
"""


def remote_config(place: Place) -> str:
    """The configuration of daemon B, beside the replica. It knows region 1 by the link's address alone."""
    region = place.region_2
    return f"""\
# The daemon beside the replica: pulls from the other region, through the slow link.
[daemon]
name = "{region.name}"
store = "store"
socket = {json.dumps(str(region.socket))}

[metrics]
listen = "{region.metrics}"

[[upstream]]
url = "http://{place.relay_link}"
token_file = "{region.token.name}"
runs = ["{RUN}"]

[[fleet]]
run = "{RUN}"
policy = "each"
verify = "after_resume"
"""


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now. Raises UnavailableError."""
    found: list[int] = []
    candidates = list(_PORTS)
    while len(found) < count:
        if not candidates:
            raise UnavailableError(f"ports {_PORTS.start} to {_PORTS.stop - 1} of 127.0.0.1", found="too few are free")
        port = candidates.pop(secrets.randbelow(len(candidates)))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
