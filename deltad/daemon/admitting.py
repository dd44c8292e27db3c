"""Whom this daemon recognises, and what they may do, as its configuration says.

A token that cannot be read is nobody's, until it can be read again; that is logged.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from deltad.config import Config, PeerConfig, TokenConfig
from deltad.errors import ConfigError
from deltad.protocol.access import Doorkeeper, Principal, Right

log = structlog.get_logger()

_READER = Principal("relay token", frozenset({Right.READ}))


def relay_door(config: Config) -> Doorkeeper:
    """For the relay, which knows `[relay] token_file` too."""
    return _door(config, with_relay=True)


def local_door(config: Config) -> Doorkeeper:
    """For the local API over TLS."""
    return _door(config, with_relay=False)


def _door(config: Config, *, with_relay: bool) -> Doorkeeper:
    files = [(token.file, _principal(token)) for token in config.tokens]
    if with_relay and config.relay and config.relay.token_file:
        files.insert(0, (config.relay.token_file, _READER))

    def tokens() -> Iterator[tuple[str, Principal]]:
        for file, principal in files:
            try:
                yield file.read(), principal
            except ConfigError as error:
                log.error("token_unreadable", error=str(error))

    return Doorkeeper(tokens, {peer.name: _principal(peer) for peer in config.peers})


def _principal(known: TokenConfig | PeerConfig) -> Principal:
    return Principal(known.name, frozenset(map(Right, known.scope)), known.runs)
