"""Single words and single vectors: what numba cannot say by itself, in LLVM's terms.

Lanes and streams are reached by address: mapped files give arrays that are read-only and not aligned, and
one compiled kernel serves them all. Nothing here checks an address; whoever calls has done so.
`like` is any array of the lane type: only its type counts. Everything is unsigned 64-bit: numba turns
a sum of signed and unsigned into a float.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltad.delta.backend.numba.compiling import cgutils, has_fast_deposit, intrinsic, ir, part, types

GROUP = 64
"""Lanes that one mask covers."""
Word = Any
"""An unsigned 64-bit integer, inside a kernel."""
Array = Any
"""A one-dimensional scratch array, inside a kernel."""

_0, _1, _2, _4, _8, _16, _32, _64 = (np.uint64(n) for n in (0, 1, 2, 4, 8, 16, 32, 64))
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
def keep_apart(typing: Any) -> Any:
    """Said in a phase: it is called, never inlined, so that LLVM gives registers and vectors to it alone."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


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
def at_least(typing: Any, lanes: Any, shift: Any, kept: Any, a: Any, b: Any, c: Any, d: Any, like: Any) -> Any:
    """Four masks of the 64 lanes at an address: which exponents are at least a, b, c, d.

    An exponent is a lane shifted right by `shift`, and of that the bits `kept`. Exponents are compared as bytes,
    of which a vector holds the most; those of 8-byte lanes do not fit one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = like.dtype.bitwidth
        narrow = 8 if bits < 64 else 16
        shifted = builder.lshr(_vector(builder, arguments[0], bits), _splat(builder, arguments[1], bits))
        cut = builder.trunc(shifted, ir.VectorType(ir.IntType(narrow), GROUP)) if bits > narrow else shifted
        exponents = builder.and_(cut, _splat(builder, arguments[2], narrow))
        masks = [
            builder.bitcast(builder.icmp_unsigned(">=", exponents, _splat(builder, least, narrow)), _I64)
            for least in arguments[3:7]
        ]
        return context.make_tuple(builder, signature.return_type, masks)

    word = types.uint64
    return types.UniTuple(word, 4)(word, word, word, word, word, word, word, like), generate


@intrinsic
def above(typing: Any, lanes: Any, least: Any, like: Any) -> Any:
    """The mask of the 64 lanes at an address that are `least` or more."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = like.dtype.bitwidth
        vector = _vector(builder, arguments[0], bits)
        return builder.bitcast(builder.icmp_unsigned(">=", vector, _splat(builder, arguments[1], bits)), _I64)

    return types.uint64(types.uint64, types.uint64, like), generate


@intrinsic
def having(typing: Any, lanes: Any, bit: Any, like: Any) -> Any:
    """The mask of the 64 lanes at an address that have any of the bits of `bit`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = like.dtype.bitwidth
        vector = builder.and_(_vector(builder, arguments[0], bits), _splat(builder, arguments[1], bits))
        return builder.bitcast(builder.icmp_unsigned("!=", vector, ir.Constant(vector.type, [0] * GROUP)), _I64)

    return types.uint64(types.uint64, types.uint64, like), generate


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
        return _load(builder, arguments[0], arguments[1], like.dtype.bitwidth)

    return types.uint64(types.uint64, types.uint64, like), generate


@intrinsic
def store_lane(typing: Any, address: Any, index: Any, value: Any, like: Any) -> Any:
    """Write the low bits of `value` as lane `index` of those at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, arguments[0], arguments[1], arguments[2], like.dtype.bitwidth)
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
            return _load(builder, arguments[0], arguments[1], bits)

        return types.uint64(types.uint64, types.uint64), generate

    return intrinsic(load)


def _storer(bits: int) -> Any:
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _store(builder, arguments[0], arguments[1], arguments[2], bits)
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
        to, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
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
def select_by_counting(mask: Word, rank: Word) -> Word:
    """`select` by binary search, for every processor."""
    position, rest = _0, mask
    for step in (_32, _16, _8, _4, _2, _1):
        count = ones(rest & ((_1 << step) - _1))
        if rank >= count:
            rank -= count
            rest >>= step
            position += step
    return position


@part
def _select_by_deposit(mask: Word, rank: Word) -> Word:
    return lowest(_pdep(_1 << rank, mask))


select = _select_by_deposit if FAST_DEPOSIT else select_by_counting
"""The position of set bit number `rank` of `mask`, which has more than that."""


@part
def spread(bits: Word) -> Word:
    """Bit i of the low half moved to bit 2i; zeros between."""
    bits &= np.uint64(0xFFFF_FFFF)
    bits = (bits | (bits << _16)) & np.uint64(0x0000_FFFF_0000_FFFF)
    bits = (bits | (bits << _8)) & np.uint64(0x00FF_00FF_00FF_00FF)
    bits = (bits | (bits << _4)) & np.uint64(0x0F0F_0F0F_0F0F_0F0F)
    bits = (bits | (bits << _2)) & np.uint64(0x3333_3333_3333_3333)
    return (bits | (bits << _1)) & np.uint64(0x5555_5555_5555_5555)


@part
def below(count: Word) -> Word:
    """The mask of the lowest `count` bits, 0 to 64."""
    return _ALL >> (_64 - count) if count != _0 else _0
