// Running sums over rows of numbers in global memory, in three launches: the sums of pieces, what comes before each
// of them, and what comes before each number.

#pragma once

#include "phases.cuh"

constexpr u32 SCAN_EACH = 8;                     // numbers of a thread
constexpr u32 SCAN_PIECE = THREADS * SCAN_EACH;  // and of a block

struct Scan {
    const u64* numbers;  // [rows][count]
    u64 count;
    u64 pieces;  // a row has this many
    u64 rows;
    u64* pieces_before;  // [rows][pieces]: first the pieces' sums, then what comes before them
    u64* before;         // [rows][count + 1], the last one the row's total
};

struct ScanShared {
    RunningSum<u64> sums;
};

// --- Some of many numbers, so that the host need not fetch all of them.

struct Pick {
    const u64* numbers;
    const u64* which;
    u64 count;
    u64* out;
};

struct PickShared {};

DEVICE void pick(Thread me, PickShared&, const Pick& arguments) {
    const u64 i = u64(me.block) * THREADS + me.index;
    if (i < arguments.count) arguments.out[i] = arguments.numbers[arguments.which[i]];
}

// --- The scan.

DEVICE void scan_load(Thread me, ScanShared& shared, const Scan& arguments) {
    const u64 row = me.block / arguments.pieces, piece = me.block % arguments.pieces;
    const u64* numbers = arguments.numbers + row * arguments.count;
    const u64 first = piece * SCAN_PIECE + me.index * SCAN_EACH;
    u64 sum = 0;
    for (u64 i = first; i < least(first + SCAN_EACH, arguments.count); i++) sum += numbers[i];
    shared.sums.put(me.index, sum);
}

template <class Arguments>
DEVICE void scan_groups(Thread me, ScanShared& shared, const Arguments&) {
    if (me.index < GROUPS) shared.sums.add_group(me.index);
}

DEVICE void scan_keep_sum(Thread me, ScanShared& shared, const Scan& arguments) {
    if (me.index != 0) return;
    shared.sums.add_groups();
    arguments.pieces_before[me.block] = shared.sums.total();
}

// One block a row: its threads share the pieces among them.

DEVICE u64 pieces_each(const Scan& arguments) { return (arguments.pieces + THREADS - 1) / THREADS; }

DEVICE void scan_pieces_load(Thread me, ScanShared& shared, const Scan& arguments) {
    const u64* sums = arguments.pieces_before + me.block * arguments.pieces;
    const u64 first = me.index * pieces_each(arguments);
    u64 sum = 0;
    for (u64 i = first; i < least(first + pieces_each(arguments), arguments.pieces); i++) sum += sums[i];
    shared.sums.put(me.index, sum);
}

DEVICE void scan_pieces_groups(Thread me, ScanShared& shared, const Scan& arguments) {
    if (me.index != 0) return;
    shared.sums.add_groups();
    arguments.before[me.block * (arguments.count + 1) + arguments.count] = shared.sums.total();
}

DEVICE void scan_pieces_keep(Thread me, ScanShared& shared, const Scan& arguments) {
    u64* sums = arguments.pieces_before + me.block * arguments.pieces;
    const u64 first = me.index * pieces_each(arguments);
    u64 before = shared.sums.before(me.index);
    for (u64 i = first; i < least(first + pieces_each(arguments), arguments.pieces); i++) {
        const u64 sum = sums[i];
        sums[i] = before;
        before += sum;
    }
}

DEVICE void scan_add_groups(Thread me, ScanShared& shared, const Scan&) {
    if (me.index == 0) shared.sums.add_groups();
}

DEVICE void scan_keep(Thread me, ScanShared& shared, const Scan& arguments) {
    const u64 row = me.block / arguments.pieces, piece = me.block % arguments.pieces;
    const u64 first = piece * SCAN_PIECE + me.index * SCAN_EACH;
    u64 before = arguments.pieces_before[me.block] + shared.sums.before(me.index);
    for (u64 i = first; i < least(first + SCAN_EACH, arguments.count); i++) {
        arguments.before[row * (arguments.count + 1) + i] = before;
        before += arguments.numbers[row * arguments.count + i];
    }
}
