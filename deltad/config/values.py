"""What a single key may hold: one parser a kind of value, and how such a value is written back.

Knows neither files nor keys: a parser says what it expected, and whoever knows the place makes that a
ConfigError. Durations are whole numbers with a unit (`500ms`, `2s`, `5m`, `1h`) and are seconds in the tree; sizes
likewise (`512MiB`, `2GiB`) and are bytes. Relative paths are relative to the directory of the file; `credential:NAME`
is a file that the service manager put into `$CREDENTIALS_DIRECTORY`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from deltad.config.credentials_file import CredentialsFile
from deltad.config.key_file import KeyFile
from deltad.config.token_file import TokenFile
from deltad.delta.keys import PublicKey, parse_public_key
from deltad.errors import FormatError
from deltad.types import parse_run

_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h)", re.ASCII)
_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_SIZE = re.compile(r"([0-9]{1,9})(KiB|MiB|GiB|TiB|B)", re.ASCII)
_BYTES = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])", re.ASCII)
_BUCKET = re.compile(r"(?:(?:s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*|file://)(?:/[A-Za-z0-9._-]+)*/?", re.ASCII)
_CREDENTIAL = "credential:"
_CREDENTIAL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", re.ASCII)
_CREDENTIALS_OF_THE_UNIT = Path("/run/credentials/deltad.service")
_SOURCE_OF_CREDENTIALS, _LOADED_AS = Path("/etc/deltad/secrets"), "secret_"
"""As `LoadCredential=` of the shipped unit has it."""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address to listen on, written `host:port` or `[v6]:port`. Port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class RefusedError(Exception):
    """A value that a parser does not take; whoever knows the file and the key makes it a ConfigError."""

    def __init__(self, expected: str, found: str = "") -> None:
        self.expected = expected
        self.found = found


Parser = Callable[[object, Path], object]
"""From a TOML value and the directory of the file to the value in the tree. Raises `RefusedError` or UsageError."""


def text(value: object) -> str:
    if not isinstance(value, str):
        raise RefusedError("a string")
    if "\0" in value:
        raise RefusedError("a string without NUL")
    return value


def words(value: object, base: Path) -> str:
    if not text(value).isprintable() or len(text(value)) > 80:
        raise RefusedError("at most 80 printable characters")
    return text(value)


def named(parse: Callable[[str], object]) -> Parser:
    return lambda value, base: parse(text(value))


def path(value: object, base: Path) -> Path:
    if not text(value):
        raise RefusedError("a path")
    if text(value).startswith(_CREDENTIAL):
        return credential(text(value).removeprefix(_CREDENTIAL), os.environ)
    # Normalised by text alone: a symbolic link such as `current` must be followed when it is used.
    return Path(os.path.normpath(base / text(value)))


def credential(name: str, environment: Mapping[str, str]) -> Path:
    """Where the service manager put the credential of this name.

    For whoever is not started by one, that is where the shipped unit has its own; before its first start, the place
    from which it will have them.
    """
    if not _CREDENTIAL_NAME.fullmatch(name):
        raise RefusedError(f"the name of a credential behind '{_CREDENTIAL}', such as 'secret_relay-token'")
    if directory := environment.get("CREDENTIALS_DIRECTORY"):
        return Path(directory) / name
    path = _CREDENTIALS_OF_THE_UNIT / name
    source = name.removeprefix(_LOADED_AS)
    return path if source == name or _CREDENTIALS_OF_THE_UNIT.exists() else _SOURCE_OF_CREDENTIALS / source


def token_file(value: object, base: Path) -> TokenFile:
    return TokenFile(path(value, base))


def key_file(value: object, base: Path) -> KeyFile:
    return KeyFile(path(value, base))


def optional(parse: Parser) -> Parser:
    """Like `parse`, but the empty string is None: not given."""
    return lambda value, base: None if value == "" else parse(value, base)


def host_name(value: object, base: Path) -> str:
    if not _HOST.fullmatch(text(value)):
        raise RefusedError("a DNS name as it stands in a certificate, in lower case, such as 'rollout-1.example'")
    return text(value)


def public_key(value: object, base: Path) -> PublicKey:
    try:
        return parse_public_key(text(value))
    except FormatError as error:
        raise RefusedError(error.expected) from None


def duration(least: float) -> Parser:
    def parse(value: object, base: Path) -> float:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if not match:
            raise RefusedError("a duration such as '500ms', '2s', '5m' or '1h'")
        seconds = int(match[1]) * _MILLISECONDS[match[2]] / 1000
        if seconds < least:
            raise RefusedError(f"a duration of at least {duration_text(least)}")
        return seconds

    return parse


def duration_text(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    unit = next((unit for unit, size in _MILLISECONDS.items() if milliseconds and milliseconds % size == 0), "s")
    return f"{milliseconds // _MILLISECONDS[unit]}{unit}"


def size(least: int) -> Parser:
    return lambda value, base: size_of(value, least)


def size_of(value: object, least: int) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise RefusedError("a size such as '512MiB' or '2GiB'")
    if (found := int(match[1]) * _BYTES[match[2]]) < least:
        raise RefusedError(f"a size of at least {size_text(least)}")
    return found


def size_text(count: int) -> str:
    unit, each = next(((unit, each) for unit, each in _BYTES.items() if count and count % each == 0), ("B", 1))
    return f"{count // each}{unit}"


def address(value: object, base: Path) -> Address:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if not match or int(match[2]) > 65535:
        raise RefusedError("an address such as '127.0.0.1:7700' or '[::1]:7700'")
    return Address(match[1].strip("[]"), int(match[2]))


def url(value: object, base: Path) -> str:
    expected = "a URL such as 'http://host:7700', without user, query or fragment"
    given = text(value)
    try:
        parts = urlsplit(given)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if set(given) & set("@?#"):
        # What stands before an `@` or behind a `?` may be a secret, and is not repeated.
        raise RefusedError(expected, found="one with " + ("an '@'" if "@" in given else "a query or fragment"))
    if not sound or not re.fullmatch(r"[!-~]+", given):
        raise RefusedError(expected)
    return given.rstrip("/")


def bucket_url(value: object, base: Path) -> str:
    expected = "a URL such as 's3://bucket/prefix', with gs, az or file in place of s3, and nothing secret in it"
    given = text(value)
    if set(given) & set("@?#:") - {":"} or given.count(":") != 1:
        raise RefusedError(expected, found="one with a user, port, query or fragment")
    if not _BUCKET.fullmatch(given) or given.rstrip("/") == "file:" or {".", ".."} & set(given.split("/")):
        raise RefusedError(expected)
    return given.rstrip("/")


def peer_url(value: object, base: Path) -> str:
    """The URL of an upstream or bucket; empty for all of them."""
    if not text(value):
        return ""
    return url(value, base) if text(value).startswith("http") else bucket_url(value, base)


def credentials_file(value: object, base: Path) -> CredentialsFile | None:
    return CredentialsFile(path(value, base)) if text(value) else None


def time_of_day(value: object, base: Path) -> int:
    """`HH:MM`, in minutes."""
    match = _TIME.fullmatch(text(value))
    if not match:
        raise RefusedError("a time of day such as '08:30'")
    return int(match[1]) * 60 + int(match[2])


def time_text(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def count(least: int, most: int) -> Parser:
    def parse(value: object, base: Path) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise RefusedError(f"a whole number from {least} to {most}")
        return value

    return parse


def choice(*choices: str) -> Parser:
    def parse(value: object, base: Path) -> str:
        if not isinstance(value, str) or value not in choices:
            raise RefusedError(" or ".join(repr(choice) for choice in choices))
        return value

    return parse


def choices(*known: str) -> Parser:
    """One of `known` or a list of them."""

    def parse(value: object, base: Path) -> tuple[str, ...]:
        given = value if isinstance(value, list) else [value]
        if not given or any(not isinstance(word, str) or word not in known for word in given):
            raise RefusedError(" or ".join(repr(word) for word in known) + ", or a list of them")
        return tuple(dict.fromkeys(given))

    return parse


def pattern(value: object, base: Path) -> str:
    given = text(value)
    around = given.replace("{number}", "", 1)
    if set(around) & set("{}") or {"", ".."} & set(given.split("/")):
        raise RefusedError("a relative path with at most one '{number}', such as 'step_{number}'")
    return given


def run_names(value: object, base: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise RefusedError('a list of run ids, or ["*"] for all')
    names = tuple(text(name) for name in value)
    if "*" in names and len(names) > 1:
        raise RefusedError("either '*' or run ids, not both")
    return tuple(name if name == "*" else parse_run(name) for name in names)


def run_names_or_none(value: object, base: Path) -> tuple[str, ...]:
    """As `run_names`, or an empty list."""
    return () if value == [] else run_names(value, base)


def run_or_all(value: object, base: Path) -> str:
    """A run id; empty for all runs."""
    return parse_run(text(value)) if text(value) else ""


def shown(value: object) -> object:
    """A value that is its own text, or has one, as it stands in the file."""
    match value:
        case Path() | Address() | PublicKey():
            return str(value)
        case TokenFile() | KeyFile() | CredentialsFile():
            return str(value.path)
        case None:
            return ""
        case tuple():
            return list(value)
    return value
