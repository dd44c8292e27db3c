// Decoding, second half: changes to lanes, and what they add to the sums.
//
// `compose` reads old lanes and writes none, so that the host can refuse a frame whose sums are not those that it
// claims; `scatter` then writes.

#pragma once

#include "locate.cuh"
#include "spell.cuh"

struct Compose {
    Tiling tiling;  // in tiles of any size: only changed lanes are read
    u64 kind;
    const u64* keys;
    const u32* positions;  // ascending: in the frame
    u64 changed;
    const void* codes;
    void* differences;  // out, where they are asked for, else null
    void* lanes;        // out: new lanes
    u64* sums;          // [segment][2]
};

struct ComposeShared {
    Tile tile;
    u64 bounds[2];  // the tile's changes
    RunningSum<Sums> sums;
};

template <class Lane>
DEVICE void compose_tile(Thread me, ComposeShared& shared, const Compose& arguments) {
    find_tile<Lane>(me.index, shared.tile, arguments.tiling, me.block);
}

DEVICE void compose_find(Thread me, ComposeShared& shared, const Compose& arguments) {
    if (me.index >= 2) return;
    const Tile& tile = shared.tile;
    const u64 bound = tile.position + (me.index ? tile.lanes : 0);
    shared.bounds[me.index] = lower_bound(arguments.positions, 0, arguments.changed, bound);
}

template <class Lane>
DEVICE void compose_lanes(Thread me, ComposeShared& shared, const Compose& arguments) {
    const Tile& tile = shared.tile;
    const Kind kind(arguments.kind);
    Sums sums{};
    for (u64 i = shared.bounds[0] + me.index; i < shared.bounds[1]; i += THREADS) {
        const u64 at = arguments.positions[i] - tile.position;
        const Lane old = static_cast<const Lane*>(tile.old_lanes)[at];
        const Lane difference = from_code(static_cast<const Lane*>(arguments.codes)[i], old, kind);
        const Lane now = compose(old, difference, kind);
        if (arguments.differences) static_cast<Lane*>(arguments.differences)[i] = difference;
        static_cast<Lane*>(arguments.lanes)[i] = now;
        sums += share_of_change(arguments.keys, tile.base, tile.canonical + at, old, now);
    }
    shared.sums.put(me.index, sums);
}

DEVICE void compose_give(Thread me, ComposeShared& shared, const Compose& arguments) {
    if (me.index != 0 || shared.bounds[0] == shared.bounds[1]) return;
    shared.sums.add_groups();
    give(arguments.sums + 2 * shared.tile.segment, shared.sums.total());
}

template <class Lane>
DEVICE void scatter_lanes(Thread me, ComposeShared& shared, const Compose& arguments) {
    const Tile& tile = shared.tile;
    Lane* target = static_cast<Lane*>(const_cast<void*>(tile.old_lanes));
    for (u64 i = shared.bounds[0] + me.index; i < shared.bounds[1]; i += THREADS) {
        target[arguments.positions[i] - tile.position] = static_cast<const Lane*>(arguments.lanes)[i];
    }
}

// --- Differences at canonical positions of one tensor, written in place.

struct Apply {
    void* target;
    u64 step;  // lanes from one to the next; 0: the target holds the changed lanes alone
    const u64* positions;
    const void* differences;
    u64 changed;
    u64 kind;
    const u64* keys;
    u64 base[2];
    void* old_lanes;  // out
    u64* sums;
};

struct ApplyShared {
    RunningSum<Sums> sums;
};

template <class Lane>
DEVICE void apply_lanes(Thread me, ApplyShared& shared, const Apply& arguments) {
    const Kind kind(arguments.kind);
    Lane* target = static_cast<Lane*>(arguments.target);
    Sums sums{};
    const u64 first = u64(me.block) * PIECE;
    for (u64 i = first + me.index; i < least(first + PIECE, arguments.changed); i += THREADS) {
        Lane* at = target + (arguments.step ? arguments.positions[i] * arguments.step : i);
        const Lane old = *at;
        const Lane now = compose(old, static_cast<const Lane*>(arguments.differences)[i], kind);
        static_cast<Lane*>(arguments.old_lanes)[i] = old;
        *at = now;
        sums += share_of_change(arguments.keys, arguments.base, arguments.positions[i], old, now);
    }
    shared.sums.put(me.index, sums);
}

DEVICE void apply_give(Thread me, ApplyShared& shared, const Apply& arguments) {
    if (me.index != 0) return;
    shared.sums.add_groups();
    give(arguments.sums, shared.sums.total());
}
