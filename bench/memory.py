"""How much memory an encoder and its threads need beyond what it is: measured in a process that does nothing else.

    python -m bench.memory OLD NEW MODE BACKEND        two checkpoint directories; prints one JSON object

The baseline is what is resident once everything is imported, compiled and has run on a little data.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import cast, get_args

import numpy as np

from bench.frames import backend
from deltad.checkpoint import open_checkpoint
from deltad.delta.backend import Mode, Place
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.threads import default_threads
from deltad.types import DTYPES

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def main(old: Path, new: Path, mode: Mode, kind: str) -> None:
    """Encode OLD → NEW and print what was resident: {"baseline", "peak"}, in bytes."""
    coder = backend(kind)
    few = np.arange(0x3F00, 0x4100, dtype=np.uint16)
    coder.encode([few], [few ^ np.uint16(few % 7 == 0)], [Place(1, 0)], DTYPES["BF16"], mode)
    with open_checkpoint(old) as base, open_checkpoint(new) as target:
        sums = sum_weights(base.layout, base, coder)
        gc.collect()
        baseline = resident("VmRSS")
        reset_peak()
        encoder = EdgeEncoder(
            target.layout, target, coder, base=base, base_sums=sums, mode=mode, threads=default_threads()
        )
        for _ in encoder.chunks():
            pass
        print(json.dumps({"baseline": baseline, "peak": resident("VmHWM")}))


def reset_peak() -> None:
    """Let `resident("VmHWM")` begin anew."""
    _CLEAR.write_text(_RESET_PEAK)


def resident(what: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) != 4 or given[2] not in get_args(Mode):
        sys.exit(f"expected: OLD NEW {'|'.join(get_args(Mode))} BACKEND")
    main(Path(given[0]), Path(given[1]), cast(Mode, given[2]), given[3])
