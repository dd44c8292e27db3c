"""One TOML file, parsed once into a frozen tree; whoever holds a `Config` need not check it again."""

from deltad.config.key_file import KeyFile
from deltad.config.keys import UNITS, KeyMeaning, SectionMeaning, explain
from deltad.config.loading import load_config, warnings
from deltad.config.sections import (
    BackendConfig,
    Config,
    DaemonConfig,
    FleetConfig,
    MetricsConfig,
    RelayConfig,
    RunConfig,
    ScrubConfig,
    SigningConfig,
    TrustConfig,
    UpstreamConfig,
    WatchConfig,
)
from deltad.config.showing import dump, to_toml, toml_value
from deltad.config.token_file import TokenFile
from deltad.config.values import Address

__all__ = [
    "UNITS",
    "Address",
    "BackendConfig",
    "Config",
    "DaemonConfig",
    "FleetConfig",
    "KeyFile",
    "KeyMeaning",
    "MetricsConfig",
    "RelayConfig",
    "RunConfig",
    "ScrubConfig",
    "SectionMeaning",
    "SigningConfig",
    "TokenFile",
    "TrustConfig",
    "UpstreamConfig",
    "WatchConfig",
    "dump",
    "explain",
    "load_config",
    "to_toml",
    "toml_value",
    "warnings",
]
