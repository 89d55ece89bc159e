// The largest of many values and where it is, as one integer that can be compared.
#pragma once
#include "common.cuh"

// In a token's place: some logit is not finite. Mirrored in backend.py.
constexpr int NOT_FINITE = -3;

// Larger for larger values, and of equal values for the lower index. What is not finite is above all,
// so that the largest key of all tells whether there is such a value. Zero is below every value.
INLINE u64 argmax_key(float value, u32 index) {
    u32 bits = float_to_bits(value + 0.0f);  // -0 is 0
    bits = value - value != 0.0f ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (0xffffffffu - index);
}
INLINE bool is_finite_key(u64 key) { return (u32)(key >> 32) != ~0u; }
INLINE u32 argmax_index(u64 key) { return 0xffffffffu - (u32)key; }
INLINE u64 larger_key(u64 a, u64 b) { return a > b ? a : b; }
INLINE u64 lanes_largest(u64 key) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask >>= 1) key = larger_key(key, lane_xor(key, mask));
    return key;
}
