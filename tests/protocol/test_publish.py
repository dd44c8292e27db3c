"""Which numbers may have been published once and been let go: told from the records that are left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.record import VersionRecord
from deltad.protocol.publish import is_gap
from deltad.types import Version

VERSIONS = st.builds(Version, st.integers(1, 3), st.integers(0, 12))


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[VersionRecord], list[VersionRecord]]:
    """All versions of a run in ascending order, and those that are left; the newest is never let go."""
    versions = sorted(draw(st.sets(VERSIONS, min_size=1, max_size=12)))
    records = [VersionRecord(1, 1, "r", version, None, sequence, ()) for sequence, version in enumerate(versions, 1)]
    left = [record for record in records[:-1] if draw(st.booleans())]
    return records, [*left, records[-1]]


@given(lives())
def test_every_version_that_was_let_go_lies_in_a_gap(life: tuple[list[VersionRecord], list[VersionRecord]]) -> None:
    records, left = life
    for record in records:
        if record not in left:
            assert is_gap(record.version, left)


@given(lives(), VERSIONS)
def test_a_number_that_never_was_lies_in_a_gap_only_where_a_neighbour_was_let_go(
    life: tuple[list[VersionRecord], list[VersionRecord]], version: Version
) -> None:
    records, left = life
    if version in {record.version for record in records}:
        return
    below = max((record.version for record in left if record.version < version), default=Version(0, 0))
    above = min((record.version for record in left if record.version > version), default=None)
    gone = [record for record in records if above is not None and below < record.version < above]
    assert is_gap(version, left) == bool(gone)
    assert not is_gap(version, records), "where all are held, nothing is missing"
