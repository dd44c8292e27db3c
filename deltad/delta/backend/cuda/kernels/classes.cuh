// Which lanes of a tile are in which class, and how many before each thread: what encoding and decoding share.

#pragma once

#include "sums.cuh"

// What the kernels that sort lanes into classes are told, in the first words of their arguments.
struct Classes {
    const u8* of_exponent;
    u64 count;
    u64 unchanged;  // bit c: the marked lanes of class c are the unchanged ones
    u64 kind;
};

// How many of a class's lanes: two counts of one tile fit a word.
constexpr u32 MARKED = 16;  // the bit from which on marked lanes are counted
static_assert(TILE < 1u << MARKED, "counts of a tile are below 2^16");

struct Members {
    u8 of_class[MOST_CLASSES][THREADS];  // of the eight lanes of a thread, those in the class
    u8 changed[THREADS];                 // and those that change
    RunningSum<u32> counts[MOST_CLASSES];

    // The lanes of a class that are marked among those of a thread.
    DEVICE u32 marked(u32 index, u32 thread, const Classes& classes) const {
        const u32 differs = classes.unchanged >> index & 1 ? ~u32(changed[thread]) : changed[thread];
        return of_class[index][thread] & differs;
    }
};

template <class Lane>
DEVICE u32 class_of(Lane lane, const Classes& classes) {
    return classes.count == 1 ? 0 : classes.of_exponent[exponent(lane, Kind(classes.kind))];
}

// Sort the lanes of a thread by class. Each thread writes bytes of its own.
template <class Lane>
DEVICE void sort_eight(u32 thread, Members& members, const Eight<Lane>& lanes, u64 count, const Classes& classes) {
    for (u32 c = 0; c < classes.count; c++) members.of_class[c][thread] = 0;
    for (u32 i = 0; i < EIGHT && thread * EIGHT + i < count; i++) {
        u8* mask = &members.of_class[class_of(lanes.lane[i], classes)][thread];
        *mask = u8(*mask | 1u << i);
    }
}

// One thread for each class and group: 16 times 16.
DEVICE void add_class_groups(u32 thread, Members& members, const Classes& classes) {
    const u32 index = thread / GROUPS;
    if (index < classes.count) members.counts[index].add_group(thread % GROUPS);
}

// --- The histogram that classes are planned by: lanes and changed lanes by exponent.

constexpr u32 MOST_EXPONENTS = 2048;

struct Histogram {
    Tiling tiling;
    u64 run;     // lanes that are counted, from the first of the frame on,
    u64 period;  // and again after so many
    u64 lanes_in_frame;
    u64 kind;
    u64 exponents;
    u64* lanes;
    u64* changed;
};

struct HistogramShared {
    u32 lanes[MOST_EXPONENTS];
    u32 changed[MOST_EXPONENTS];
};

DEVICE void histogram_clear(Thread me, HistogramShared& shared, const Histogram& arguments) {
    for (u64 i = me.index; i < arguments.exponents; i += THREADS) shared.lanes[i] = shared.changed[i] = 0;
}

template <class Lane>
DEVICE void histogram_count(Thread me, HistogramShared& shared, const Histogram& arguments) {
    const u64 first = me.block * arguments.period;
    for (u64 at = first + me.index; at < least(first + arguments.run, arguments.lanes_in_frame); at += THREADS) {
        const Segment& segment = arguments.tiling.segments[segment_of<&Segment::position>(arguments.tiling, at)];
        const Lane old = static_cast<const Lane*>(segment.old_lanes)[at - segment.position];
        const Lane now = static_cast<const Lane*>(segment.new_lanes)[at - segment.position];
        const u32 found = exponent(old, Kind(arguments.kind));
        add_to(&shared.lanes[found], 1u);
        if (old != now) add_to(&shared.changed[found], 1u);
    }
}

DEVICE void histogram_give(Thread me, HistogramShared& shared, const Histogram& arguments) {
    for (u64 i = me.index; i < arguments.exponents; i += THREADS) {
        if (shared.lanes[i]) add_to(&arguments.lanes[i], u64(shared.lanes[i]));
        if (shared.changed[i]) add_to(&arguments.changed[i], u64(shared.changed[i]));
    }
}
