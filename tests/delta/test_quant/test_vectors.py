"""The kept vectors: both implementations give them, and the command that made them makes them again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.vectors.quant import make

QUANTISE = {
    "fp8_tensor": "quantise_tensor",
    "fp8_block128": "quantise_blocks",
    "mxfp8": "quantise_mxfp8",
    "mxfp4": "quantise_mxfp4",
}


@pytest.mark.parametrize("name", make.FORMATS)
def test_every_vector_is_met(quant: Any, name: str) -> None:
    cases = json.loads(make.file_of(name).read_text())["cases"]
    assert len(cases) >= 9
    for case in cases:
        codes, scales = getattr(quant, QUANTISE[name])(make.unpacked(case["input"]))
        assert np.array_equal(codes, make.unpacked(case["codes"])), case["case"]
        assert np.array_equal(scales, make.unpacked(case["scales"])), case["case"]


@pytest.mark.parametrize("name", make.FORMATS)
def test_the_command_makes_the_kept_files_again(name: str) -> None:
    assert make.content(name) == make.file_of(name).read_text()
