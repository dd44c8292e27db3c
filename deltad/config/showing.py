"""The tree written back as the sections and keys of the file. Invariant: what is shown loads to an equal tree."""

from __future__ import annotations

import json
from typing import Any

from deltad.config.sections import Config, brackets, keys


def dump(config: Config) -> dict[str, Any]:
    """The whole tree with its defaults filled in, as the file's own sections and keys, ready for JSON.

    Written back as TOML it loads to an equal tree. Files with secrets are named, and not read.
    """
    sections: dict[str, Any] = {"daemon": _dump_section(config.daemon)}
    if config.relay:
        sections["relay"] = _dump_section(config.relay)
    if config.metrics:
        sections["metrics"] = _dump_section(config.metrics)
    if config.signing:
        sections["signing"] = _dump_section(config.signing)
    if config.local:
        sections["local"] = _dump_section(config.local)
    sections["run"] = [_dump_section(run) for run in config.runs]
    sections["watch"] = [_dump_section(watch) for watch in config.watches]
    sections["upstream"] = [_dump_section(upstream) for upstream in config.upstreams]
    sections["bucket"] = [_dump_section(bucket) for bucket in config.buckets]
    sections["pace"] = [_dump_section(pace) for pace in config.paces]
    sections["fleet"] = [_dump_section(fleet) for fleet in config.fleets]
    sections["trust"] = [_dump_section(trust) for trust in config.trusts]
    sections["token"] = [_dump_section(token) for token in config.tokens]
    sections["peer"] = [_dump_section(peer) for peer in config.peers]
    sections["backend"] = _dump_section(config.backend)
    sections["scrub"] = _dump_section(config.scrub)
    return sections


def to_toml(config: Config) -> str:
    """`dump` as TOML text."""
    lines: list[str] = []
    for name, content in dump(config).items():
        for section in content if isinstance(content, list) else [content]:
            lines.append(brackets(name))
            lines += [f"{key} = {toml_value(value)}" for key, value in section.items()]
            lines.append("")
    return "\n".join(lines)


def toml_value(value: object) -> str:
    """A string, number or list of strings as TOML, in which it looks as in JSON, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _dump_section(section: Any) -> dict[str, object]:
    return {key.name: key.metadata["shows"](getattr(section, key.name)) for key in keys(type(section))}
