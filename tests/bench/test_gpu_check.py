"""The check of a GPU is right before there is one: all of it runs on the host, and without a GPU it says so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import gpu_check, harness
from bench.gpu_rows import DECLARED, Rows, report
from deltad.delta.backend import Place, Segments
from deltad.delta.backend.cuda.engine import CudaBackend
from deltad.delta.digest import U64
from tests.kit.cupy_on_host import CUPY, StreamedHostDevice
from tests.kit.host_device import compiler

on_host = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: with g++ the kernels run on the host")


@on_host
def test_every_row_is_measured_and_read_as_a_result(tmp_path: Path) -> None:
    backend = CudaBackend(StreamedHostDevice())
    rows = Rows(time.perf_counter() + 3600)
    gpu_check.check(backend, CUPY, rows, np.random.default_rng(1), largest=3000)
    gpu_check.measure(backend, CUPY, rows, lanes=8192, part=4096)
    table = report(rows, tmp_path / "gpu.json", "GPU 0", "on the host")
    result = harness.read(tmp_path / "gpu.json")
    assert [row.name for row in result.rows] == [row.name for row in DECLARED]
    assert not [row.name for row in result.rows if row.value is None]
    assert result.rows[0].value == 31
    assert "collect_2" in table, "the kernels are told apart"
    assert "skipped" not in table


def test_what_comes_too_late_is_skipped_with_the_reason(tmp_path: Path) -> None:
    rows = Rows(0.0)
    assert gpu_check.timed(rows, lambda: pytest.fail("begun")) == []
    rows.add(DECLARED[1].name, [])
    assert "skipped: the time was up" in report(rows, tmp_path / "gpu.json", "GPU 0", "")
    assert {row.skipped for row in harness.read(tmp_path / "gpu.json").rows} == {"the time was up"}


@on_host
def test_a_wrong_stream_ends_the_check() -> None:
    class Wrong(CudaBackend):
        def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
            return super().sum(lanes, places) + np.uint64(1)

    with pytest.raises(AssertionError, match="sums"):
        gpu_check.check(Wrong(StreamedHostDevice()), CUPY, Rows(0.0), np.random.default_rng(1), largest=3000)


def test_without_a_gpu_it_says_so_and_needs_nothing_but_numpy_for_that() -> None:
    script = (
        "import sys, runpy\n"
        "for name in ('msgspec', 'numba', 'cupy', 'zstandard', 'aiohttp', 'click', 'structlog'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['gpu_check.py']\n"
        "runpy.run_path('bench/gpu_check.py', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=gpu_check.ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 69
    assert done.stderr.startswith("nothing was checked: GPU 0: CuPy cannot be imported")
