// Conversion of floats to halves without overflow: rows are first divided by a power of two, exactly.
#pragma once
#include "mma.cuh"

INLINE float size_of(float value) { return bits_to_float(float_to_bits(value) & 0x7fffffff); }
// 2^exponent, for exponents of normal floats.
INLINE float power_of_two(int exponent) { return bits_to_float((u32)(127 + exponent) << 23); }

// The power of two that brings `largest` just below 2^15 when divided by it (negative: it grows). Much
// smaller values of the row then stay normal halves too.
constexpr int SMALLEST_SHIFT = -100;
INLINE int level_shift(float largest) {
    const int shift = (int)(float_to_bits(largest) >> 23) - 127 - 14;
    return shift < SMALLEST_SHIFT ? SMALLEST_SHIFT : shift;
}
// The same, but 0 where nothing overflows.
INLINE int overflow_shift(float largest) { return largest > 32768.0f ? level_shift(largest) : 0; }

// Stores two neighbouring elements; with two parts also the rounding errors, `part_bytes` further on.
template <int PARTS>
INLINE void store_halves(u16 *place, u64 part_bytes, float first, float second) {
    const u32 halves = floats_to_halves(first, second);
    *(u32 *)place = halves;
    if (PARTS == 2)
        *(u32 *)((u8 *)place + part_bytes) = floats_to_halves(
            first - half_to_float(halves & 0xffff), second - half_to_float(halves >> 16));
}
