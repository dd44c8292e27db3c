"""95 % intervals for the little data that a bench has. Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % points of Student's t, by degrees of freedom."""

_Z = 1.960


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean of 2 to 10 independent values. Raises ValueError for other counts."""
    if len(values) - 1 not in _T:
        raise ValueError(f"{len(values)} values: expected 2 to 10")
    mean = statistics.fmean(values)
    half = _T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson_interval(right: int, of: int) -> tuple[float, float]:
    """Wilson's score interval of a share: `right` of `of` independent answers. Raises ValueError if of < 1."""
    if not 0 <= right <= of or of < 1:
        raise ValueError(f"{right} of {of}: expected a share of at least one answer")
    share, square = right / of, _Z * _Z / of
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / of + square / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)
