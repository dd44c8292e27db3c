"""The backends that this machine has. What one of them must do, all must."""

from __future__ import annotations

from deltad.delta.backend import Backend, choose
from deltad.errors import ConfigError

KINDS = ("numpy", "numba", "cupy")


def present() -> list[Backend]:
    """Every backend that is built in and can be used here; the reference first."""
    found = []
    for kind in KINDS:
        try:
            found.append(choose(kind))
        except ConfigError:
            continue
    return found
