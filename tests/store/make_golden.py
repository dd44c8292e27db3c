"""Makes a golden store: `python -m tests.store.make_golden FORMAT DIRECTORY`. Prints the roots of its versions.

For the format that is written today; and for format 1, in which every object was a file of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deltad.store.store import STORE_FORMAT, Store
from tests.kit.versions import Lineage


def make(number: int, path: Path) -> None:
    lineage = Lineage("golden", tensors=2, elements=4096)
    lineage.publish()
    lineage.publish()
    lineage.publish(anchor=True)
    store = Store.open(path)
    for version in lineage.versions:
        for digest, data in version.objects.items():
            put = store.put_chunk if digest in version.chunks and number > 1 else store.put
            put(data)
        store.run(version.run).commit(version.data)
        print(version.version, version.record.variants[0].root.hex())
    store.close()
    (path / "FORMAT").write_text(f"deltad store {number}\n")
    (path / "lock").unlink()
    for empty in [path for path in path.rglob("*") if path.is_dir() and not any(path.iterdir())]:
        empty.rmdir()


if __name__ == "__main__":
    assert int(sys.argv[1]) in (1, STORE_FORMAT)
    make(int(sys.argv[1]), Path(sys.argv[2]))
