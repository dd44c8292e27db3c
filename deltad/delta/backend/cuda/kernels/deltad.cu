// The kernels of the CUDA backend: the table that all builds are made of, and that Python reads names from.
//
// Read `phases.cuh` first: it states the discipline. Each line below names a kernel, its shared memory, its arguments,
// and its phases, with a barrier between each two. `_1` to `_8` are the widths of lanes in bytes.

#include "apply.cuh"
#include "collect.cuh"
#include "read.cuh"
#include "scan.cuh"
#include "spell.cuh"

#define FOR_LANES(KERNELS) KERNELS(1, u8) KERNELS(2, u16) KERNELS(4, u32) KERNELS(8, u64)

// The element sum of bytes as they lie.
KERNEL(sum_bytes, SumBytesShared, SumBytes, sum_bytes_multipliers, sum_bytes_add, add_up_groups, sum_bytes_give)

// Running sums.
KERNEL(scan_sums, ScanShared, Scan, scan_load, scan_groups, scan_keep_sum)
KERNEL(scan_pieces, ScanShared, Scan, scan_pieces_load, scan_groups, scan_pieces_groups, scan_pieces_keep)
KERNEL(scan_before, ScanShared, Scan, scan_load, scan_groups, scan_add_groups, scan_keep)
KERNEL(pick_words, PickShared, Pick, pick)

// Encoding.
#define ENCODING(width, Lane)                                                                                      \
    KERNEL(histogram_##width, HistogramShared, Histogram, histogram_clear, histogram_count<Lane>, histogram_give)  \
    KERNEL(collect_##width, CollectShared, Collect, collect_find<Lane>, collect_compare<Lane>, collect_groups,     \
           collect_classes, collect_count, collect_keep<Lane>, add_up_groups, collect_give)                        \
    KERNEL(gather_##width, GatherShared, Gather, gather<Lane>)                                                     \
    KERNEL(measure_##width, SpellShared, Spell, spell_measure<Lane>, spell_groups, spell_add, spell_keep_lengths)  \
    KERNEL(spell_##width, SpellShared, Spell, spell_measure<Lane>, spell_groups, spell_add, spell_write<Lane>)
FOR_LANES(ENCODING)

// Decoding.
KERNEL(read_measure, ReadShared, Read, read_lengths, read_groups, read_add, read_keep_lengths)
KERNEL(read_ranks, ReadShared, Read, rank_load, gap_groups, gap_add, rank_keep)
KERNEL(fill_measure, FillShared, Fill, fill_count, fill_groups, fill_add, fill_keep_count)
#define DECODING(width, Lane)                                                                                      \
    KERNEL(read_##width, ReadShared, Read, read_lengths, read_groups, read_add, read_numbers<Lane>, gap_groups,    \
           gap_add, gap_keep_sums)                                                                                 \
    KERNEL(fill_##width, FillShared, Fill, fill_count, fill_groups, fill_add, fill_codes<Lane>)                    \
    KERNEL(census_##width, LocateShared, Locate, locate_tile<Lane>, locate_sort<Lane>, locate_groups,              \
           locate_classes, census_keep)                                                                            \
    KERNEL(locate_##width, LocateShared, Locate, locate_tile<Lane>, locate_sort<Lane>, locate_groups,              \
           locate_classes, locate_find, locate_mark, locate_changed, locate_count, locate_groups, locate_classes,  \
           locate_keep<Lane>)                                                                                      \
    KERNEL(compose_##width, ComposeShared, Compose, compose_tile<Lane>, compose_find, compose_lanes<Lane>,         \
           add_up_groups, compose_give)                                                                            \
    KERNEL(scatter_##width, ComposeShared, Compose, compose_tile<Lane>, compose_find, scatter_lanes<Lane>)         \
    KERNEL(apply_##width, ApplyShared, Apply, apply_lanes<Lane>, add_up_groups, apply_give)
FOR_LANES(DECODING)
