"""Single words and single vectors: what numba cannot say by itself, in LLVM's terms.

Lanes and streams are reached by address: mapped files give arrays that are read-only and not aligned, and
one compiled kernel serves them all. Nothing here checks an address; whoever calls has done so.
`like` is any array of the lane type: only its type counts. Everything is unsigned 64-bit: numba turns
a sum of signed and unsigned into a float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types  # type: ignore[import-untyped]

from deltad.delta.backend.numba.compiling import has_fast_deposit, intrinsic, part

GROUP = 64
"""Lanes that one mask covers."""
Word = Any
"""An unsigned 64-bit integer, inside a kernel."""
Array = Any
"""A one-dimensional scratch array, inside a kernel."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_63 = np.uint64(63)
_64 = np.uint64(64)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
FAST_DEPOSIT = has_fast_deposit()

_I64 = ir.IntType(64)


def _vector(builder: Any, address: Any, bits: int) -> Any:
    pointer = builder.inttoptr(address, ir.VectorType(ir.IntType(bits), GROUP).as_pointer())
    return builder.load(pointer, align=1)


def _splat(builder: Any, value: Any, bits: int) -> Any:
    element = builder.trunc(value, ir.IntType(bits)) if bits < 64 else value
    undefined = ir.Constant(ir.VectorType(ir.IntType(bits), GROUP), ir.Undefined)
    single = builder.insert_element(undefined, element, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP)
    return builder.shuffle_vector(single, undefined, zeros)


@intrinsic
def differing(typing: Any, old: Any, new: Any, like: Any) -> Any:
    """The mask of the 64 lanes at two addresses: bit q is set where lane q differs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = like.dtype.bitwidth
        vectors = [_vector(builder, address, bits) for address in arguments[:2]]
        return builder.bitcast(builder.icmp_unsigned("!=", *vectors), _I64)

    return types.uint64(types.uint64, types.uint64, like), generate


@intrinsic
def within(typing: Any, lanes: Any, first: Any, span: Any, like: Any) -> Any:
    """The mask of the 64 lanes at an address whose magnitude m has first ≤ m < first + span."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = like.dtype.bitwidth
        vector = _vector(builder, arguments[0], bits)
        kept = ir.Constant(vector.type, [(1 << (bits - 1)) - 1] * GROUP)
        from_first = builder.sub(builder.and_(vector, kept), _splat(builder, arguments[1], bits))
        return builder.bitcast(builder.icmp_unsigned("<", from_first, _splat(builder, arguments[2], bits)), _I64)

    return types.uint64(types.uint64, types.uint64, types.uint64, like), generate


@intrinsic
def lane_width(typing: Any, like: Any) -> Any:
    """Bytes per lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _I64(like.dtype.bitwidth // 8)

    return types.uint64(like), generate


@intrinsic
def load_lane(typing: Any, address: Any, index: Any, like: Any) -> Any:
    """Lane `index` of those at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, *arguments[:2], like.dtype.bitwidth)

    return types.uint64(types.uint64, types.uint64, like), generate


@intrinsic
def store_lane(typing: Any, address: Any, index: Any, value: Any, like: Any) -> Any:
    """Write the low bits of `value` as lane `index` of those at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, *arguments[:3], like.dtype.bitwidth)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, like), generate


def _load(builder: Any, address: Any, index: Any, bits: int) -> Any:
    entry = ir.IntType(bits)
    pointer = builder.gep(builder.inttoptr(address, entry.as_pointer()), [index])
    value = builder.load(pointer, align=1)
    return builder.zext(value, _I64) if bits < 64 else value


def _store(builder: Any, address: Any, index: Any, value: Any, bits: int) -> None:
    entry = ir.IntType(bits)
    pointer = builder.gep(builder.inttoptr(address, entry.as_pointer()), [index])
    builder.store(builder.trunc(value, entry) if bits < 64 else value, pointer, align=1)


def _loader(bits: int) -> Any:
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _load(builder, *arguments, bits)

        return types.uint64(types.uint64, types.uint64), generate

    return intrinsic(load)


def _storer(bits: int) -> Any:
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _store(builder, *arguments, bits)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64, types.uint64), generate

    return intrinsic(store)


load8, load32, load64 = _loader(8), _loader(32), _loader(64)
"""`load(address, index)`: entry `index` of the unsigned integers of so many bits at `address`."""
store8, store32, store64 = _storer(8), _storer(32), _storer(64)
"""`store(address, index, value)`: write the low bits of `value` there."""


@intrinsic
def copy_bytes(typing: Any, to: Any, source: Any, count: Any) -> Any:
    """memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2]]
        cgutils.raw_memcpy(builder, *pointers, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at `address`. Any address is allowed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """The position of the lowest set bit; 64 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@intrinsic
def leading(typing: Any, word: Any) -> Any:
    """The number of zero bits above the highest set one; 64 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """The number of set bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def _pdep(typing: Any, bits: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
        return builder.call(function, arguments)

    return types.uint64(types.uint64, types.uint64), generate


@part
def select(mask: Word, rank: Word) -> Word:
    """The position of set bit number `rank` (below their count) of `mask`: a binary search by counting."""
    position = _0
    rest = mask
    step = np.uint64(32)
    while step != _0:
        count = ones(rest & ((_1 << step) - _1))
        if rank >= count:
            rank -= count
            rest >>= step
            position += step
        step >>= _1
    return position


@part
def _deposit_by_search(bits: Word, mask: Word) -> Word:
    result = _0
    while bits != _0:
        result |= _1 << select(mask, lowest(bits))
        bits &= bits - _1
    return result


deposit = _pdep if FAST_DEPOSIT else _deposit_by_search
"""Bit i of the first argument moved to where set bit number i of the second is; others are zero.

No bit may be set beyond the count of set bits: few bits are meant to be, which the search relies on for speed.
"""


@part
def below(count: Word) -> Word:
    """The mask of the lowest `count` bits, 0 to 64."""
    return _ALL >> (_64 - count) if count != _0 else _0
