// Lanes, tiles of them, and the group of differences (FORMAT.md, 7.1).

#pragma once

#include "phases.cuh"

// The lanes of a frame lie in segments, one array each.
struct Segment {
    const void* old_lanes;
    const void* new_lanes;  // encoding only
    u64 lanes;
    u64 position;    // of its first lane in the frame
    u64 canonical;   // and in its tensor
    u64 base[2];     // of the tensor's block multipliers, one for each sum
    u64 first_tile;  // of those that it is cut into
};

struct Tiling {
    const Segment* segments;
    u64 count;
    u64 tile_lanes;  // that a tile has at most
    u64 tiles;
};

// What one block works on: a run of lanes within a segment, so that it has one tensor, and one address to add to.
struct Tile {
    u64 segment;
    const void* old_lanes;
    const void* new_lanes;
    u64 lanes;
    u64 position;
    u64 canonical;
    u64 base[2];
};

// The last of the segments whose `key` is not above a bound; that of the first one is 0. It is never an empty one:
// the next has the same key.
template <u64 Segment::*key>
DEVICE u64 segment_of(const Tiling& tiling, u64 bound) {
    u64 low = 0, high = tiling.count;
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (tiling.segments[middle].*key <= bound) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// The first phase of a kernel that works by tiles: one thread looks its block's up.
template <class Lane>
DEVICE void find_tile(u32 thread, Tile& tile, const Tiling& tiling, u64 index) {
    if (thread != 0) return;
    const u64 found = segment_of<&Segment::first_tile>(tiling, index);
    const Segment& segment = tiling.segments[found];
    const u64 first = (index - segment.first_tile) * tiling.tile_lanes;
    tile.segment = found;
    tile.old_lanes = static_cast<const Lane*>(segment.old_lanes) + first;
    tile.new_lanes = static_cast<const Lane*>(segment.new_lanes) + first;
    tile.lanes = least(tiling.tile_lanes, segment.lanes - first);
    tile.position = segment.position + first;
    tile.canonical = segment.canonical + first;
    tile.base[0] = segment.base[0];
    tile.base[1] = segment.base[1];
}

constexpr u32 EIGHT = 8;                   // lanes of a thread: their masks are bytes
constexpr u32 TILE = THREADS * EIGHT;      // lanes that a tile has at most, where all of them are read
constexpr u32 MOST_CLASSES = 16;
static_assert(MOST_CLASSES * GROUPS == THREADS, "one thread for each class and group of threads");

// Aligned so that they load as vectors, of 16 bytes where there are as many.
template <class Lane>
struct alignas(sizeof(Lane) == 1 ? 8 : 16) Eight {
    Lane lane[EIGHT];
};

struct alignas(16) Vector {
    u32 word[4];
};

// The lanes of a thread, zeros behind the last one.
template <class Lane>
DEVICE Eight<Lane> load_eight(const void* lanes, u64 first, u64 count) {
    const Lane* from = static_cast<const Lane*>(lanes) + first;
    if (first + EIGHT <= count && u64(from) % alignof(Eight<Lane>) == 0) {
        return *reinterpret_cast<const Eight<Lane>*>(from);
    }
    Eight<Lane> eight{};
    for (u32 i = 0; i < EIGHT; i++) {
        if (first + i < count) eight.lane[i] = from[i];
    }
    return eight;
}

// What the host says of a frame's lanes, in one word.
struct Kind {
    bool is_xor, is_line, turns;  // `turns`: codes count away from zero, as the context coder has them
    u32 mantissa;                 // bits below a lane's exponent

    DEVICE explicit Kind(u64 word)
        : is_xor(word & 1), is_line(word & 2), turns(word & 4), mantissa(u32(word >> 8)) {}
};

template <class Lane>
constexpr u32 TOP = 8 * sizeof(Lane) - 1;  // the position of the sign bit

template <class Lane>
DEVICE Lane all_ones_if_negative(Lane lane) {
    return Lane(Lane(0) - Lane(lane >> TOP<Lane>));
}

// Sign and magnitude to two's complement, and back: the map is its own inverse.
template <class Lane>
DEVICE Lane to_line(Lane lane, Kind kind) {
    return kind.is_line ? Lane(lane ^ Lane(all_ones_if_negative(lane) >> 1)) : lane;
}

// Doing it twice undoes it.
template <class Lane>
DEVICE Lane turned(Lane difference, Lane old, Kind kind) {
    const Lane negative = kind.turns && kind.is_line ? all_ones_if_negative(old) : Lane(0);
    return Lane(Lane(difference ^ negative) - negative);
}

// The code of a change; old and new differ.
template <class Lane>
DEVICE Lane to_code(Lane old, Lane now, Kind kind) {
    if (kind.is_xor) return Lane(Lane(old ^ now) - 1);
    const Lane difference = turned(Lane(to_line(now, kind) - to_line(old, kind)), old, kind);
    return Lane(Lane(Lane(difference << 1) ^ all_ones_if_negative(difference)) - 1);
}

// The difference that a code stands for, beside the old lane.
template <class Lane>
DEVICE Lane from_code(Lane code, Lane old, Kind kind) {
    const Lane zigzag = Lane(code + 1);
    if (kind.is_xor) return zigzag;
    return turned(Lane(Lane(zigzag >> 1) ^ Lane(Lane(0) - Lane(zigzag & 1))), old, kind);
}

template <class Lane>
DEVICE Lane compose(Lane old, Lane difference, Kind kind) {
    if (kind.is_xor) return Lane(old ^ difference);
    return to_line(Lane(to_line(old, kind) + difference), kind);
}

// The exponent of a lane, sign aside.
template <class Lane>
DEVICE u32 exponent(Lane lane, Kind kind) {
    return u32(u64(Lane(lane & Lane(Lane(~Lane(0)) >> 1))) >> kind.mantissa);
}
