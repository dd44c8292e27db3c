"""Whether a link keeps up with the trainer, told from the versions that were passed over on it. Pure.

One gap is a link that was gone for a while; gaps again and again are a link that is slower than versions are made.
"""

from __future__ import annotations

from collections import deque

RECENT = 8
"""How many of the last arrivals count."""
REPEATED = 2
"""From how many gaps among them on the link is called slow."""


class Cadence:
    """The last arrivals of one run over one link."""

    def __init__(self) -> None:
        self._gaps: deque[int] = deque(maxlen=RECENT)
        self._sequence: int | None = None
        self._newest = 0

    def arrived(self, sequence: int, newest: int = 0) -> int:
        """A version came, `sequence` being its place in its run; those between it and the one before did not.

        `newest` is the place of the newest that was known then, 0 if that is not told. Who catches up passes over what
        was there before: only what was made since the last arrival says anything of the link. Returns how many
        versions were passed over, whatever of.
        """
        passed_over = 0
        if self._sequence is not None:
            passed_over = max(sequence - self._sequence - 1, 0)
            made = newest - self._newest if newest and self._newest else sequence
            self.passed_over(max(min(passed_over, made), 0))
        self._sequence, self._newest = sequence, max(newest, self._newest)
        return passed_over

    def passed_over(self, versions: int) -> None:
        """A version came after so many others that did not."""
        self._gaps.append(versions)

    def remark(self, link: str = "the link") -> str:
        """What the trainer should know; empty while the link keeps up."""
        if sum(gap > 0 for gap in self._gaps) < REPEATED:
            return ""
        skipped = sum(self._gaps)
        return f"{link} is slower than the cadence: {skipped} of the last {skipped + len(self._gaps)} versions skipped"
