"""One TOML file, parsed once into a frozen tree; whoever holds a `Config` need not check it again."""

from deltad.config.loading import load_config
from deltad.config.sections import (
    BackendConfig,
    Config,
    DaemonConfig,
    FleetConfig,
    MetricsConfig,
    RelayConfig,
    RunConfig,
    UpstreamConfig,
    WatchConfig,
)
from deltad.config.showing import dump, to_toml
from deltad.config.token_file import TokenFile
from deltad.config.values import Address

__all__ = [
    "Address",
    "BackendConfig",
    "Config",
    "DaemonConfig",
    "FleetConfig",
    "MetricsConfig",
    "RelayConfig",
    "RunConfig",
    "TokenFile",
    "UpstreamConfig",
    "WatchConfig",
    "dump",
    "load_config",
    "to_toml",
]
