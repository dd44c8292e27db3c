// Encoding, second half: numbers to symbols, bits and pair codes (FORMAT.md, 7.3 and 7.4).
//
// Lists of numbers, one for the gaps or values of a class, are cut into pieces. `measure` tells what each piece
// takes; once that has been added up, `spell` writes, every piece into its own part of the streams. Two pieces, and
// two threads, may share a word of a bit stream: they or their bits into zeros.

#pragma once

#include "lanes.cuh"

constexpr u32 FOUR = 4;                 // numbers of a thread: they share a byte of pair codes
constexpr u32 PIECE = THREADS * FOUR;   // and of a block, at most
constexpr u32 PAIR_LIMIT = 3;

struct Piece {
    u64 list;
    u64 first;  // its first number, among those of the list
    u64 count;
};

struct List {
    u64 begin;        // its first number, among those of all lists
    u64 first_piece;
    u8* pairs;        // null: none, every number is spelled
    u8* symbols;
    u32* bits;
};

// How numbers become symbols: k mantissa bits, and `low` bits that stay apart.
struct Scheme {
    u32 mantissa, low;

    DEVICE explicit Scheme(u64 word) : mantissa(u32(word & 0xFF)), low(u32(word >> 8 & 0xFF)) {}

    // The raw bits that a number owns.
    DEVICE u32 length(u64 number) const {
        const u32 bits = bit_length(number >> low);
        return bits > mantissa + 1 ? bits - mantissa - 1 : 0;
    }

    DEVICE u8 symbol(u64 number) const {
        const u64 magnitude = number >> low;
        const u32 dropped = length(number);
        u64 symbol = magnitude;
        if (magnitude >> (mantissa + 1)) {
            symbol = (u64(dropped + 1) << mantissa) + (magnitude >> dropped & ((1u << mantissa) - 1));
        }
        return u8(symbol << low | (number & ((1u << low) - 1)));
    }

    DEVICE u64 bits(u64 number) const { return number >> low & ((u64(1) << length(number)) - 1); }
};

struct Spell {
    const Piece* pieces;
    const List* lists;
    const void* numbers;  // value codes; with `gaps`, ascending ranks as u32
    u64 gaps;
    u64 scheme;
    u64 piece_count;
    u64* lengths;       // measure: [bits, exceptions, bits of exceptions][piece]
    const u64* before;  // spell: the running sums of these
};

// What numbers take: if all of them are spelled, and if those of three or more are, less three.
struct Lengths {
    u32 bits, exceptions, exception_bits;

    DEVICE Lengths& operator+=(Lengths other) {
        bits += other.bits;
        exceptions += other.exceptions;
        exception_bits += other.exception_bits;
        return *this;
    }
};

struct SpellShared {
    RunningSum<Lengths> lengths;
};

// Number i of a list.
template <class Lane>
DEVICE u64 number_of(const Spell& arguments, const List& list, u64 i) {
    const Lane* numbers = static_cast<const Lane*>(arguments.numbers) + list.begin;
    if (!arguments.gaps) return numbers[i];
    return i ? u64(numbers[i] - numbers[i - 1] - 1) : u64(numbers[0]);
}

template <class Lane>
DEVICE void spell_measure(Thread me, SpellShared& shared, const Spell& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const List& list = arguments.lists[piece.list];
    const Scheme scheme(arguments.scheme);
    Lengths lengths{};
    for (u64 i = me.index * FOUR; i < least<u64>(me.index * FOUR + FOUR, piece.count); i++) {
        const u64 number = number_of<Lane>(arguments, list, piece.first + i);
        lengths.bits += scheme.length(number);
        if (number < PAIR_LIMIT) continue;
        lengths.exceptions += 1;
        lengths.exception_bits += scheme.length(number - PAIR_LIMIT);
    }
    shared.lengths.put(me.index, lengths);
}

DEVICE void spell_groups(Thread me, SpellShared& shared, const Spell&) {
    if (me.index < GROUPS) shared.lengths.add_group(me.index);
}

DEVICE void spell_add(Thread me, SpellShared& shared, const Spell&) {
    if (me.index == 0) shared.lengths.add_groups();
}

DEVICE void spell_keep_lengths(Thread me, SpellShared& shared, const Spell& arguments) {
    if (me.index != 0) return;
    const Lengths total = shared.lengths.total();
    arguments.lengths[me.block] = total.bits;
    arguments.lengths[me.block + arguments.piece_count] = total.exceptions;
    arguments.lengths[me.block + 2 * arguments.piece_count] = total.exception_bits;
}

// Or the low `length` bits of a stream's next number into its words.
DEVICE void put_bits(u32* words, u64 at, u64 bits, u32 length) {
    for (u32 done = 0; done < length;) {
        const u32 shift = u32((at + done) % 32);
        or_into(&words[(at + done) / 32], u32(bits >> done << shift));
        done += 32 - shift;
    }
}

// What is written before a piece, in the streams of its list.
DEVICE u64 written_before(const Spell& arguments, const List& list, u32 piece, u32 row) {
    const u64* before = arguments.before + row * (arguments.piece_count + 1);
    return before[piece] - before[list.first_piece];
}

template <class Lane>
DEVICE void spell_write(Thread me, SpellShared& shared, const Spell& arguments) {
    const Piece& piece = arguments.pieces[me.block];
    const List& list = arguments.lists[piece.list];
    const Scheme scheme(arguments.scheme);
    const bool paired = list.pairs != nullptr;
    const Lengths mine = shared.lengths.before(me.index);
    u64 bit = written_before(arguments, list, me.block, paired ? 2 : 0) + (paired ? mine.exception_bits : mine.bits);
    const u64 first = piece.first + me.index * FOUR;
    u8* symbol = list.symbols + first;
    if (paired) symbol = list.symbols + written_before(arguments, list, me.block, 1) + mine.exceptions;
    u32 pairs = 0;
    for (u64 i = first; i < least<u64>(first + FOUR, piece.first + piece.count); i++) {
        u64 number = number_of<Lane>(arguments, list, i);
        if (paired) {
            pairs |= u32(least<u64>(number, PAIR_LIMIT)) << i % FOUR * 2;
            if (number < PAIR_LIMIT) continue;
            number -= PAIR_LIMIT;
        }
        *symbol++ = scheme.symbol(number);
        put_bits(list.bits, bit, scheme.bits(number), scheme.length(number));
        bit += scheme.length(number);
    }
    if (paired && me.index * FOUR < piece.count) list.pairs[first / FOUR] = u8(pairs);
}
