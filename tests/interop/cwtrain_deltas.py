"""cwtrain's own writer and reader of disk-deltas. Run by the Python of .venv-peers.

write BASE NEW OUT VERSION BASE_VERSION
apply BASE MIRROR OUT DELTA...              makes a mirror of BASE, version 000000, applies, writes it whole to OUT
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(verb: str, *words: str) -> None:
    from cwtrain.hotload import WeightMirror  # type: ignore[import-not-found]
    from cwtrain.hotload.delta import write_delta  # type: ignore[import-not-found]

    if verb == "write":
        base, new, out, version, base_version = words
        write_delta(base, new, out, version=version, base_version=base_version)
        return
    base, root, out, *deltas = words
    mirror = WeightMirror.create(Path(base), Path(root), version="000000")
    for delta in deltas:
        print(mirror.apply_delta(delta).tensors_changed)
    mirror.write_full_snapshot(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
