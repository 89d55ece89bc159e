// Argmax over logits: a value and its index as one integer key, so that the largest key wins.
#pragma once
#include "common.cuh"

// Stands in place of a token id: some logit is not finite. Mirrored in compute/backend.py.
constexpr int NOT_FINITE = -3;

// Keys order by value, and among equal values by descending index. NaN and infinities have the highest
// keys, so that the largest key shows whether any value is not finite. Every key is above zero.
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
