// Encoding, first half: from old and new lanes to marked ranks and value codes, class by class.
//
// `collect` reads every lane once. A tile's finds go to room of its own, as nobody knows yet what comes before it;
// once the counts of all tiles have been added up, `gather` brings them together.

#pragma once

#include "classes.cuh"

struct Collect {
    Classes classes;
    Tiling tiling;
    u64 first_tile;  // of this launch
    const u64* keys;
    u64* counts;   // [members, marked, changed][class][tile]
    u16* ranks;    // [tile][TILE]: of marked lanes, in their class and tile; class by class
    void* codes;   // [tile][TILE]: of changed lanes, likewise
    u64* sums;     // [segment][2]
    u64* changed;  // [segment]
};

struct CollectShared {
    Tile tile;
    Members members;
    u32 first_mark[MOST_CLASSES];
    u32 first_code[MOST_CLASSES];
    RunningSum<Sums> sums;
};

template <class Lane>
DEVICE void collect_find(Thread me, CollectShared& shared, const Collect& arguments) {
    find_tile<Lane>(me.index, shared.tile, arguments.tiling, arguments.first_tile + me.block);
}

template <class Lane>
DEVICE void collect_compare(Thread me, CollectShared& shared, const Collect& arguments) {
    const Tile& tile = shared.tile;
    const u32 thread = me.index;
    const Eight<Lane> before = load_eight<Lane>(tile.old_lanes, thread * EIGHT, tile.lanes);
    const Eight<Lane> after = load_eight<Lane>(tile.new_lanes, thread * EIGHT, tile.lanes);
    u32 changed = 0;
    for (u32 i = 0; i < EIGHT; i++) changed |= u32(before.lane[i] != after.lane[i]) << i;
    Members& members = shared.members;
    members.changed[thread] = u8(changed);
    sort_eight(thread, members, before, tile.lanes, arguments.classes);
    for (u32 c = 0; c < arguments.classes.count; c++) {
        const u32 marked = ones(members.marked(c, thread, arguments.classes));
        members.counts[c].put(thread, ones(members.of_class[c][thread]) | marked << MARKED);
    }
}

DEVICE void collect_groups(Thread me, CollectShared& shared, const Collect& arguments) {
    add_class_groups(me.index, shared.members, arguments.classes);
}

DEVICE void collect_classes(Thread me, CollectShared& shared, const Collect& arguments) {
    if (me.index < arguments.classes.count) shared.members.counts[me.index].add_groups();
}

// How many lanes of a class change, from how many there are and how many are marked.
DEVICE u32 changed_of(u32 counts, u32 index, const Classes& classes) {
    const u32 marked = counts >> MARKED;
    return classes.unchanged >> index & 1 ? (counts & ((1u << MARKED) - 1)) - marked : marked;
}

DEVICE void collect_count(Thread me, CollectShared& shared, const Collect& arguments) {
    const u32 mine = me.index;
    if (mine >= arguments.classes.count) return;
    u32 marks = 0, codes = 0;
    for (u32 c = 0; c < mine; c++) {
        const u32 counts = shared.members.counts[c].total();
        marks += counts >> MARKED;
        codes += changed_of(counts, c, arguments.classes);
    }
    shared.first_mark[mine] = marks;
    shared.first_code[mine] = codes;
    const u32 counts = shared.members.counts[mine].total();
    const u64 row = arguments.classes.count * arguments.tiling.tiles;
    u64* out = arguments.counts + mine * arguments.tiling.tiles + arguments.first_tile + me.block;
    out[0] = counts & ((1u << MARKED) - 1);
    out[row] = counts >> MARKED;
    out[2 * row] = changed_of(counts, mine, arguments.classes);
    if (out[2 * row]) add_to(&arguments.changed[shared.tile.segment], out[2 * row]);
}

template <class Lane>
DEVICE void collect_keep(Thread me, CollectShared& shared, const Collect& arguments) {
    const u64 index = arguments.first_tile + me.block;
    const Tile& tile = shared.tile;
    const Members& members = shared.members;
    const u32 thread = me.index;
    Sums sums{};
    for (u32 c = 0; c < arguments.classes.count; c++) {
        const u32 mine = members.of_class[c][thread];
        const u32 marked = members.marked(c, thread, arguments.classes);
        const u32 changed = mine & members.changed[thread];
        if (!(marked | changed)) continue;
        const u32 before = members.counts[c].before(thread);
        u16* ranks = arguments.ranks + index * TILE + shared.first_mark[c] + (before >> MARKED);
        Lane* codes = static_cast<Lane*>(arguments.codes) + index * TILE + shared.first_code[c] +
                      changed_of(before, c, arguments.classes);
        for (u32 i = 0; i < EIGHT; i++) {
            const u32 earlier = (1u << i) - 1;
            if (marked >> i & 1) *ranks++ = u16((before & ((1u << MARKED) - 1)) + ones(mine & earlier));
            if (!(changed >> i & 1)) continue;
            const u64 at = thread * EIGHT + i;
            const Lane old = static_cast<const Lane*>(tile.old_lanes)[at];
            const Lane now = static_cast<const Lane*>(tile.new_lanes)[at];
            *codes++ = to_code(old, now, Kind(arguments.classes.kind));
            sums += share_of_change(arguments.keys, tile.base, tile.canonical + at, old, now);
        }
    }
    shared.sums.put(thread, sums);
}

DEVICE void collect_give(Thread me, CollectShared& shared, const Collect& arguments) {
    if (me.index != 0) return;
    shared.sums.add_groups();
    const Sums sums = shared.sums.total();
    if (sums.a | sums.b) give(arguments.sums + 2 * shared.tile.segment, sums);
}

// --- From the tiles' rooms to the lists of the classes, which lie one behind the other.

struct Gather {
    u64 classes;
    u64 tile_count;
    const u64* before;  // [members, marked, changed][class and tile, and the total]
    const u16* ranks;
    const void* codes;
    u32* marks;      // out: ranks of marked lanes in their class
    void* in_order;  // out: codes of changed lanes
};

struct GatherShared {};

// A tile has few finds where little changed, so a block takes GROUPS tiles, and GROUP threads share each.
template <class Lane>
DEVICE void gather(Thread me, GatherShared&, const Gather& arguments) {
    const u64 tile = u64(me.block) * GROUPS + me.index / GROUP;
    if (tile >= arguments.tile_count) return;
    const u64 row = arguments.classes * arguments.tile_count + 1;
    const u16* ranks = arguments.ranks + tile * TILE;
    const Lane* codes = static_cast<const Lane*>(arguments.codes) + tile * TILE;
    for (u64 c = 0; c < arguments.classes; c++) {
        const u64* members = arguments.before + c * arguments.tile_count;
        const u64* marked = members + row + tile;
        const u64* changed = marked + row;
        const u64 rank = members[tile] - members[0];
        for (u64 i = me.index % GROUP; i < marked[1] - marked[0]; i += GROUP) {
            arguments.marks[marked[0] + i] = u32(rank + ranks[i]);
        }
        for (u64 i = me.index % GROUP; i < changed[1] - changed[0]; i += GROUP) {
            static_cast<Lane*>(arguments.in_order)[changed[0] + i] = codes[i];
        }
        ranks += marked[1] - marked[0];
        codes += changed[1] - changed[0];
    }
}
