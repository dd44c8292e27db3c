"""When a delta is no longer worth its base: an anchor is cut beside it, and the smaller one is kept. Pure.

An anchor is packed, so it takes less than all weights: of trained ones 0.67 in bf16 and fp16 and 0.83 in fp32,
measured on the pairs of `python -m bench codec` and casts of them. A delta below `ANCHOR_MAY_WIN` is taken
without a trial, which costs as much as a publish.
"""

from __future__ import annotations

from deltad.delta.codec import EdgeEncoder

ANCHOR_MAY_WIN = 0.6
"""The share of all weights above which a delta is compared with an anchor."""


def may_win(delta_bytes: int, full_bytes: int) -> bool:
    """Whether an anchor may take fewer bytes than this delta."""
    return delta_bytes > ANCHOR_MAY_WIN * full_bytes


def smaller_anchor(encoder: EdgeEncoder, delta_bytes: int, density: float) -> str:
    """Why the anchor that `encoder` makes is kept and not the delta; empty where the delta is smaller.

    Encodes the anchor, at most until it is larger than the delta, and keeps nothing of it. Where both take the
    same, the anchor needs no base.
    """
    size = 0
    for chunk in encoder.chunks():
        size += chunk.ref.size
        if size > delta_bytes:
            return ""
    full = encoder.layout.weight_bytes
    return (
        f"density {density:.2f} is above the break-even: the delta takes {_percent(delta_bytes, full)} of all weights, "
        f"the anchor {_percent(size, full)}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "nothing"
