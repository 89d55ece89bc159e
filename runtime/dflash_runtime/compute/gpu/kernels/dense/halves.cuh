// Floats as halves that do not overflow: divided by a power of two, which is exact.
#pragma once
#include "mma.cuh"

INLINE float size_of(float value) { return bits_to_float(float_to_bits(value) & 0x7fffffff); }
// 2^exponent, for exponents of normal floats.
INLINE float power_of_two(int exponent) { return bits_to_float((u32)(127 + exponent) << 23); }

// How often numbers up to `largest` must be halved, negative: doubled, to lie just below 2^15. Then
// neither they nor what is far smaller lose anything but their own rounding.
constexpr int SMALLEST_SHIFT = -100;
INLINE int level_shift(float largest) {
    const int shift = (int)(float_to_bits(largest) >> 23) - 127 - 14;
    return shift < SMALLEST_SHIFT ? SMALLEST_SHIFT : shift;
}
// The same, 0 for what is no larger than that.
INLINE int overflow_shift(float largest) { return largest > 32768.0f ? level_shift(largest) : 0; }

// Two neighbouring elements; with two parts also what the first rounds away, `part_bytes` after.
template <int PARTS>
INLINE void store_halves(u16 *place, u64 part_bytes, float first, float second) {
    const u32 halves = floats_to_halves(first, second);
    *(u32 *)place = halves;
    if (PARTS == 2)
        *(u32 *)((u8 *)place + part_bytes) = floats_to_halves(
            first - half_to_float(halves & 0xffff), second - half_to_float(halves >> 16));
}
