"""A store of every format that was ever written opens today, and goes on (P17).

`golden/format-N` was made by the deltad that wrote format N: three versions of run `golden`, the third with a
delta and an anchor (`make_golden.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deltad.delta.backend import choose
from deltad.store.mirror import Mirror
from deltad.store.store import STORE_FORMAT, Store
from deltad.types import Variant, Version, parse_run
from tests.kit.whole import whole_versions

GOLDEN = Path(__file__).parent / "golden"
RUN = parse_run("golden")
ROOTS = {
    Version(1, 1): "6db7524ebe2eb2da8df7ff4961c2afca0eebe49ab6e4973fc8307f08e5931bdb",
    Version(1, 2): "f805a32e294e7dbc1e8ae6a533b793b7633a640fe9c0de2c460e74e1e6377392",
    Version(1, 3): "c2a8a317ee943a67fdceebb96d1ad90ec2a5169ed7ccaadaa2c0c038fab005b1",
}


def test_there_is_a_golden_store_of_every_format() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == [f"format-{n}" for n in range(1, STORE_FORMAT + 1)]


@pytest.mark.parametrize("number", range(1, STORE_FORMAT + 1))
def test_a_store_of_this_format_opens_and_all_its_versions_are_there(tmp_path: Path, number: int) -> None:
    path = tmp_path / "store"
    shutil.copytree(GOLDEN / f"format-{number}", path)
    for _ in ("as it was", "as the first start has left it"):
        store = Store.open(path)
        assert whole_versions(store, RUN) == list(ROOTS)
        mirror = Mirror(store, store.run(RUN), Variant("bf16"), choose())
        for version, root in ROOTS.items():
            found, wrong = mirror.verify(store.run(RUN).record(version), tmp_path / "scratch")
            assert (found.hex(), wrong) == (root, [])
        assert (path / "FORMAT").read_text() == f"deltad store {STORE_FORMAT}\n"
        store.put_chunk(b"what this format writes")
        store.close()
