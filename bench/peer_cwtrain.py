"""Runs cwtrain on request, for a bench in another process. Started by the Python of .venv-peers.

    python peer_cwtrain.py BASE NEW WORK      then on standard input: write | apply | end

Answers each line with the seconds that it took, and the first, unasked, with `ready VERSION THREADS BYTES`. `write`
makes the delta BASE → NEW; `apply` applies it to a mirror, and the next time the one that leads back.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path


def main(base: Path, new: Path, work: Path) -> None:
    # Installed where this runs, and nowhere else.
    from cwtrain.hotload import WeightMirror  # type: ignore[import-not-found]
    from cwtrain.hotload.delta import write_delta  # type: ignore[import-not-found]

    stats = write_delta(base, new, work / "there", version="1", base_version="0")
    write_delta(new, base, work / "back", version="2", base_version="1")
    mirror = WeightMirror.create(base, work / "mirror", version="0")
    sizes = sum(path.stat().st_size for path in Path(stats.path).iterdir())
    print("ready", importlib.metadata.version("cwtrain"), os.cpu_count(), sizes, flush=True)
    applied = 0
    for line in sys.stdin:
        begun = time.perf_counter()
        if line.strip() == "write":
            write_delta(base, new, work / "again", version="1", base_version="0")
        elif line.strip() == "apply":
            delta = work / ("back" if applied % 2 else "there")
            _rename(delta, str(applied + 1), str(applied))
            begun = time.perf_counter()
            mirror.apply_delta(delta)
            applied += 1
        else:
            return
        print(time.perf_counter() - begun, flush=True)


def _rename(delta: Path, version: str, base_version: str) -> None:
    """Make a delta lead to another version: its bytes hold for any that alternates between the two states."""
    path = delta / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] |= {"version": version, "base_version": base_version}
    path.write_text(json.dumps(index))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
