// Decoding, first half: symbols, bits and pair codes to numbers (FORMAT.md, 7.3 and 7.4), from streams of any content.
//
// `measure` tells what bits each piece of a list owns. The host compares their sum with the length of the stream, and
// only then `read` touches it. Ranks are running sums of gaps; value codes are filled in by `fill`. What is out of
// bounds is reported in `trouble`, and the host refuses the frame.

#pragma once

#include "spell.cuh"

enum Trouble : u32 { NUMBER_TOO_LARGE = 1, RANK_OUTSIDE = 2 };

struct Symbols {
    u64 begin;  // its first number, among those of all lists
    u64 first_piece;
    const u8* symbols;
    const u32* bits;
    u64 limit;  // with `gaps`: its ranks are below
};

struct Read {
    const Piece* pieces;
    const Symbols* lists;
    u64 scheme;
    u64 most_bits;  // that a number may own
    u64 top;        // the largest number
    u64* lengths;     // measure: [piece]
    const u64* bits_before;
    void* numbers;    // lanes; gaps and ranks are u32
    u64* gap_sums;    // read: lanes that the gaps of a piece pass, [piece]
    const u64* ranks_before;
    u32* trouble;
};

struct ReadShared {
    RunningSum<u32> lengths;
    RunningSum<u64> gaps;
};

// The raw bits that a symbol's number owns.
DEVICE u32 owned(u32 symbol, Scheme scheme) {
    const u32 magnitude = symbol >> scheme.low;
    return magnitude >> (scheme.mantissa + 1) ? (magnitude >> scheme.mantissa) - 1 : 0;
}

DEVICE void read_lengths(Thread me, ReadShared& shared, const Read& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const u8* symbols = arguments.lists[piece.list].symbols + piece.first;
    u32 sum = 0;
    for (u64 i = me.index * FOUR; i < least<u64>(me.index * FOUR + FOUR, piece.count); i++) {
        const u32 length = owned(symbols[i], Scheme(arguments.scheme));
        if (length > arguments.most_bits) or_into(arguments.trouble, NUMBER_TOO_LARGE);
        sum += length;
    }
    shared.lengths.put(me.index, sum);
}

DEVICE void read_groups(Thread me, ReadShared& shared, const Read&) {
    if (me.index < GROUPS) shared.lengths.add_group(me.index);
}

DEVICE void read_add(Thread me, ReadShared& shared, const Read&) {
    if (me.index == 0) shared.lengths.add_groups();
}

DEVICE void read_keep_lengths(Thread me, ReadShared& shared, const Read& arguments) {
    if (me.index == 0) arguments.lengths[me.block] = shared.lengths.total();
}

DEVICE u64 get_bits(const u32* words, u64 at, u32 length) {
    u64 bits = 0;
    for (u32 done = 0; done < length;) {
        const u32 shift = u32((at + done) % 32);
        bits |= u64(words[(at + done) / 32] >> shift) << done;
        done += 32 - shift;
    }
    return length < 64 ? bits & ((u64(1) << length) - 1) : bits;
}

template <class Lane>
DEVICE void read_numbers(Thread me, ReadShared& shared, const Read& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const Symbols& list = arguments.lists[piece.list];
    const Scheme scheme(arguments.scheme);
    Lane* numbers = static_cast<Lane*>(arguments.numbers) + list.begin + piece.first;
    u64 bit = arguments.bits_before[me.block] - arguments.bits_before[list.first_piece];
    bit += shared.lengths.before(me.index);
    u64 passed = 0;
    for (u64 i = me.index * FOUR; i < least<u64>(me.index * FOUR + FOUR, piece.count); i++) {
        const u32 symbol = list.symbols[piece.first + i];
        const u32 length = owned(symbol, scheme);
        u64 number = symbol >> scheme.low;
        if (number >> (scheme.mantissa + 1)) {
            const u64 leading = (number & ((1u << scheme.mantissa) - 1)) | u64(1) << scheme.mantissa;
            number = leading << length | get_bits(list.bits, bit, length);
        }
        number = number << scheme.low | (symbol & ((1u << scheme.low) - 1));
        if (number > arguments.top) or_into(arguments.trouble, NUMBER_TOO_LARGE);
        numbers[i] = Lane(number);
        passed += number + 1;
        bit += length;
    }
    shared.gaps.put(me.index, passed);
}

DEVICE void gap_groups(Thread me, ReadShared& shared, const Read&) {
    if (me.index < GROUPS) shared.gaps.add_group(me.index);
}

DEVICE void gap_add(Thread me, ReadShared& shared, const Read&) {
    if (me.index == 0) shared.gaps.add_groups();
}

DEVICE void gap_keep_sums(Thread me, ReadShared& shared, const Read& arguments) {
    if (me.index == 0) arguments.gap_sums[me.block] = shared.gaps.total();
}

// --- Gaps to ranks, in place.

DEVICE void rank_load(Thread me, ReadShared& shared, const Read& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const u32* gaps = static_cast<const u32*>(arguments.numbers) + arguments.lists[piece.list].begin + piece.first;
    u64 passed = 0;
    for (u64 i = me.index * FOUR; i < least<u64>(me.index * FOUR + FOUR, piece.count); i++) {
        passed += u64(gaps[i]) + 1;
    }
    shared.gaps.put(me.index, passed);
}

DEVICE void rank_keep(Thread me, ReadShared& shared, const Read& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const Symbols& list = arguments.lists[piece.list];
    u32* ranks = static_cast<u32*>(arguments.numbers) + list.begin + piece.first;
    u64 passed = arguments.ranks_before[me.block] - arguments.ranks_before[list.first_piece];
    passed += shared.gaps.before(me.index);
    for (u64 i = me.index * FOUR; i < least<u64>(me.index * FOUR + FOUR, piece.count); i++) {
        passed += u64(ranks[i]) + 1;
        if (passed > list.limit) or_into(arguments.trouble, RANK_OUTSIDE);
        ranks[i] = u32(passed - 1);
    }
}

// --- Value codes: pair codes, and numbers for those of three or more.

struct Values {
    u64 begin;  // its first code, among those of all lists
    u64 first_piece;
    const u8* pairs;  // null: every code is a number
    u64 first_number;
};

struct Fill {
    const Piece* pieces;
    const Values* lists;
    u64* exceptions;      // count: [piece]
    const u64* before;    // fill: their running sum
    const void* numbers;
    void* codes;
    u64 top;              // the largest code
    u32* trouble;
};

struct FillShared {
    RunningSum<u32> exceptions;
};

DEVICE u32 pair_of(const u8* pairs, u64 i) { return pairs[i / FOUR] >> i % FOUR * 2 & 3; }

DEVICE void fill_count(Thread me, FillShared& shared, const Fill& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const u8* pairs = arguments.lists[piece.list].pairs;
    u32 exceptions = 0;
    for (u64 i = me.index * FOUR; pairs && i < least<u64>(me.index * FOUR + FOUR, piece.count); i++) {
        exceptions += pair_of(pairs, piece.first + i) == PAIR_LIMIT;
    }
    shared.exceptions.put(me.index, exceptions);
}

DEVICE void fill_groups(Thread me, FillShared& shared, const Fill&) {
    if (me.index < GROUPS) shared.exceptions.add_group(me.index);
}

DEVICE void fill_add(Thread me, FillShared& shared, const Fill&) {
    if (me.index == 0) shared.exceptions.add_groups();
}

DEVICE void fill_keep_count(Thread me, FillShared& shared, const Fill& arguments) {
    if (me.index == 0) arguments.exceptions[me.block] = shared.exceptions.total();
}

template <class Lane>
DEVICE void fill_codes(Thread me, FillShared& shared, const Fill& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const Values& list = arguments.lists[piece.list];
    const Lane* numbers = static_cast<const Lane*>(arguments.numbers) + list.first_number;
    Lane* codes = static_cast<Lane*>(arguments.codes) + list.begin;
    if (list.pairs) {
        numbers += arguments.before[me.block] - arguments.before[list.first_piece];
        numbers += shared.exceptions.before(me.index);
    }
    for (u64 j = me.index * FOUR; j < least<u64>(me.index * FOUR + FOUR, piece.count); j++) {
        const u64 i = piece.first + j;
        if (!list.pairs) {
            codes[i] = numbers[i];
        } else if (const u32 pair = pair_of(list.pairs, i); pair < PAIR_LIMIT) {
            codes[i] = Lane(pair);
        } else {
            const u64 code = u64(*numbers++) + PAIR_LIMIT;
            if (code > arguments.top || code < PAIR_LIMIT) or_into(arguments.trouble, NUMBER_TOO_LARGE);
            codes[i] = Lane(code);
        }
    }
}
