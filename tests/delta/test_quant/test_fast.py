"""What is true of the compiled quantisers beyond their bytes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from deltad.delta.quant import fast, fp8, mx
from tests.delta.test_quant.conftest import patterns


def test_importing_them_does_not_load_numba() -> None:
    probe = "import sys, deltad.delta.quant.fast; print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "False"


def test_they_have_every_quantiser_of_the_reference() -> None:
    reference = {name for module in (fp8, mx) for name in vars(module) if "quantise" in name and name[0] != "_"}
    assert reference <= set(fast.__all__)


def test_read_only_lanes_are_quantised_and_left_alone() -> None:
    lanes = patterns(np.linspace(-3, 3, 64))
    before = lanes.copy()
    lanes.flags.writeable = False
    for name in ("quantise_tensor", "quantise_mxfp8", "quantise_mxfp4"):
        getattr(fast, name)(lanes)
    fast.quantise_blocks(lanes.reshape(8, 8))
    assert np.array_equal(lanes, before)
