"""One TOML file, parsed once into a frozen tree; whoever holds a `Config` need not check it again."""

from deltad.config.credentials_file import CredentialsFile
from deltad.config.key_file import KeyFile
from deltad.config.keys import UNITS, KeyMeaning, SectionMeaning, explain
from deltad.config.loading import load_config, warnings
from deltad.config.sections import (
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
)
from deltad.config.showing import dump, to_toml, toml_value
from deltad.config.tls import TlsFiles
from deltad.config.token_file import TokenFile
from deltad.config.values import Address

__all__ = [
    "UNITS",
    "Address",
    "BackendConfig",
    "BucketConfig",
    "Config",
    "CredentialsFile",
    "DaemonConfig",
    "FleetConfig",
    "HotLoadConfig",
    "KeyFile",
    "KeyMeaning",
    "LeadConfig",
    "LocalConfig",
    "MetricsConfig",
    "PaceConfig",
    "PeerConfig",
    "RelayConfig",
    "RunConfig",
    "ScrubConfig",
    "SectionMeaning",
    "SigningConfig",
    "TlsFiles",
    "TokenConfig",
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
