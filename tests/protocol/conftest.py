"""One chain of versions for all tests of the pull machine."""

import pytest

from tests.kit.versions import Lineage, Published


@pytest.fixture(scope="module")
def chain() -> list[Published]:
    """v1 (anchor) … v8; v5 has an anchor beside its delta."""
    lineage = Lineage(tensors=1, elements=512)
    return [lineage.publish(anchor=i == 4) for i in range(8)]
