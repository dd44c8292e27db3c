// Decoding by context: from marked ranks in classes to positions in the frame, beside the old lanes.
//
// `census` counts the classes of every tile. The host adds up, and refuses what does not fit; then `locate` finds the
// marks that fall into a tile, and gives positions and codes in the order of the frame.

#pragma once

#include "classes.cuh"

struct Locate {
    Classes classes;
    Tiling tiling;
    u64* counts;                // census: members, [class][tile]
    const u64* members_before;  // their running sum, [class and tile, and the total]
    const u32* marks;           // ranks, class by class
    const u64* first_mark;      // [class, and the total]
    const void* codes;          // of changed lanes, class by class
    const u64* first_code;      // [class, and the total]
    u32* positions;             // out, ascending: in the frame
    void* in_order;             // out: their codes
};

struct LocateShared {
    Tile tile;
    Members members;
    u32 first_member[MOST_CLASSES];  // of a class, if the tile's lanes are laid out class by class
    u64 rank[MOST_CLASSES];          // of a class's first lane of the tile
    u64 mark[MOST_CLASSES];          // the first mark of a class from that rank on
    u64 end[MOST_CLASSES];           // and the first beyond the tile
    u32 marked[TILE / 32];           // a bit for each lane, laid out like that
};

// The first of the ascending numbers from `low` to before `high` that is not below `bound`.
DEVICE u64 lower_bound(const u32* numbers, u64 low, u64 high, u64 bound) {
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        if (numbers[middle] < bound) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

template <class Lane>
DEVICE void locate_tile(Thread me, LocateShared& shared, const Locate& arguments) {
    find_tile<Lane>(me.index, shared.tile, arguments.tiling, me.block);
}

template <class Lane>
DEVICE void locate_sort(Thread me, LocateShared& shared, const Locate& arguments) {
    const Tile& tile = shared.tile;
    const Eight<Lane> lanes = load_eight<Lane>(tile.old_lanes, me.index * EIGHT, tile.lanes);
    sort_eight(me.index, shared.members, lanes, tile.lanes, arguments.classes);
    for (u32 c = 0; c < arguments.classes.count; c++) {
        shared.members.counts[c].put(me.index, ones(shared.members.of_class[c][me.index]));
    }
}

DEVICE void locate_groups(Thread me, LocateShared& shared, const Locate& arguments) {
    add_class_groups(me.index, shared.members, arguments.classes);
}

DEVICE void locate_classes(Thread me, LocateShared& shared, const Locate& arguments) {
    if (me.index < arguments.classes.count) shared.members.counts[me.index].add_groups();
}

DEVICE void census_keep(Thread me, LocateShared& shared, const Locate& arguments) {
    if (me.index >= arguments.classes.count) return;
    arguments.counts[me.index * arguments.tiling.tiles + me.block] = shared.members.counts[me.index].total();
}

DEVICE void locate_find(Thread me, LocateShared& shared, const Locate& arguments) {
    for (u32 i = me.index; i < TILE / 32; i += THREADS) shared.marked[i] = 0;
    const u32 c = me.index;
    if (c >= arguments.classes.count) return;
    u32 earlier = 0;
    for (u32 other = 0; other < c; other++) earlier += shared.members.counts[other].total();
    shared.first_member[c] = earlier;
    const u64* before = arguments.members_before + c * arguments.tiling.tiles;
    const u64 rank = before[me.block] - before[0];
    const u64 end = arguments.first_mark[c + 1];
    shared.rank[c] = rank;
    shared.mark[c] = lower_bound(arguments.marks, arguments.first_mark[c], end, rank);
    shared.end[c] = lower_bound(arguments.marks, shared.mark[c], end, rank + shared.members.counts[c].total());
}

DEVICE void locate_mark(Thread me, LocateShared& shared, const Locate& arguments) {
    for (u32 c = 0; c < arguments.classes.count; c++) {
        for (u64 i = shared.mark[c] + me.index; i < shared.end[c]; i += THREADS) {
            const u32 lane = shared.first_member[c] + u32(arguments.marks[i] - shared.rank[c]);
            or_into(&shared.marked[lane / 32], 1u << lane % 32);
        }
    }
}

// Each thread: which of its lanes change.
DEVICE void locate_changed(Thread me, LocateShared& shared, const Locate& arguments) {
    const u32 thread = me.index;
    u32 changed = 0;
    for (u32 c = 0; c < arguments.classes.count; c++) {
        const u32 mine = shared.members.of_class[c][thread];
        u32 lane = shared.first_member[c] + shared.members.counts[c].before(thread);
        u32 marked = 0;
        for (u32 i = 0; i < EIGHT; i++) {
            if (!(mine >> i & 1)) continue;
            marked |= (shared.marked[lane / 32] >> lane % 32 & 1) << i;
            lane++;
        }
        changed |= arguments.classes.unchanged >> c & 1 ? mine & ~marked : marked;
    }
    shared.members.changed[thread] = u8(changed);
}

DEVICE void locate_count(Thread me, LocateShared& shared, const Locate& arguments) {
    const u32 changed = shared.members.changed[me.index];
    for (u32 c = 0; c < arguments.classes.count; c++) {
        shared.members.counts[c].put(me.index, ones(shared.members.of_class[c][me.index] & changed));
    }
}

template <class Lane>
DEVICE void locate_keep(Thread me, LocateShared& shared, const Locate& arguments) {
    const Tile& tile = shared.tile;
    const Members& members = shared.members;
    const u32 thread = me.index;
    const u32 all = members.changed[thread];
    if (!all) return;
    u64 first = 0;  // changed lanes of the frame before this thread's
    for (u32 c = 0; c < arguments.classes.count; c++) {
        const u64 marks = shared.mark[c] - arguments.first_mark[c];
        first += arguments.classes.unchanged >> c & 1 ? shared.rank[c] - marks : marks;
        first += members.counts[c].before(thread);
    }
    for (u32 c = 0; c < arguments.classes.count; c++) {
        const u32 mine = members.of_class[c][thread] & all;
        if (!mine) continue;
        const u64 marks = shared.mark[c] - arguments.first_mark[c];
        const Lane* codes = static_cast<const Lane*>(arguments.codes) + arguments.first_code[c] +
                            (arguments.classes.unchanged >> c & 1 ? shared.rank[c] - marks : marks) +
                            members.counts[c].before(thread);
        for (u32 i = 0; i < EIGHT; i++) {
            if (!(mine >> i & 1)) continue;
            const u64 out = first + ones(all & ((1u << i) - 1));
            arguments.positions[out] = u32(tile.position + thread * EIGHT + i);
            static_cast<Lane*>(arguments.in_order)[out] = *codes++;
        }
    }
}
