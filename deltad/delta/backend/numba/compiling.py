"""Where numba's decorators, which carry no types, meet the rest of deltad, which does.

Owns how kernels are compiled: without the GIL, without bounds checks (every kernel does its own, on
lengths), cached on disk where numba finds a directory that it may write (`NUMBA_CACHE_DIR` names one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba  # type: ignore[import-untyped]
from llvmlite import binding  # type: ignore[import-untyped]
from numba import config
from numba.extending import intrinsic as numba_intrinsic  # type: ignore[import-untyped]

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


def _sources_digest() -> str:
    """Digest of every module of this package: numba itself looks only at the file that holds a kernel."""
    hashed = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


_SOURCES = _sources_digest()


def kernel(function: Function) -> Function:
    """A kernel that Python calls. Compiled at its first call for each lane width, or loaded from the cache."""
    dispatcher = numba.njit(**_OPTIONS)(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError:
        return cast(Function, dispatcher)  # no directory to cache in: compiled anew in every process
    cache = dispatcher._cache
    index_key = cache._index_key
    # A cached kernel holds the code of all that it calls, so it is good for these sources only.
    cache._index_key = lambda signature, codegen: (*index_key(signature, codegen), _SOURCES)
    return cast(Function, dispatcher)


def phase(function: Function) -> Function:
    """A step of kernels that is worth a call: kept apart, so that LLVM gives each its own registers."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function))


def part(function: Function) -> Function:
    """A piece of kernels and phases that is always compiled into them."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is written in LLVM's terms: `(typing context, *types) → (signature, code generator)`."""
    return cast(Callable[..., Any], numba_intrinsic(function))


def has_fast_deposit() -> bool:
    """Whether the CPU that numba compiles for has PDEP, and not the microcoded one of Zen 1 and 2."""
    name = config.CPU_NAME or binding.get_host_cpu_name()
    if config.CPU_FEATURES is not None:
        return "+bmi2" in config.CPU_FEATURES.split(",")
    return bool(binding.get_host_cpu_features().get("bmi2", False)) and name not in ("znver1", "znver2")
