"""Canonical Huffman codes over bytes: from counts to code lengths, and from lengths to codes and the table to read by.

Integers throughout, ties decided, so equal counts give equal codes on every machine. Owns the invariant that
a table which is not of a complete code is refused: any 12 bits then begin with just one codeword.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import Stream
from deltad.delta.coding import LONGEST_CODE
from deltad.errors import FormatError

WINDOWS = 1 << LONGEST_CODE

Lengths = npt.NDArray[np.uint8]
"""The length of every symbol's codeword, 0 for one that has none. Shape [256]."""


@dataclass(frozen=True, slots=True)
class Code:
    """A code: for each symbol its length, and its codeword with the first bit lowest; shape [256] each.

    `symbols` and `sizes` say for every window of 12 bits, the next bit lowest, which symbol's codeword it begins
    with, and how long that is; shape [4096] each.
    """

    lengths: Lengths
    words: npt.NDArray[np.uint16]
    symbols: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, lengths: Lengths) -> Code:
        """The canonical code of lengths that make a complete one."""
        used = np.flatnonzero(lengths)
        order = used[np.argsort(lengths[used], kind="stable")].astype(np.uint8)
        # With its first bit highest, a codeword and all that may follow it are consecutive windows.
        spans = WINDOWS >> lengths[order].astype(np.int64)
        words = np.zeros(256, np.uint16)
        words[order] = _REVERSED[np.cumsum(spans) - spans]
        symbols = np.repeat(order, spans)[_REVERSED]
        return cls(lengths, words, symbols, lengths[symbols])


def code_lengths(counts: npt.NDArray[np.int64]) -> Lengths:
    """Lengths of at most 12 bits that make symbols with these counts, shape [256], as short as can be.

    At least two symbols are counted. By package-merge (Larmore and Hirschberg, 1990): a list begins with the
    leaves, which are the counts, ascending, ties by symbol. The next list holds the leaves and the sums of
    the pairs of the one before, merged by weight, leaves first among equals. Of the twelfth list the first
    2·n − 2 entries are bought, and whatever a bought sum was made of is bought too: a symbol's length is how
    often its leaf was bought.
    """
    used = np.flatnonzero(counts)
    order = used[np.argsort(counts[used], kind="stable")]
    leaves = counts[order]
    sums = np.empty(0, np.int64)
    are_leaves = []
    for _ in range(LONGEST_CODE):
        both = np.concatenate([leaves, sums])
        merged = np.argsort(both, kind="stable")
        are_leaves.append(merged < leaves.size)
        sums = both[merged[: both.size // 2 * 2]].reshape(-1, 2).sum(axis=1)
    lengths = np.zeros(256, np.uint8)
    bought = 2 * leaves.size - 2
    for is_leaf in reversed(are_leaves):
        cheapest = int(np.count_nonzero(is_leaf[:bought]))
        lengths[order[:cheapest]] += np.uint8(1)
        bought = 2 * (bought - cheapest)
    return lengths


def write_table(lengths: Lengths) -> bytes:
    """The table of a code."""
    return (lengths[0::2] | lengths[1::2] << np.uint8(4)).tobytes()


def read_table(table: Stream) -> Code:
    """The code of a table of 128 bytes. Raises FormatError unless it is a complete one."""
    packed = np.frombuffer(table, np.uint8)
    lengths = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(-1)
    used = lengths[lengths > 0].astype(np.int64)
    if used.size and int(used.max()) > LONGEST_CODE:
        raise FormatError("frame: code table", expected=f"up to {LONGEST_CODE} bits", found=f"{used.max()} bits")
    taken = int((WINDOWS >> used).sum())
    if taken != WINDOWS:
        raise FormatError("frame: code table", expected=f"a complete code of {WINDOWS} windows", found=str(taken))
    return Code.of(lengths)


def _reversed() -> npt.NDArray[np.uint16]:
    """Every window with its bits in the other order."""
    windows = np.arange(WINDOWS, dtype=np.uint16)
    turned = np.zeros_like(windows)
    for bit in range(LONGEST_CODE):
        turned |= (windows >> np.uint16(bit) & np.uint16(1)) << np.uint16(LONGEST_CODE - 1 - bit)
    return turned


_REVERSED = _reversed()
