"""From the file's bytes to a `Config`, or to one sentence that names the file and the key.

Reads the file and, once, each file with a secret that it names; opens, binds and creates nothing. Invariant:
anything that is not understood in full (an unknown key, a unit, a run that nothing declares) refuses
the whole file with a `ConfigError`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from deltad.config.credentials_file import CredentialsFile
from deltad.config.key_file import KeyFile
from deltad.config.sections import (
    LISTS,
    TABLES,
    BackendConfig,
    BucketConfig,
    Config,
    DaemonConfig,
    FleetConfig,
    MetricsConfig,
    PaceConfig,
    RelayConfig,
    RunConfig,
    ScrubConfig,
    SigningConfig,
    TrustConfig,
    UpstreamConfig,
    WatchConfig,
    brackets,
    keys,
)
from deltad.config.token_file import TokenFile
from deltad.config.values import Parser, RefusedError
from deltad.errors import ConfigError, UsageError
from deltad.types import RunId

Section = TypeVar("Section")

_LISTED = 10


def load_config(path: Path) -> Config:
    """Read and check the file at `path`, the files with secrets included. Raises ConfigError; binds nothing."""
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
    for file in _secret_files(config):
        try:
            file.read()
        except ConfigError as error:
            raise ConfigError(
                f"configuration {path}: {error.thing}", expected=error.expected, found=error.found, hint=error.hint
            ) from None
    return config


def warnings(config: Config) -> tuple[str, ...]:
    """What can be used and should be better, one sentence each. Reads the secret files. Raises ConfigError."""
    return tuple(doubt for file in dict.fromkeys(_secret_files(config)) for doubt in file.doubts())


def _secret_files(config: Config) -> list[TokenFile | KeyFile | CredentialsFile]:
    found: list[TokenFile | KeyFile | CredentialsFile] = [config.relay.token_file] if config.relay else []
    found += (upstream.token_file for upstream in config.upstreams)
    found += (bucket.credentials_file for bucket in config.buckets if bucket.credentials_file)
    if config.signing:
        found.append(config.signing.key_file)
    return found


class _Document:
    """A parsed TOML document on its way into the tree."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self._path = path
        self._document = document

    def config(self) -> Config:
        for name in self._document:
            if name not in TABLES and name not in LISTS:
                raise self._error(name, found="no such section", hint=_advice(name, [*TABLES, *LISTS], brackets))
        config = Config(
            path=self._path,
            daemon=self._section("daemon", DaemonConfig, self._table("daemon")),
            relay=self._optional("relay", RelayConfig, "listen"),
            metrics=self._optional("metrics", MetricsConfig, "listen"),
            signing=self._optional("signing", SigningConfig, "key_file"),
            runs=self._sections("run", RunConfig),
            watches=self._sections("watch", WatchConfig),
            upstreams=self._sections("upstream", UpstreamConfig),
            buckets=self._sections("bucket", BucketConfig),
            paces=self._sections("pace", PaceConfig),
            fleets=self._sections("fleet", FleetConfig),
            trusts=self._sections("trust", TrustConfig),
            backend=self._section("backend", BackendConfig, self._table("backend")),
            scrub=self._section("scrub", ScrubConfig, self._table("scrub")),
        )
        self._cross_check(config)
        return config

    def _cross_check(self, config: Config) -> None:
        self._distinct("run", "id", (run.id for run in config.runs))
        self._distinct("watch", "run", (watch.run for watch in config.watches))
        self._distinct("upstream", "url", (upstream.url for upstream in config.upstreams))
        self._distinct("bucket", "url", (bucket.url for bucket in config.buckets))
        self._distinct("fleet", "run", (fleet.run for fleet in config.fleets))
        self._distinct("trust", "key", (str(trust.key) for trust in config.trusts))
        if config.relay and config.metrics and config.relay.listen == config.metrics.listen:
            address = config.metrics.listen
            if address.port:
                raise self._error("metrics.listen", expected="another address than relay.listen", found=f"'{address}'")
        declared = [run.id for run in config.runs]
        self._check_buckets(config, declared)
        for place, watch in enumerate(config.watches):
            if watch.run not in declared:
                raise self._undeclared("watch", place, watch.run, declared)
        for place, fleet in enumerate(config.fleets):
            if fleet.run not in declared and not config.pulls(fleet.run):
                raise self._undeclared("fleet", place, fleet.run, declared)

    def _check_buckets(self, config: Config, declared: list[RunId]) -> None:
        for place, bucket in enumerate(config.buckets):
            if not bucket.publish and not bucket.pull:
                raise self._error(f"bucket[{place}]", expected="`publish` or `pull`, or both", found="neither")
            for run in bucket.publish:
                if run != "*" and run not in declared and not config.pulls(RunId(run)):
                    raise self._undeclared("bucket", place, run, declared, "publish")
            own = {run.id for run in config.runs} if "*" in bucket.publish else set(bucket.publish)
            if own and ("*" in bucket.pull or own & set(bucket.pull)):
                raise self._error(f"bucket[{place}].pull", expected="names of other runs than `publish` has")
        peers = [*(upstream.url for upstream in config.upstreams), *(bucket.url for bucket in config.buckets)]
        for place, pace in enumerate(config.paces):
            if pace.peer and pace.peer not in peers:
                raise self._error(
                    f"pace[{place}].peer",
                    expected="the url of an [[upstream]] or [[bucket]]",
                    found=f"{pace.peer!r}",
                    hint=_advice(pace.peer, peers, repr, "known") if peers else "",
                )

    def _table(self, name: str) -> dict[str, Any]:
        table = self._document.get(name, {})
        if not isinstance(table, dict):
            raise self._error(name, expected=f"one section {brackets(name)}", found=_shape(table))
        return table

    def _optional(self, name: str, section: type[Section], switch: str) -> Section | None:
        table = self._table(name)
        if switch in table:
            return self._section(name, section, table)
        self._known(name, section, table)
        return None

    def _sections(self, name: str, section: type[Section]) -> tuple[Section, ...]:
        tables = self._document.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._error(name, expected=f"sections written {brackets(name)}", found=_shape(tables))
        return tuple(self._section(f"{name}[{place}]", section, table) for place, table in enumerate(tables))

    def _section(self, name: str, section: type[Section], table: dict[str, Any]) -> Section:
        self._known(name, section, table)
        values: dict[str, object] = {}
        for key in keys(section):
            if key.name in table:
                values[key.name] = self._value(f"{name}.{key.name}", key.metadata["parser"], table[key.name])
            elif key.default is MISSING:
                raise self._error(f"{name}.{key.name}", expected="a value", found="no such key")
        return section(**values)

    def _known(self, name: str, section: type[Any], table: dict[str, Any]) -> None:
        valid = [key.name for key in keys(section)]
        for key in table:
            if key not in valid:
                raise self._error(f"{name}.{key}", found="no such key", hint=_advice(key, valid, repr))

    def _value(self, key: str, parser: Parser, value: object) -> object:
        try:
            return parser(value, self._path.parent)
        except RefusedError as refused:
            raise self._error(key, expected=refused.expected, found=refused.found or _shape(value)) from None
        except UsageError as error:
            raise self._error(key, expected=error.expected, found=_shape(value)) from None

    def _distinct(self, name: str, key: str, values: Iterable[str]) -> None:
        seen: set[str] = set()
        for place, value in enumerate(values):
            if value in seen:
                raise self._error(f"{name}[{place}].{key}", expected="each value once", found=f"{value!r} again")
            seen.add(value)

    def _undeclared(self, name: str, place: int, run: str, declared: list[RunId], key: str = "run") -> ConfigError:
        return self._error(
            f"{name}[{place}].{key}",
            expected="a run that a [[run]] declares",
            found=f"{run!r}",
            hint=_advice(run, declared, repr, "declared") if declared else "",
        )

    def _error(self, key: str, *, expected: str = "", found: str = "", hint: str = "") -> ConfigError:
        return ConfigError(f"configuration {self._path}: {key}", expected=expected, found=found, hint=hint)


def _advice(word: str, valid: Iterable[str], shown: Callable[[str], str], are: str = "valid") -> str:
    """The word that was probably meant; where none is near, a few of all."""
    choices = sorted(valid)
    if nearest := difflib.get_close_matches(word, choices, n=1):
        return f"the nearest {are} one is {shown(nearest[0])}"
    more = len(choices) - _LISTED
    return f"{are} here: {', '.join(map(shown, choices[:_LISTED]))}" + (f" and {more} more" if more > 0 else "")


def _shape(value: object) -> str:
    """A value as it may be shown: short, and whole tables and lists by their kind alone."""
    match value:
        case dict():
            return "a table"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
