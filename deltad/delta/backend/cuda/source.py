"""The kernels' source: where it lies, which kernels it has, and how their arguments are laid out.

The `.cuh` files are the one place where a kernel and its arguments are declared; this module reads names and
fields from them, so that a launch that does not fit is refused before it reaches a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from deltad.delta.digest import U64

FOLDER = Path(__file__).parent / "kernels"
MAIN = FOLDER / "deltad.cu"
THREADS = 256
OPTIONS = ("-std=c++17",)
"""What NVRTC is told beside the architecture."""

Words = int | Sequence[int]

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_KERNEL = re.compile(r"^\s*KERNEL\((\w+?)(##width)?, \w+, (\w+),", re.MULTILINE)
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^    (?:const )?(\w+)(\*?) (\w+(?:, \w+)*)(?:\[(\d+)\])?;", re.MULTILINE)
_WIDTHS = (1, 2, 4, 8)


@cache
def text() -> str:
    """The whole source as one file, which is what every build compiles: a cache that goes by it sees every change."""
    seen: set[str] = set()

    def with_includes(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        body = (FOLDER / name).read_text(encoding="utf-8").replace("#pragma once\n", "\n")
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(body.splitlines(), 1):
            included = _INCLUDE.match(line)
            lines += [with_includes(included[1]), f'#line {number + 1} "{name}"'] if included else [line]
        return "\n".join(lines)

    return with_includes(MAIN.name) + "\n"


@cache
def kernels() -> Mapping[str, Mapping[str, int]]:
    """Every kernel by name, and its arguments: field and number of 8-byte words, in order."""
    structs: dict[str, str] = dict(_STRUCT.findall(text()))
    found: dict[str, Mapping[str, int]] = {}
    for name, wide, arguments in _KERNEL.findall(MAIN.read_text(encoding="utf-8")):
        fields = _fields(structs, arguments)
        found |= {f"{name}{width}": fields for width in _WIDTHS} if wide else {name: fields}
    return found


def _fields(structs: Mapping[str, str], name: str) -> dict[str, int]:
    """Fields of a struct whose fields are all words: pointers, u64, and structs of such."""
    found = {}
    for kind, pointer, names, count in _FIELD.findall(structs[name]):
        nested = 1 if pointer or kind not in structs else sum(_fields(structs, kind).values())
        for field in names.split(", "):
            found[field] = nested * int(count or 1)
    return found


def pack(kernel: str, values: Mapping[str, Words]) -> U64:
    """The arguments of a kernel as words. Raises TypeError unless `values` has exactly its fields."""
    fields = kernels()[kernel]
    if fields.keys() != values.keys():
        raise TypeError(f"{kernel} takes {', '.join(fields)}; not {', '.join(fields.keys() ^ values.keys())}")
    words: list[int] = []
    for field, count in fields.items():
        value = values[field]
        given = [value] if isinstance(value, int) else list(value)
        if len(given) != count:
            raise TypeError(f"{kernel}: {field} is {count} words, not {len(given)}")
        words += given
    return np.array(words, np.uint64)
