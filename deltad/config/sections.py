"""The sections of the file and their keys: what each means, its default, and what it may hold.

Parses nothing: every field carries the parser of its key. Invariant: a key that is not here is not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from deltad.config import values
from deltad.config.credentials_file import CredentialsFile
from deltad.config.key_file import KeyFile
from deltad.config.tls import TlsFiles
from deltad.config.token_file import TokenFile
from deltad.config.values import Address
from deltad.delta.keys import PublicKey
from deltad.limits import DEVICE_MEMORY_BYTES
from deltad.protocol.access import Right
from deltad.types import RunId, Variant, parse_daemon_name, parse_run, parse_variant

RIGHTS = tuple(right.value for right in Right)
_ALL = "*"
_CONNECTIONS = 64
_LEAST_RATE = 1 << 20
_DEVICES = 1024
_THREADS = 256
_DEVICE_MEMORY = 1 << 30
"""The least with which a GPU can hold one of the largest frames, old and new, and what it may turn into."""


def _reads(parser: values.Parser, shows: Callable[[Any], object] = values.shown) -> Mapping[str, Any]:
    """What a key may hold, and how its value is written back."""
    return {"parser": parser, "shows": shows}


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """`[daemon]`: who this daemon is and where it keeps its things.

    `name` (required): unique among the daemons that talk to each other; spelled like a run id.
    `store`: the directory of the durable store; created if missing. Default `/var/lib/deltad`.
    `socket`: the Unix socket of the local API. Default `/run/deltad/deltad.sock`.
    `derive_rate`: how many bytes a second may be read, on average, for making skip deltas and anchors in the
    background; `0B` makes none. Default `32MiB`.
    `group`: the group whose members may use the socket, beside root and the daemon's own user. Default ``""``.
    """

    name: str = field(metadata=_reads(values.named(parse_daemon_name)))
    store: Path = field(default=Path("/var/lib/deltad"), metadata=_reads(values.path))
    socket: Path = field(default=Path("/run/deltad/deltad.sock"), metadata=_reads(values.path))
    derive_rate: int = field(default=32 << 20, metadata=_reads(values.size(0), values.size_text))
    group: str = field(default="", metadata=_reads(values.words))


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """`[relay]`: serving other daemons. Off unless `listen` is given.

    `listen`: the address that other daemons pull from, such as `0.0.0.0:7700`.
    `token_file`: the file with a bearer token that may read all runs. Not needed where a `[[token]]` or a `[[peer]]`
    may read. Default ``""``.
    `certificate`: the certificate (a chain, PEM) to serve TLS 1.3 with; without one the relay speaks in clear.
    Default ``""``.
    `key`: the file with its private key. Default ``""``.
    `client_ca`: the authority whose certificate every caller must show. Default ``""``.
    """

    listen: Address = field(metadata=_reads(values.address))
    token_file: TokenFile | None = field(default=None, metadata=_reads(values.optional(values.token_file)))
    certificate: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    key: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    client_ca: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))

    @property
    def tls(self) -> TlsFiles | None:
        """None where it speaks in clear."""
        return TlsFiles(self.certificate, self.key, self.client_ca) if self.certificate else None


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """`[local]`: the local API over TLS 1.3, for ranks in other containers or on other hosts. Off unless `listen` is
    given. It recognises nobody without a `[[token]]` or a `[[peer]]`.

    `listen`: the address, such as `0.0.0.0:7702`.
    `certificate` (required): the certificate (a chain, PEM) to serve with.
    `key` (required): the file with its private key.
    `client_ca`: the authority whose certificate every caller must show. Default ``""``.
    """

    listen: Address = field(metadata=_reads(values.address))
    certificate: Path = field(metadata=_reads(values.path))
    key: Path = field(metadata=_reads(values.path))
    client_ca: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))

    @property
    def tls(self) -> TlsFiles:
        return TlsFiles(self.certificate, self.key, self.client_ca)


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """`[[token]]`: a bearer token, and what whoever has it may do, at the relay and at the local API.

    `file` (required): the file with the token.
    `scope`: `read` pulls versions and reports what is served; `publish` publishes; `control` moves targets, pins,
    pulls and verifies; `administer` is all of it, and what is about the daemon itself. Or a list. Default `["read"]`.
    `runs`: the run ids that it is for, or `["*"]` for all. Default `["*"]`.
    `name`: what its bearer is called in records of who did what. Default ``"token"``.
    """

    file: TokenFile = field(metadata=_reads(values.token_file))
    scope: tuple[str, ...] = field(default=("read",), metadata=_reads(values.choices(*RIGHTS)))
    runs: tuple[str, ...] = field(default=("*",), metadata=_reads(values.run_names))
    name: str = field(default="token", metadata=_reads(values.words))


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """`[[peer]]`: whom a certificate names, and what they may do. It needs a `client_ca` that certifies them.

    `name` (required): a DNS name among the certificate's subject alternative names, exactly.
    `scope`: as in `[[token]]`. Default `["read"]`.
    `runs`: the run ids that it is for, or `["*"]` for all. Default `["*"]`.
    """

    name: str = field(metadata=_reads(values.host_name))
    scope: tuple[str, ...] = field(default=("read",), metadata=_reads(values.choices(*RIGHTS)))
    runs: tuple[str, ...] = field(default=("*",), metadata=_reads(values.run_names))


@dataclass(frozen=True, slots=True)
class SigningConfig:
    """`[signing]`: vouching for what is published and derived here. Off unless `key_file` is given.

    `key_file` (required): the file with the private key, as `deltad keys new` makes it.
    """

    key_file: KeyFile = field(metadata=_reads(values.key_file))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """`[metrics]`: the operator's page, health and metrics over HTTP. Off unless `listen` is given.

    `listen`: the address to serve them on, such as `127.0.0.1:7701`: the page at `/`, the same as JSON at
    `/status.json`, and `/healthz`, `/readyz` and `/metrics`. It asks for no token.
    `stale_after`: for how long no new version of a run may come before `/readyz` says no; `0s` is for ever. Default
    `0s`.
    """

    listen: Address = field(metadata=_reads(values.address))
    stale_after: float = field(default=0.0, metadata=_reads(values.duration(0.0), values.duration_text))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`[[run]]`: a training run that is published here.

    `id` (required): the run's id: 1 to 64 of `a-z 0-9 . _ -`, starting with a letter or digit.
    `variant`: the name of the precision that is published. Default `bf16`.
    `coder`: how deltas are coded. `blind` is the fastest; `fast`, `mid` and `dense` code by context, each in
    fewer bytes and more time than the one before; `auto` chooses by what the regions below pull at, and
    takes `dense` until that is known. Default `auto`.
    `keep_versions`: how many of its versions are kept; `0` is no bound. Each bound that is given holds; the newest
    version, what is held, pinned or in use, and what leads there from an anchor, are kept in any case. Default 0.
    `keep_for`: for how long its versions are kept; `0s` is no bound. Default `0s`.
    `keep_bytes`: how many bytes of it are kept, such as `500GiB`; `0B` is no bound. Default `0B`.
    `derived_bytes`: how many bytes the skip deltas and anchors that are made here may take; `0B` is half of what is
    free above the reserve. Default `0B`.
    """

    id: RunId = field(metadata=_reads(values.named(parse_run)))
    variant: Variant = field(default=Variant("bf16"), metadata=_reads(values.named(parse_variant)))
    coder: Literal["auto", "blind", "fast", "mid", "dense"] = field(
        default="auto", metadata=_reads(values.choice("auto", "blind", "fast", "mid", "dense"))
    )
    keep_versions: int = field(default=0, metadata=_reads(values.count(0, 1 << 31)))
    keep_for: float = field(default=0.0, metadata=_reads(values.duration(0.0), values.duration_text))
    keep_bytes: int = field(default=0, metadata=_reads(values.size(0), values.size_text))
    derived_bytes: int = field(default=0, metadata=_reads(values.size(0), values.size_text))


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """`[[watch]]`: a directory in which a trainer writes the checkpoints of one run.

    `run` (required): the id of a `[[run]]` in the same file; one watch a run.
    `directory` (required): the directory to watch; it may appear later.
    `pattern`: the checkpoints' path below it. `{number}` stands for the version's number (`step_{number}`,
    `checkpoint-{number}`, `global_step_{number}/actor`). Without it, it is one directory that the trainer
    overwrites each time (`.` for the watched directory itself). Default `step_{number}`.
    `publish_as`: `source` publishes the bits as written; `bf16` rounds to bfloat16. Default `source`.
    `quiet`: how long a complete checkpoint must stand still before it is read. Default `1s`.
    `rescan`: how often the directory is read again, whatever the file system's events say. Default `5s`.
    `on_conflict`: what to do with other bytes under a number that was published: `refuse` them, or open
    a `new_epoch`. A number that was let go since is refused in any case: it cannot be compared. Default `refuse`.
    """

    run: RunId = field(metadata=_reads(values.named(parse_run)))
    directory: Path = field(metadata=_reads(values.path))
    pattern: str = field(default="step_{number}", metadata=_reads(values.pattern))
    publish_as: Literal["source", "bf16"] = field(default="source", metadata=_reads(values.choice("source", "bf16")))
    quiet: float = field(default=1.0, metadata=_reads(values.duration(0.0), values.duration_text))
    rescan: float = field(default=5.0, metadata=_reads(values.duration(0.01), values.duration_text))
    on_conflict: Literal["refuse", "new_epoch"] = field(
        default="refuse", metadata=_reads(values.choice("refuse", "new_epoch"))
    )


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """`[[upstream]]`: a daemon to pull versions from.

    `url` (required): its relay, such as `https://trainer-border:7700`, or `http://` where it speaks in clear.
    `token_file`: the file with the bearer token that it asks for. Not needed with `certificate`. Default ``""``.
    `ca`: the authority that certified it; without one, those that the host trusts count. Default ``""``.
    `certificate`: the certificate (a chain, PEM) to show it. Default ``""``.
    `key`: the file with its private key. Default ``""``.
    `name`: the DNS name that its certificate must be for, where that is not the host in `url`. Default ``""``.
    `runs`: the run ids to pull, or `["*"]` for all that it has. Default `["*"]`.
    `connections`: how many connections to it are used at once at the most, 1 to 64. Default 16.
    """

    url: str = field(metadata=_reads(values.url))
    token_file: TokenFile | None = field(default=None, metadata=_reads(values.optional(values.token_file)))
    ca: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    certificate: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    key: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    name: str | None = field(default=None, metadata=_reads(values.optional(values.host_name)))
    runs: tuple[str, ...] = field(default=("*",), metadata=_reads(values.run_names))
    connections: int = field(default=16, metadata=_reads(values.count(1, _CONNECTIONS)))

    @property
    def tls(self) -> TlsFiles | None:
        """None where it is spoken to in clear."""
        return TlsFiles(self.certificate, self.key, self.ca) if self.url.startswith("https:") else None


@dataclass(frozen=True, slots=True)
class LeadConfig:
    """`[[lead]]`: the daemon on another host that makes the versions of a run which this host's ranks publish from
    memory. What they hand over here is handed on to it.

    `run` (required): the run's id; a [[run]] there, and not here.
    `url` (required): its local API, the [local] there, such as `https://trainer-1:7702`.
    `token_file`: the file with a bearer token of its scope `publish`. Not needed with `certificate`. Default ``""``.
    `ca`: the authority that certified it; without one, those that the host trusts count. Default ``""``.
    `certificate`: the certificate (a chain, PEM) to show it. Default ``""``.
    `key`: the file with its private key. Default ``""``.
    `name`: the DNS name that its certificate must be for, where that is not the host in `url`. Default ``""``.
    """

    run: RunId = field(metadata=_reads(values.named(parse_run)))
    url: str = field(metadata=_reads(values.url))
    token_file: TokenFile | None = field(default=None, metadata=_reads(values.optional(values.token_file)))
    ca: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    certificate: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    key: Path | None = field(default=None, metadata=_reads(values.optional(values.path)))
    name: str | None = field(default=None, metadata=_reads(values.optional(values.host_name)))

    @property
    def tls(self) -> TlsFiles:
        return TlsFiles(self.certificate, self.key, self.ca)


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """`[[bucket]]`: object storage as a relay: a daemon puts runs there, and others pull them from there.

    `url` (required): the bucket and the prefix: `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, or
    `file:///directory`. One daemon puts runs below a prefix.
    `publish`: the run ids that are kept there, or `["*"]` for all that a [[run]] declares. Default `[]`.
    `pull`: the run ids that are pulled from there, or `["*"]` for all. Default `[]`.
    `credentials_file`: a file with lines like `AWS_ACCESS_KEY_ID=…`, which set what the provider's variables in the
    daemon's environment else would: keys, region, endpoint. Default ``""``.
    `poll`: how often it is asked for news. Default `2s`.
    `grace`: for how long what no version there needs any more stays for those that are reading it. Default `1h`.
    """

    url: str = field(metadata=_reads(values.bucket_url))
    publish: tuple[str, ...] = field(default=(), metadata=_reads(values.run_names_or_none))
    pull: tuple[str, ...] = field(default=(), metadata=_reads(values.run_names_or_none))
    credentials_file: CredentialsFile | None = field(default=None, metadata=_reads(values.credentials_file))
    poll: float = field(default=2.0, metadata=_reads(values.duration(0.01), values.duration_text))
    grace: float = field(default=3600.0, metadata=_reads(values.duration(0.0), values.duration_text))

    def publishes(self, run: RunId, *, declared: bool) -> bool:
        """Whether a run is kept there; `declared` tells whether it is one of this daemon's own."""
        return run in self.publish or (declared and _ALL in self.publish)


@dataclass(frozen=True, slots=True)
class HotLoadConfig:
    """`[[hot_load]]`: a deployment into which clients of the hot-load APIs of CoreWeave and Fireworks load snapshots.
    Both are served where the local API is; a caller needs the scope `publish`.

    `deployment` (required): the deployment's id, as those clients name it.
    `run` (required): the `[[run]]` whose versions the snapshots become; one deployment a run.
    `url` (required): the bucket and the prefix below which they upload, `<url>/<identity>/`; as in `[[bucket]]`.
    `account`: the account that it is in, for clients of Fireworks. Default `deltad`.
    `credentials_file`: as in `[[bucket]]`. Default ``""``.
    `timeout`: for how long a load waits for all replicas to be verified before it has failed. Default `30m`.
    """

    deployment: str = field(metadata=_reads(values.named(parse_daemon_name)))
    run: RunId = field(metadata=_reads(values.named(parse_run)))
    url: str = field(metadata=_reads(values.bucket_url))
    account: str = field(default="deltad", metadata=_reads(values.named(parse_daemon_name)))
    credentials_file: CredentialsFile | None = field(default=None, metadata=_reads(values.credentials_file))
    timeout: float = field(default=1800.0, metadata=_reads(values.duration(1.0), values.duration_text))


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """`[[pace]]`: a cap on what is pulled and put into buckets. Each that concerns some bytes holds for them.

    `rate` (required): how many bytes a second may pass, at least `1MiB`. What is not an object never waits.
    `run`: the id of the run that it is for; `""` is all together. Default ``""``.
    `peer`: the `url` of the upstream or bucket that it is for; `""` is all together. Default ``""``.
    `since`: the time of day, on this host's clock, from which it holds. Default `00:00`.
    `until`: the time of day until which it holds; where both are equal it always does. Default `00:00`.
    """

    rate: int = field(metadata=_reads(values.size(_LEAST_RATE), values.size_text))
    run: str = field(default="", metadata=_reads(values.run_or_all))
    peer: str = field(default="", metadata=_reads(values.peer_url))
    since: int = field(default=0, metadata=_reads(values.time_of_day, values.time_text))
    until: int = field(default=0, metadata=_reads(values.time_of_day, values.time_text))


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`[[fleet]]`: how the replicas of a run take a new version.

    `run` (required): a run that is declared here or pulled from an upstream; one fleet a run.
    `policy`: `each` lets every replica commit as soon as it is ready. Default `each`.
    `verify`: `after_resume` reads the served weights back once generation goes on. Default `after_resume`.
    """

    run: RunId = field(metadata=_reads(values.named(parse_run)))
    policy: Literal["each"] = field(default="each", metadata=_reads(values.choice("each")))
    verify: Literal["after_resume"] = field(default="after_resume", metadata=_reads(values.choice("after_resume")))


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """`[[trust]]`: a key whose signatures are believed. Of a run with any such key nothing unsigned is taken.

    `key` (required): the public key, as `deltad keys show` prints it.
    `scope`: `publish` vouches for versions and for what their publisher derives; `derive` for derived edges alone:
    skip deltas and anchors that a daemon made. Or a list of both. `none` vouches for nothing: the key is revoked, and
    the run demands a signature all the same. Default `["publish"]`.
    `runs`: the run ids that it speaks for, or `["*"]` for all. Default `["*"]`.
    `name`: what it is called in messages. Default ``""``.
    """

    key: PublicKey = field(metadata=_reads(values.public_key))
    scope: tuple[str, ...] = field(default=("publish",), metadata=_reads(values.choices("publish", "derive", "none")))
    runs: tuple[str, ...] = field(default=("*",), metadata=_reads(values.run_names))
    name: str = field(default="", metadata=_reads(values.words))

    def speaks_for(self, run: str) -> bool:
        return "*" in self.runs or run in self.runs


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """`[backend]`: what computes diffs and digests.

    `kind`: `auto` takes the fastest backend that works on this host; `cupy` (a GPU), `numba` and `numpy` name one.
    Default `auto`.
    `device`: the index of the GPU, as CUDA counts. Default 0.
    `memory_limit`: how much of the GPU's memory may be taken, such as `1536MiB`. Default `2GiB`.
    `threads`: how many frames are worked on at a time, each of which takes up to 60 MiB; 0 is as many as there
    are processors, at most 2. Default 0.
    """

    kind: Literal["auto", "cupy", "numba", "numpy"] = field(
        default="auto", metadata=_reads(values.choice("auto", "cupy", "numba", "numpy"))
    )
    device: int = field(default=0, metadata=_reads(values.count(0, _DEVICES - 1)))
    memory_limit: int = field(
        default=DEVICE_MEMORY_BYTES, metadata=_reads(values.size(_DEVICE_MEMORY), values.size_text)
    )
    threads: int = field(default=0, metadata=_reads(values.count(0, _THREADS)))


@dataclass(frozen=True, slots=True)
class ScrubConfig:
    """`[scrub]`: reading all that is stored again and again, so that rot is found and healed.

    `every`: in how long all chunks and the whole mirror are read once; `0s` reads nothing. Default `168h`.
    `budget`: how many bytes a second are read for it at most. Default `16MiB`.
    """

    every: float = field(default=168 * 3600.0, metadata=_reads(values.duration(0.0), values.duration_text))
    budget: int = field(default=16 << 20, metadata=_reads(values.size(1 << 10), values.size_text))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file. `relay`, `metrics`, `signing` and `local` are None where they are off. `path` is the file's."""

    path: Path
    daemon: DaemonConfig
    relay: RelayConfig | None
    metrics: MetricsConfig | None
    signing: SigningConfig | None
    local: LocalConfig | None
    runs: tuple[RunConfig, ...]
    watches: tuple[WatchConfig, ...]
    upstreams: tuple[UpstreamConfig, ...]
    leads: tuple[LeadConfig, ...]
    buckets: tuple[BucketConfig, ...]
    hot_loads: tuple[HotLoadConfig, ...]
    paces: tuple[PaceConfig, ...]
    fleets: tuple[FleetConfig, ...]
    trusts: tuple[TrustConfig, ...]
    tokens: tuple[TokenConfig, ...]
    peers: tuple[PeerConfig, ...]
    backend: BackendConfig
    scrub: ScrubConfig

    def run(self, run: RunId) -> RunConfig | None:
        """The `[[run]]` of this id, if there is one."""
        return next((found for found in self.runs if found.id == run), None)

    def fleet(self, run: RunId) -> FleetConfig:
        """The `[[fleet]]` of this run, or the defaults."""
        return next((found for found in self.fleets if found.run == run), FleetConfig(run))

    def pulls(self, run: RunId) -> bool:
        """Whether some `[[upstream]]` or `[[bucket]]` brings this run."""
        return any(_ALL in runs or run in runs for runs in self._pulled())

    def names(self, run: RunId) -> bool:
        """Whether some `[[upstream]]` or `[[bucket]]` brings this run by its name."""
        return any(run in runs for runs in self._pulled())

    def _pulled(self) -> list[tuple[str, ...]]:
        return [*(upstream.runs for upstream in self.upstreams), *(bucket.pull for bucket in self.buckets)]


TABLES: dict[str, type[Any]] = {
    "daemon": DaemonConfig,
    "relay": RelayConfig,
    "metrics": MetricsConfig,
    "signing": SigningConfig,
    "local": LocalConfig,
    "backend": BackendConfig,
    "scrub": ScrubConfig,
}
LISTS: dict[str, type[Any]] = {
    "run": RunConfig,
    "watch": WatchConfig,
    "upstream": UpstreamConfig,
    "lead": LeadConfig,
    "bucket": BucketConfig,
    "hot_load": HotLoadConfig,
    "pace": PaceConfig,
    "fleet": FleetConfig,
    "trust": TrustConfig,
    "token": TokenConfig,
    "peer": PeerConfig,
}


def keys(section: type[Any]) -> tuple[Field[Any], ...]:
    return fields(section)


def brackets(section: str) -> str:
    return f"[[{section}]]" if section in LISTS else f"[{section}]"
