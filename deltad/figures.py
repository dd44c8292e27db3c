"""Numbers, moments and digests as people read them: one form for the command line and the status page.

Imports nothing of the project. Invariant: no rounding turns what is not zero into zero, or what is not all into all.
"""

from __future__ import annotations

import math
import time

import msgspec

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """Bytes for people: `512 B`, `1.50 KiB`, `12.3 MiB`, `270 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    value, unit = count / 1024, _UNITS[0]
    for larger in _UNITS[1:]:
        # 999.5 would be shown as 1000: the next unit says it shorter.
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{_digits(value)} {unit}"


def rate(per_second: float) -> str:
    """Bytes per second for people."""
    return f"{size(per_second)}/s"


def percent(share: float) -> str:
    """A share of one: `0.31 %`, `12.4 %`, `100 %`; what is not zero or not all is never shown as zero or all."""
    value = share * 100
    if 0 < value < 0.001:
        return "<0.001 %"
    if value < 0.1:
        return f"{value:.3f} %" if value else "0 %"
    if 99.95 <= value < 100:
        return f"{min(math.floor(value * 1000), 99_999) / 1000:.3f} %"
    return f"{_digits(value)} %"


def percent_of(part: float, whole: float) -> str:
    """`part` as a percentage of `whole`; a dash where there is no whole."""
    return percent(part / whole) if whole else "–"


def duration(seconds: float) -> str:
    """Seconds for people: `83 ms`, `4.21 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{max(seconds * 1000, 1):.0f} ms"
    if seconds < 59.95:
        return f"{_digits(seconds)} s"
    whole = round(seconds)
    for unit, per, smaller, per_smaller in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= per:
            rest = whole % per // per_smaller
            return f"{whole // per} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def when(unix: float) -> str:
    """A moment in the local time of whoever asks, with its distance from UTC; a dash where it is unknown."""
    if not unix:
        return "–"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix))
    except (OverflowError, ValueError, OSError):
        return "–"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 tensor`, `1,204 tensors`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def clean(text: str) -> str:
    """The same text on one line with everything escaped that a terminal, or the direction of writing, might obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(digest: str) -> str:
    """The first 12 hex digits of a digest, enough to compare by eye."""
    return f"{digest[:12]}…" if len(digest) > 12 else digest or "–"


def stages(seconds: msgspec.Struct) -> str:
    """`settle 1.02 s, encode 2.31 s`: the stages that took time, in the order of the fields."""
    named = [(name, getattr(seconds, name)) for name in seconds.__struct_fields__]
    return ", ".join(f"{name} {duration(value)}" for name, value in named if value)


def _digits(value: float) -> str:
    """Three digits that matter, without a decimal point where none is needed."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
