// The element sum (FORMAT.md, 8.1): of bytes as they lie, and of changes.

#pragma once

#include "lanes.cuh"

constexpr u64 BLOCK_CELLS = 16384;
constexpr u64 BLOCK_BYTES = 4 * BLOCK_CELLS;

struct Sums {
    u64 a, b;

    DEVICE Sums& operator+=(Sums other) {
        a += other.a;
        b += other.b;
        return *this;
    }
};

DEVICE u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

DEVICE u64 multiplier(u64 base, u64 block) { return mix(base + block) | 1; }

// The keys of both sums are one word a cell, the first sum's in the low half.
DEVICE Sums times_keys(u64 keys, u64 value) { return Sums{(keys & 0xFFFFFFFFu) * value, (keys >> 32) * value}; }

// What changing the lane at canonical position `at` adds.
template <class Lane>
DEVICE Sums share_of_change(const u64* keys, const u64 (&base)[2], u64 at, Lane old, Lane now) {
    const u64 byte = at * sizeof(Lane);
    const u64 cell = byte / 4;
    Sums share;
    if constexpr (sizeof(Lane) == 8) {  // two cells, of one block
        share = times_keys(keys[cell % BLOCK_CELLS], u64(u32(now)) - u64(u32(old)));
        share += times_keys(keys[(cell + 1) % BLOCK_CELLS], (now >> 32) - (old >> 32));
    } else {
        share = times_keys(keys[cell % BLOCK_CELLS], (u64(now) - u64(old)) << byte % 4 * 8);
    }
    const u64 block = cell / BLOCK_CELLS;
    return Sums{share.a * multiplier(base[0], block), share.b * multiplier(base[1], block)};
}

// A block's sum goes to the frame's with its first thread: the order of additions modulo 2^64 does not matter.
DEVICE void give(u64* sums, Sums share) {
    add_to(&sums[0], share.a);
    add_to(&sums[1], share.b);
}

// --- The sum of bytes as they lie. A block has the same cells of up to 16 blocks of the digest, so that a thread
// loads its four keys once: 16 bytes of data a step, against 16 multiplications.

constexpr u32 STEPS = 16;                                   // digest blocks of a block
constexpr u32 SLICE_BYTES = THREADS * sizeof(Vector);       // and its part of each of them
constexpr u32 SLICES = u32(BLOCK_BYTES / SLICE_BYTES);

struct SumBytes {
    const u8* data;
    u64 offset;  // of the data in its tensor
    u64 size;
    const u64* keys;
    u64 base[2];  // of the tensor's block multipliers
    u64* sums;
};

struct SumBytesShared {
    u64 multipliers[2][STEPS];
    RunningSum<Sums> sums;
};

// Four cells at a byte of the tensor, zeros where they are outside of the data.
DEVICE Vector load_cells(const SumBytes& arguments, u64 at) {
    const u64 end = arguments.offset + arguments.size;
    Vector cells{};
    if (at >= end || at + sizeof(Vector) <= arguments.offset) return cells;
    if (at >= arguments.offset && at + sizeof(Vector) <= end) {
        const u8* from = arguments.data + (at - arguments.offset);
        if (u64(from) % sizeof(Vector) == 0) return *reinterpret_cast<const Vector*>(from);
    }
    for (u32& cell : cells.word) {
        for (u32 byte = 0; byte < 4; byte++, at++) {
            if (at >= arguments.offset && at < end) cell |= u32(arguments.data[at - arguments.offset]) << byte * 8;
        }
    }
    return cells;
}

DEVICE u64 first_block(Thread me, const SumBytes& arguments) {
    return arguments.offset / BLOCK_BYTES + u64(me.block / SLICES) * STEPS;
}

DEVICE void sum_bytes_multipliers(Thread me, SumBytesShared& shared, const SumBytes& arguments) {
    if (me.index >= 2 * STEPS) return;
    const u32 which = me.index / STEPS, step = me.index % STEPS;
    const u64 base = which ? arguments.base[1] : arguments.base[0];  // no index: arguments stay in their registers
    shared.multipliers[which][step] = multiplier(base, first_block(me, arguments) + step);
}

DEVICE void sum_bytes_add(Thread me, SumBytesShared& shared, const SumBytes& arguments) {
    const u64 within = u64(me.block % SLICES) * SLICE_BYTES + me.index * sizeof(Vector);
    const u64* keys = arguments.keys + within / 4;
    const u64 mine[4] = {keys[0], keys[1], keys[2], keys[3]};
    Sums total{};
    for (u32 step = 0; step < STEPS; step++) {
        const Vector cells = load_cells(arguments, (first_block(me, arguments) + step) * BLOCK_BYTES + within);
        Sums inner{};
        for (u32 i = 0; i < 4; i++) inner += times_keys(mine[i], cells.word[i]);
        total += Sums{inner.a * shared.multipliers[0][step], inner.b * shared.multipliers[1][step]};
    }
    shared.sums.put(me.index, total);
}

// The last two phases of every kernel that adds to sums: shared memory has `sums`, arguments say where they go.
template <class Shared, class Arguments>
DEVICE void add_up_groups(Thread me, Shared& shared, const Arguments&) {
    if (me.index < GROUPS) shared.sums.add_group(me.index);
}

DEVICE void sum_bytes_give(Thread me, SumBytesShared& shared, const SumBytes& arguments) {
    if (me.index != 0) return;
    shared.sums.add_groups();
    give(arguments.sums, shared.sums.total());
}
