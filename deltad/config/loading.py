"""From the file's bytes to a `Config`, or to one sentence that names the file and the key.

Reads the file and, once, each file with a secret that it names; opens, binds and creates nothing. Invariant:
anything that is not understood in full (an unknown key, a unit, a run that nothing declares) refuses
the whole file with a `ConfigError`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator
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
    HotLoadConfig,
    LeadConfig,
    LocalConfig,
    MetricsConfig,
    PaceConfig,
    PeerConfig,
    RelayConfig,
    RunConfig,
    ScrubConfig,
    SigningConfig,
    TokenConfig,
    TrustConfig,
    UpstreamConfig,
    WatchConfig,
    brackets,
    keys,
)
from deltad.config.tls import TlsFiles
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
    checks = [*(file.read for file in secret_files(config)), *_contexts(config)]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            raise ConfigError(
                f"configuration {path}: {error.thing}", expected=error.expected, found=error.found, hint=error.hint
            ) from None
    return config


def warnings(config: Config) -> tuple[str, ...]:
    """What can be used and should be better, one sentence each. Reads the secret files. Raises ConfigError."""
    files = dict.fromkeys([*secret_files(config), *_tls_files(config)])
    doubts = [doubt for file in files for doubt in file.doubts()]
    return (*doubts, *_unheard_publishers(config))


def _unheard_publishers(config: Config) -> Iterator[str]:
    """The runs that are published here, demand a signature, and get none that would do."""
    key = config.signing.key_file.read().public if config.signing else None
    for run in config.runs:
        trusted = [trust for trust in config.trusts if trust.speaks_for(run.id)]
        if trusted and not any(trust.key == key and "publish" in trust.scope for trust in trusted):
            signs = f"its [signing] key {key.id} is none of them" if key else "there is no [signing] key_file"
            yield (
                f"run {run.id} is published here and has [[trust]] keys, but {signs} with the scope 'publish': who "
                "trusts the same keys takes no version that is published here"
            )


def secret_files(config: Config) -> list[TokenFile | KeyFile | CredentialsFile]:
    found: list[TokenFile | KeyFile | CredentialsFile] = []
    if config.relay and config.relay.token_file:
        found.append(config.relay.token_file)
    found += (upstream.token_file for upstream in config.upstreams if upstream.token_file)
    found += (lead.token_file for lead in config.leads if lead.token_file)
    found += (token.file for token in config.tokens)
    found += (bucket.credentials_file for bucket in config.buckets if bucket.credentials_file)
    found += (load.credentials_file for load in config.hot_loads if load.credentials_file)
    if config.signing:
        found.append(config.signing.key_file)
    return found


def _tls_files(config: Config) -> list[TlsFiles]:
    ends = (config.relay, config.local, *config.upstreams, *config.leads)
    return [end.tls for end in ends if end is not None and end.tls is not None]


def _contexts(config: Config) -> list[Callable[[], object]]:
    """What makes sure that each certificate, key and authority can be used."""
    ends = [end.tls.server for end in (config.relay, config.local) if end is not None and end.tls is not None]
    asked = [upstream.tls.client for upstream in config.upstreams if upstream.tls is not None]
    return [*ends, *asked, *(lead.tls.client for lead in config.leads)]


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
            local=self._optional("local", LocalConfig, "listen"),
            runs=self._sections("run", RunConfig),
            watches=self._sections("watch", WatchConfig),
            upstreams=self._sections("upstream", UpstreamConfig),
            leads=self._sections("lead", LeadConfig),
            buckets=self._sections("bucket", BucketConfig),
            hot_loads=self._sections("hot_load", HotLoadConfig),
            paces=self._sections("pace", PaceConfig),
            fleets=self._sections("fleet", FleetConfig),
            trusts=self._sections("trust", TrustConfig),
            tokens=self._sections("token", TokenConfig),
            peers=self._sections("peer", PeerConfig),
            backend=self._section("backend", BackendConfig, self._table("backend")),
            scrub=self._section("scrub", ScrubConfig, self._table("scrub")),
        )
        self._cross_check(config)
        return config

    def _cross_check(self, config: Config) -> None:
        self._distinct("run", "id", (run.id for run in config.runs))
        self._distinct("watch", "run", (watch.run for watch in config.watches))
        self._distinct("upstream", "url", (upstream.url for upstream in config.upstreams))
        self._distinct("lead", "run", (lead.run for lead in config.leads))
        self._distinct("bucket", "url", (bucket.url for bucket in config.buckets))
        self._distinct("hot_load", "deployment", (load.deployment for load in config.hot_loads))
        self._distinct("hot_load", "run", (load.run for load in config.hot_loads))
        self._distinct("fleet", "run", (fleet.run for fleet in config.fleets))
        self._distinct("trust", "key", (str(trust.key) for trust in config.trusts))
        self._distinct("token", "file", (str(token.file.path) for token in config.tokens))
        self._distinct("peer", "name", (peer.name for peer in config.peers))
        self._check_identities(config)
        if config.relay and config.metrics and config.relay.listen == config.metrics.listen:
            address = config.metrics.listen
            if address.port:
                raise self._error("metrics.listen", expected="another address than relay.listen", found=f"'{address}'")
        declared = [run.id for run in config.runs]
        self._check_leads(config, declared)
        self._check_buckets(config, declared)
        for place, watch in enumerate(config.watches):
            if watch.run not in declared:
                raise self._undeclared("watch", place, watch.run, declared)
        for place, load in enumerate(config.hot_loads):
            if load.run not in declared:
                raise self._undeclared("hot_load", place, load.run, declared)
        for place, fleet in enumerate(config.fleets):
            if fleet.run not in declared and not config.pulls(fleet.run):
                raise self._undeclared("fleet", place, fleet.run, declared)

    def _check_identities(self, config: Config) -> None:
        """Certificates and their keys come in pairs, and somebody can use what listens."""
        ends = [("relay", config.relay), *((f"upstream[{i}]", upstream) for i, upstream in enumerate(config.upstreams))]
        for name, end in ends:
            if end is not None and (end.certificate is None) != (end.key is None):
                lacking = "key" if end.key is None else "certificate"
                raise self._error(f"{name}.{lacking}", expected="`certificate` and `key`, or neither", found="one")
        if config.relay and config.relay.client_ca and not config.relay.certificate:
            raise self._error("relay.client_ca", expected="a `certificate` beside it", found="none")
        certified = any(end is not None and end.client_ca is not None for end in (config.relay, config.local))
        if config.peers and not certified:
            raise self._error("peer[0].name", expected="a `client_ca` in [relay] or [local]", found="none")
        if config.relay and not (config.relay.token_file or config.tokens or (config.relay.client_ca and config.peers)):
            expected = "a value, or a [[token]], or a `client_ca` and a [[peer]]"
            raise self._error("relay.token_file", expected=expected, found="no such key")
        for place, upstream in enumerate(config.upstreams):
            if upstream.tls is None and (upstream.ca or upstream.certificate or upstream.name):
                raise self._error(f"upstream[{place}].url", expected="a URL of https", found=f"'{upstream.url}'")
            if not upstream.token_file and not upstream.certificate:
                raise self._error(
                    f"upstream[{place}].token_file", expected="a value, or a `certificate`", found="no such key"
                )

    def _check_leads(self, config: Config, declared: list[RunId]) -> None:
        for place, lead in enumerate(config.leads):
            if lead.run in declared:
                raise self._error(f"lead[{place}].run", expected="a run that is no [[run]] here", found=f"'{lead.run}'")
            if not lead.url.startswith("https:"):
                raise self._error(f"lead[{place}].url", expected="a URL of https", found=f"'{lead.url}'")
            if (lead.certificate is None) != (lead.key is None):
                lacking = "key" if lead.key is None else "certificate"
                raise self._error(
                    f"lead[{place}].{lacking}", expected="`certificate` and `key`, or neither", found="one"
                )
            if not lead.token_file and not lead.certificate:
                raise self._error(
                    f"lead[{place}].token_file", expected="a value, or a `certificate`", found="no such key"
                )

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
