"""One TOML file, parsed once into a frozen tree; whoever holds a `Config` need not check it again.

Reads the file and, once, each token file that it names; opens, binds and creates nothing. Invariant:
anything that is not understood in full (an unknown key, a unit, a run that nothing declares) refuses
the whole file with a `ConfigError` that names the file and the key. A secret lives in no object of
this module: `TokenFile` knows where the token is and reads it when asked.

Durations are whole numbers with a unit (`500ms`, `2s`, `5m`, `1h`) and are seconds in the tree.
Relative paths are relative to the directory of the file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from deltad.errors import ConfigError, UsageError
from deltad.types import RunId, Variant, parse_daemon_name, parse_run, parse_variant

Section = TypeVar("Section")

_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h)", re.ASCII)
_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})", re.ASCII)
_TOKEN = re.compile(rb"[!-~]{1,4096}")
_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address to listen on, written `host:port` or `[v6]:port`. Port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Where a bearer token is kept. The token itself is never held, shown or logged.

    The file holds one line of printable ASCII without blanks, and only its owner may write it.
    """

    path: Path

    def read(self) -> str:
        """The token as it stands in the file now, so that a rotated one is picked up. Raises ConfigError."""
        thing = f"token file {self.path}"
        try:
            # Not blocking, so that a FIFO in this place cannot hang the daemon.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mode = os.fstat(descriptor).st_mode
                content = os.read(descriptor, 8192).strip() if stat.S_ISREG(mode) else b""
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(thing, expected="a readable file", found=error.strerror or str(error)) from None
        if not stat.S_ISREG(mode):
            raise ConfigError(thing, expected="a regular file")
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                thing,
                expected="a file that only its owner may write",
                found=f"mode {stat.S_IMODE(mode):04o}",
                hint=f"run `chmod 600 {self.path}`",
            )
        if not content:
            raise ConfigError(thing, expected="a token", found="an empty file")
        if not _TOKEN.fullmatch(content):
            raise ConfigError(thing, expected="one line of at most 4096 printable ASCII characters without blanks")
        return content.decode("ascii")


class _RefusedError(Exception):
    """A value that a parser does not take; whoever knows the file and the key makes it a ConfigError."""

    def __init__(self, expected: str, found: str = "") -> None:
        self.expected = expected
        self.found = found


Parser = Callable[[object, Path], object]
"""From a TOML value and the directory of the file to the value in the tree. Raises `_RefusedError` or UsageError."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _RefusedError("a string")
    if "\0" in value:
        raise _RefusedError("a string without NUL")
    return value


def _named(parse: Callable[[str], object]) -> Parser:
    return lambda value, base: parse(_text(value))


def _path(value: object, base: Path) -> Path:
    if not _text(value):
        raise _RefusedError("a path")
    # Normalised by text alone: a symbolic link such as `current` must be followed when it is used.
    return Path(os.path.normpath(base / _text(value)))


def _token_file(value: object, base: Path) -> TokenFile:
    return TokenFile(_path(value, base))


def _duration(least: float) -> Parser:
    def parse(value: object, base: Path) -> float:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if not match:
            raise _RefusedError("a duration such as '500ms', '2s', '5m' or '1h'")
        seconds = int(match[1]) * _MILLISECONDS[match[2]] / 1000
        if seconds < least:
            raise _RefusedError(f"a duration of at least {_duration_text(least)}")
        return seconds

    return parse


def _duration_text(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    unit = next((unit for unit, size in _MILLISECONDS.items() if milliseconds and milliseconds % size == 0), "s")
    return f"{milliseconds // _MILLISECONDS[unit]}{unit}"


def _address(value: object, base: Path) -> Address:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if not match or int(match[2]) > 65535:
        raise _RefusedError("an address such as '127.0.0.1:7700' or '[::1]:7700'")
    return Address(match[1].strip("[]"), int(match[2]))


def _url(value: object, base: Path) -> str:
    expected = "a URL such as 'http://host:7700', without user, query or fragment"
    url = _text(value)
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise _RefusedError(expected) from None
    if not sound or "@" in parts.netloc or "?" in url or "#" in url or not re.fullmatch(r"[!-~]+", url):
        # What was found is not repeated: the part before an `@` may be a password.
        raise _RefusedError(expected, found="another form")
    return url.rstrip("/")


def _count(least: int, most: int) -> Parser:
    def parse(value: object, base: Path) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _RefusedError(f"a whole number from {least} to {most}")
        return value

    return parse


def _choice(*choices: str) -> Parser:
    def parse(value: object, base: Path) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _RefusedError(" or ".join(repr(choice) for choice in choices))
        return value

    return parse


def _pattern(value: object, base: Path) -> str:
    text = _text(value)
    around = text.replace("{number}", "", 1)
    if set(around) & set("{}") or {"", ".."} & set(text.split("/")):
        raise _RefusedError("a relative path with at most one '{number}', such as 'step_{number}'")
    return text


def _run_names(value: object, base: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise _RefusedError('a list of run ids, or ["*"] for all')
    names = tuple(_text(name) for name in value)
    if "*" in names and len(names) > 1:
        raise _RefusedError("either '*' or run ids, not both")
    return tuple(name if name == "*" else parse_run(name) for name in names)


def _reads(parser: Parser) -> Mapping[str, Any]:
    return {"parser": parser}


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """`[daemon]`: who this daemon is and where it keeps its things.

    `name` (required): unique among the daemons that talk to each other; spelled like a run id.
    `store`: the directory of the durable store; created if missing. Default `/var/lib/deltad`.
    `socket`: the Unix socket of the local API. Default `/run/deltad/deltad.sock`.
    """

    name: str = field(metadata=_reads(_named(parse_daemon_name)))
    store: Path = field(default=Path("/var/lib/deltad"), metadata=_reads(_path))
    socket: Path = field(default=Path("/run/deltad/deltad.sock"), metadata=_reads(_path))


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """`[relay]`: serving other daemons. Off unless `listen` is given.

    `listen`: the address that other daemons pull from, such as `0.0.0.0:7700`.
    `token_file` (required with `listen`): the file with the bearer token that they must present.
    """

    listen: Address = field(metadata=_reads(_address))
    token_file: TokenFile = field(metadata=_reads(_token_file))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """`[metrics]`: the operator's page, health and metrics over HTTP. Off unless `listen` is given.

    `listen`: the address to serve them on, such as `127.0.0.1:7701`. It asks for no token.
    """

    listen: Address = field(metadata=_reads(_address))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`[[run]]`: a training run that is published here.

    `id` (required): the run's id: 1 to 64 of `a-z 0-9 . _ -`, starting with a letter or digit.
    `variant`: the name of the precision that is published. Default `bf16`.
    `keep_versions`, `keep_for`, `keep_bytes`: how much of it is kept: how many versions, for how long, and how
    many bytes. Each bound that is given holds; the newest version, what is pinned or in use, and what leads
    there from an anchor, are kept in any case. Default `0`, `0s` and `0`, which are no bounds.
    """

    id: RunId = field(metadata=_reads(_named(parse_run)))
    variant: Variant = field(default=Variant("bf16"), metadata=_reads(_named(parse_variant)))
    keep_versions: int = field(default=0, metadata=_reads(_count(0, 1 << 31)))
    keep_for: float = field(default=0.0, metadata=_reads(_duration(0.0)))
    keep_bytes: int = field(default=0, metadata=_reads(_count(0, 1 << 62)))


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
    a `new_epoch`. Default `refuse`.
    """

    run: RunId = field(metadata=_reads(_named(parse_run)))
    directory: Path = field(metadata=_reads(_path))
    pattern: str = field(default="step_{number}", metadata=_reads(_pattern))
    publish_as: Literal["source", "bf16"] = field(default="source", metadata=_reads(_choice("source", "bf16")))
    quiet: float = field(default=1.0, metadata=_reads(_duration(0.0)))
    rescan: float = field(default=5.0, metadata=_reads(_duration(0.01)))
    on_conflict: Literal["refuse", "new_epoch"] = field(
        default="refuse", metadata=_reads(_choice("refuse", "new_epoch"))
    )


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """`[[upstream]]`: a daemon to pull versions from.

    `url` (required): its relay, such as `http://trainer-border:7700`.
    `token_file` (required): the file with the bearer token that it asks for.
    `runs`: the run ids to pull, or `["*"]` for all that it has. Default `["*"]`.
    `connections`: how many connections to it are used at once, 1 to 64. Default 4.
    """

    url: str = field(metadata=_reads(_url))
    token_file: TokenFile = field(metadata=_reads(_token_file))
    runs: tuple[str, ...] = field(default=("*",), metadata=_reads(_run_names))
    connections: int = field(default=4, metadata=_reads(_count(1, _CONNECTIONS)))


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`[[fleet]]`: how the replicas of a run take a new version.

    `run` (required): a run that is declared here or pulled from an upstream; one fleet a run.
    `policy`: `each` lets every replica commit as soon as it is ready. Default `each`.
    `verify`: `after_resume` reads the served weights back once generation goes on. Default `after_resume`.
    """

    run: RunId = field(metadata=_reads(_named(parse_run)))
    policy: Literal["each"] = field(default="each", metadata=_reads(_choice("each")))
    verify: Literal["after_resume"] = field(default="after_resume", metadata=_reads(_choice("after_resume")))


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """`[backend]`: what computes diffs and digests.

    `kind`: `auto` takes the best backend that works on this host; `numba` and `numpy` name one. Default `auto`.
    """

    kind: Literal["auto", "numba", "numpy"] = field(default="auto", metadata=_reads(_choice("auto", "numba", "numpy")))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file. `relay` and `metrics` are None where they are off. `path` is the file itself."""

    path: Path
    daemon: DaemonConfig
    relay: RelayConfig | None
    metrics: MetricsConfig | None
    runs: tuple[RunConfig, ...]
    watches: tuple[WatchConfig, ...]
    upstreams: tuple[UpstreamConfig, ...]
    fleets: tuple[FleetConfig, ...]
    backend: BackendConfig

    def run(self, run: RunId) -> RunConfig | None:
        """The `[[run]]` of this id, if there is one."""
        return next((found for found in self.runs if found.id == run), None)

    def fleet(self, run: RunId) -> FleetConfig:
        """The `[[fleet]]` of this run, or the defaults."""
        return next((found for found in self.fleets if found.run == run), FleetConfig(run))

    def pulls(self, run: RunId) -> bool:
        """Whether some `[[upstream]]` brings this run."""
        return any("*" in upstream.runs or run in upstream.runs for upstream in self.upstreams)


_TABLES: dict[str, type[Any]] = {
    "daemon": DaemonConfig,
    "relay": RelayConfig,
    "metrics": MetricsConfig,
    "backend": BackendConfig,
}
_LISTS: dict[str, type[Any]] = {
    "run": RunConfig,
    "watch": WatchConfig,
    "upstream": UpstreamConfig,
    "fleet": FleetConfig,
}


def load_config(path: Path) -> Config:
    """Read and check the file at `path`, token files included. Raises ConfigError; binds nothing."""
    path = path.absolute()
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"configuration {path}", expected="a readable file", found=error.strerror or str(error)
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration {path}", expected="TOML in UTF-8", found=str(error)) from None
    config = _Document(path, document).config()
    for token_file in [upstream.token_file for upstream in config.upstreams] + (
        [config.relay.token_file] if config.relay else []
    ):
        try:
            token_file.read()
        except ConfigError as error:
            raise ConfigError(
                f"configuration {path}: {error.thing}", expected=error.expected, found=error.found, hint=error.hint
            ) from None
    return config


class _Document:
    """A parsed TOML document on its way into the tree."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self._path = path
        self._document = document

    def config(self) -> Config:
        for name in self._document:
            if name not in _TABLES and name not in _LISTS:
                nearest = _nearest(name, [*_TABLES, *_LISTS])
                raise self._error(name, found="no such section", hint=f"the nearest valid one is {_brackets(nearest)}")
        config = Config(
            path=self._path,
            daemon=self._section("daemon", DaemonConfig, self._table("daemon")),
            relay=self._optional("relay", RelayConfig),
            metrics=self._optional("metrics", MetricsConfig),
            runs=self._sections("run", RunConfig),
            watches=self._sections("watch", WatchConfig),
            upstreams=self._sections("upstream", UpstreamConfig),
            fleets=self._sections("fleet", FleetConfig),
            backend=self._section("backend", BackendConfig, self._table("backend")),
        )
        self._cross_check(config)
        return config

    def _cross_check(self, config: Config) -> None:
        self._distinct("run", "id", (run.id for run in config.runs))
        self._distinct("watch", "run", (watch.run for watch in config.watches))
        self._distinct("upstream", "url", (upstream.url for upstream in config.upstreams))
        self._distinct("fleet", "run", (fleet.run for fleet in config.fleets))
        declared = [run.id for run in config.runs]
        for place, watch in enumerate(config.watches):
            if watch.run not in declared:
                raise self._undeclared("watch", place, watch.run, declared)
        for place, fleet in enumerate(config.fleets):
            if fleet.run not in declared and not config.pulls(fleet.run):
                raise self._undeclared("fleet", place, fleet.run, declared)

    def _table(self, name: str) -> dict[str, Any]:
        table = self._document.get(name, {})
        if not isinstance(table, dict):
            raise self._error(name, expected=f"one section {_brackets(name)}", found=_shape(table))
        return table

    def _optional(self, name: str, section: type[Section]) -> Section | None:
        table = self._table(name)
        if "listen" in table:
            return self._section(name, section, table)
        self._known(name, section, table)
        return None

    def _sections(self, name: str, section: type[Section]) -> tuple[Section, ...]:
        tables = self._document.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._error(name, expected=f"sections written {_brackets(name)}", found=_shape(tables))
        return tuple(self._section(f"{name}[{place}]", section, table) for place, table in enumerate(tables))

    def _section(self, name: str, section: type[Section], table: dict[str, Any]) -> Section:
        self._known(name, section, table)
        values: dict[str, object] = {}
        for key in _keys(section):
            if key.name in table:
                values[key.name] = self._value(f"{name}.{key.name}", key.metadata["parser"], table[key.name])
            elif key.default is MISSING:
                raise self._error(f"{name}.{key.name}", expected="a value", found="no such key")
        return section(**values)

    def _known(self, name: str, section: type[Any], table: dict[str, Any]) -> None:
        valid = [key.name for key in _keys(section)]
        for key in table:
            if key not in valid:
                raise self._error(
                    f"{name}.{key}", found="no such key", hint=f"the nearest valid one is {_nearest(key, valid)!r}"
                )

    def _value(self, key: str, parser: Parser, value: object) -> object:
        try:
            return parser(value, self._path.parent)
        except _RefusedError as refused:
            raise self._error(key, expected=refused.expected, found=refused.found or _shape(value)) from None
        except UsageError as error:
            raise self._error(key, expected=error.expected, found=_shape(value)) from None

    def _distinct(self, name: str, key: str, values: Iterable[str]) -> None:
        seen: set[str] = set()
        for place, value in enumerate(values):
            if value in seen:
                raise self._error(f"{name}[{place}].{key}", expected="each value once", found=f"{value!r} again")
            seen.add(value)

    def _undeclared(self, name: str, place: int, run: str, declared: list[RunId]) -> ConfigError:
        nearest = f"the nearest declared one is {_nearest(run, declared)!r}" if declared else ""
        return self._error(
            f"{name}[{place}].run", expected="a run that a [[run]] declares", found=f"{run!r}", hint=nearest
        )

    def _error(self, key: str, *, expected: str = "", found: str = "", hint: str = "") -> ConfigError:
        return ConfigError(f"configuration {self._path}: {key}", expected=expected, found=found, hint=hint)


def dump(config: Config) -> dict[str, Any]:
    """The whole tree with its defaults filled in, as the file's own sections and keys, ready for JSON.

    Written back as TOML it loads to an equal tree. Token files are named, tokens are not read.
    """
    sections: dict[str, Any] = {"daemon": _dump_section(config.daemon)}
    if config.relay:
        sections["relay"] = _dump_section(config.relay)
    if config.metrics:
        sections["metrics"] = _dump_section(config.metrics)
    sections["run"] = [_dump_section(run) for run in config.runs]
    sections["watch"] = [_dump_section(watch) for watch in config.watches]
    sections["upstream"] = [_dump_section(upstream) for upstream in config.upstreams]
    sections["fleet"] = [_dump_section(fleet) for fleet in config.fleets]
    sections["backend"] = _dump_section(config.backend)
    return sections


def to_toml(config: Config) -> str:
    """`dump` as TOML text."""
    lines: list[str] = []
    for name, content in dump(config).items():
        for section in content if isinstance(content, list) else [content]:
            lines.append(_brackets(name))
            # A JSON string, number or list of strings is one of TOML too, but for DEL.
            lines += [
                f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
                for key, value in section.items()
            ]
            lines.append("")
    return "\n".join(lines)


def _dump_section(section: Any) -> dict[str, object]:
    return {key.name: _dump_value(getattr(section, key.name)) for key in _keys(type(section))}


def _dump_value(value: object) -> object:
    match value:
        case float():
            return _duration_text(value)
        case Path() | Address():
            return str(value)
        case TokenFile():
            return str(value.path)
        case tuple():
            return list(value)
    return value


def _keys(section: type[Any]) -> tuple[Field[Any], ...]:
    return fields(section)


def _brackets(section: str) -> str:
    return f"[[{section}]]" if section in _LISTS else f"[{section}]"


def _nearest(word: str, valid: Iterable[str]) -> str:
    choices = sorted(valid)
    return (difflib.get_close_matches(word, choices, n=1, cutoff=0.0) or choices)[0]


def _shape(value: object) -> str:
    """A value as it may be shown: short, and whole tables and lists by their kind alone."""
    match value:
        case dict():
            return "a table"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
