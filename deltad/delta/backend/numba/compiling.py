"""Where numba's decorators, which carry no types, meet the rest of deltad, which does.

Owns how kernels are compiled: without the GIL, without bounds checks (every kernel does its own, on
lengths), cached on disk where numba finds a directory that it may write (`NUMBA_CACHE_DIR` names one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

# Some releases of numba carry types, of a part and for some uses; here it has none.
numba: Any = import_module("numba")
types: Any = import_module("numba.core.types")
cgutils: Any = import_module("numba.core.cgutils")
ir: Any = import_module("llvmlite.ir")
_binding: Any = import_module("llvmlite.binding")
_extending: Any = import_module("numba.extending")

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
    save = cache.save_overload

    def save_where_there_is_room(signature: Any, compiled: Any) -> None:
        with suppress(OSError):  # on a full disk a kernel works all the same, and the next process compiles it anew
            save(signature, compiled)

    cache.save_overload = save_where_there_is_room
    return cast(Function, dispatcher)


def phase(function: Function) -> Function:
    """A step of kernels that is worth a call: kept apart, so that LLVM gives each its own registers."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, forceinline=False, **_OPTIONS)(function))


def part(function: Function) -> Function:
    """A piece of kernels and phases that is always compiled into them."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is written in LLVM's terms: `(typing context, *types) → (signature, code generator)`."""
    return cast(Callable[..., Any], _extending.intrinsic(function))


def has_fast_deposit() -> bool:
    """Whether the CPU that numba compiles for has PDEP, and not the microcoded one of Zen 1 and 2."""
    name = numba.config.CPU_NAME or _binding.get_host_cpu_name()
    if numba.config.CPU_FEATURES is not None:
        return "+bmi2" in numba.config.CPU_FEATURES.split(",")
    return bool(_binding.get_host_cpu_features().get("bmi2", False)) and name not in ("znver1", "znver2")
