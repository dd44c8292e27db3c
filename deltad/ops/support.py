"""What is collected for somebody else to look at, and how secrets are kept out of it. Pure but for reading them.

Owns one invariant: no secret that the configuration names is in any part, in whatever form it is written there; and
nothing that looks like a bearer token or a private key is, whosever it may be.
"""

from __future__ import annotations

import base64
import io
import re
import tarfile
import urllib.parse
from collections.abc import Iterable, Mapping

from deltad.config import Config
from deltad.config.credentials_file import CredentialsFile
from deltad.config.key_file import KeyFile
from deltad.config.loading import secret_files
from deltad.errors import ConfigError

REMOVED = b"[removed]"
_LEAST = 6
"""A secret shorter than this is no secret, and would blank words everywhere."""
_LOOKS_SECRET = (
    re.compile(rb"(?i)(bearer\s+)[!-~]+"),
    re.compile(
        rb"(?i)((?:authorization|x-api-key|api[_-]?key|password|secret|token)[\"']?\s*[:=]\s*[\"']?)[^\s\"',}]{6,}"
    ),
    re.compile(rb"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
    re.compile(rb"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
)


def secrets_of(config: Config) -> list[bytes]:
    """Every secret that the configuration names and that can be read now, as it may stand in a text."""
    found: list[bytes] = []
    for file in secret_files(config):
        try:
            match file:
                case CredentialsFile():
                    found += (value.encode() for value in file.read().values())
                case KeyFile():
                    pem = file.read().pem()
                    found += (line for line in pem.splitlines() if not line.startswith(b"-----"))
                case _:
                    found.append(file.read().encode())
        except ConfigError:
            continue  # what cannot be read here is in none of the parts either, but for the patterns
    forms = [form for secret in found if len(secret) >= _LEAST for form in _forms(secret)]
    return sorted(set(forms), key=len, reverse=True)


def without_secrets(part: bytes, secrets: Iterable[bytes]) -> bytes:
    """The part with every secret, and all that looks like one, replaced."""
    for secret in secrets:
        part = part.replace(secret, REMOVED)
    for pattern in _LOOKS_SECRET:
        part = pattern.sub(lambda match: match[1] + REMOVED, part)
    return part


def bundle(parts: Mapping[str, bytes], secrets: Iterable[bytes], *, now: float) -> bytes:
    """A tar of all parts, packed, below a folder `deltad-support`. `now` is Unix time."""
    secrets = list(secrets)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, part in parts.items():
            clean = without_secrets(part, secrets)
            member = tarfile.TarInfo(f"deltad-support/{name}")
            member.size, member.mtime, member.mode = len(clean), int(now), 0o600
            archive.addfile(member, io.BytesIO(clean))
    return out.getvalue()


def _forms(secret: bytes) -> Iterable[bytes]:
    """As it is, and as other programs write it down."""
    yield secret
    yield urllib.parse.quote(secret, safe="").encode()
    yield base64.b64encode(secret).rstrip(b"=")
    yield secret.hex().encode()
