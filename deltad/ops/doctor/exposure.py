"""What others on the network could read or do, as the configuration stands. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from deltad.config import Config
from deltad.ops.doctor.finding import Finding, Level

_ADVICE = "speak TLS: deltad/docs/SECURITY.md has the commands; a tunnel or a network of your own does as well"


def examine_exposure(config: Config) -> Iterator[Finding]:
    """A note for each end that speaks in clear beyond this host, and for runs that are pulled on nobody's word."""
    if config.relay and config.relay.tls is None and not _is_loopback(config.relay.listen.host):
        yield Finding(
            Level.NOTE,
            "relay",
            f"it speaks in clear on {config.relay.listen}: whoever is on the way reads tokens and weights",
            advice=_ADVICE,
        )
    for upstream in config.upstreams:
        if upstream.tls is None and not _is_loopback(urlsplit(upstream.url).hostname or ""):
            yield Finding(
                Level.NOTE,
                f"link to {upstream.url}",
                "it is spoken to in clear: whoever is on the way reads the token and weights",
                advice=_ADVICE,
            )
    unvouched = [run for upstream in config.upstreams for run in upstream.runs if not _is_vouched_for(config, run)]
    if unvouched:
        yield Finding(
            Level.NOTE,
            "trust",
            f"versions of {', '.join(sorted({'all runs' if run == '*' else run for run in unvouched}))} are taken "
            "unsigned: whoever answers as the upstream decides what is served",
            advice="`deltad keys trust` names the publisher's key",
        )


def _is_vouched_for(config: Config, run: str) -> bool:
    return any(run in trust.runs or "*" in trust.runs for trust in config.trusts)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
