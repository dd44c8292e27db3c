"""numba's kernels once more, without the element sum, to tell what following the digest costs.

The kernels are compiled a second time with the one function that adds changes to the sums left empty, beside
those that everybody else uses and into a cache of their own.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.frames import backend
from deltad.delta.backend import Backend

_PACKAGE = "deltad.delta.backend.numba"


@contextmanager
def undigested() -> Iterator[Backend]:
    """The backend with sums that stay zero, also where they are checked.

    Its kernels are compiled when they are first used, within this context.
    """
    numba: Any = importlib.import_module("numba")
    kept = _take_modules()
    directory = numba.config.CACHE_DIR
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as temporary:
        numba.config.CACHE_DIR = temporary
        try:
            sums: Any = importlib.import_module(f"{_PACKAGE}.sums")
            compiling: Any = importlib.import_module(f"{_PACKAGE}.compiling")
            sums.add_changes = compiling.part(_nothing)
            yield backend("numba")
        finally:
            numba.config.CACHE_DIR = directory
            _take_modules()
            sys.modules.update(kept)


def _nothing(*given: Any) -> None:
    """Stands where changes are added to the sums."""


def _take_modules() -> dict[str, Any]:
    names = [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}
