"""Every section and key in words, for people: read from the docstrings of the sections, which stay the one source.

Reads no file. Invariant: each key that a file may hold is told, with the default that it really has.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass
from typing import Any

from deltad.config.sections import LISTS, TABLES, brackets, keys
from deltad.config.showing import toml_value

UNITS = (
    "Durations are whole numbers with a unit (`500ms`, `2s`, `5m`, `1h`), and so are sizes (`512MiB`, `2GiB`). "
    "Relative paths start at the directory of the file; `credential:NAME` is a file in `$CREDENTIALS_DIRECTORY`, where "
    "systemd's `LoadCredential=` puts it."
)
_ORDER = (
    *("daemon", "relay", "local", "token", "peer", "metrics", "signing", "run", "watch", "upstream"),
    *("lead", "bucket", "hot_load", "pace"),
    *("fleet", "trust"),
    *("backend", "scrub"),
)
_KEY = re.compile(r"^`(\w+)`(?: \(([^)]*)\))?: ", re.MULTILINE)
_DEFAULT = re.compile(r" Default [^ ]+\.$")


@dataclass(frozen=True, slots=True)
class KeyMeaning:
    """A key: its default as it is written in the file, empty where there is none, and what it means."""

    name: str
    default: str
    required: bool
    text: str


@dataclass(frozen=True, slots=True)
class SectionMeaning:
    """A section as it is written (`[daemon]`, `[[run]]`), what it is for, and its keys."""

    name: str
    text: str
    keys: tuple[KeyMeaning, ...]


def explain() -> tuple[SectionMeaning, ...]:
    """All sections, in the order in which a file would have them."""
    sections = {**TABLES, **LISTS}
    return tuple(_section(name, sections[name]) for name in _ORDER)


def _section(name: str, section: type[Any]) -> SectionMeaning:
    head, _, body = (section.__doc__ or "").partition("\n\n")
    found = list(_KEY.finditer(body := "\n".join(line.strip() for line in body.splitlines())))
    ends = [match.start() for match in found[1:]] + [len(body)]
    texts = {m[1]: " ".join(body[m.end() : end].split()) for m, end in zip(found, ends, strict=True)}
    text = " ".join(head.split()).removeprefix(f"`{brackets(name)}`: ")
    return SectionMeaning(brackets(name), text, tuple(_key(key, texts.get(key.name, "")) for key in keys(section)))


def _key(key: Field[Any], text: str) -> KeyMeaning:
    required = key.default is MISSING
    default = "" if required else toml_value(key.metadata["shows"](key.default))
    return KeyMeaning(key.name, default, required, _DEFAULT.sub("", text))
