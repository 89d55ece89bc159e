// Activations as int8: granules of 16 with one scale, and beside it the scale times their sum, which
// is what an offset of the weights is multiplied with.
#pragma once
#include "common.cuh"

INLINE u32 magnitude_bits(float value) { return float_to_bits(value) & 0x7fffffffu; }
INLINE u32 larger_bits(u32 a, u32 b) { return a > b ? a : b; }

// Scale and its inverse for the bits of a granule's largest magnitude, compared as integers: so a NaN
// is the largest of all. It and infinity make the scale NaN, or int8 would hide them.
struct GranuleScale { float scale, inverse; };
INLINE GranuleScale granule_scale(u32 largest) {
    const float magnitude = bits_to_float(largest);
    if (largest >= 0x7f800000u) return {bits_to_float(0x7fc00000u), 0.0f};
    // What is so small that its inverse overflows counts as zero.
    if (magnitude < 1e-35f) return {0.0f, 0.0f};
    return {magnitude / 127.0f, 127.0f / magnitude};
}

// Four values a lane, four neighbouring lanes a granule: their bytes, and {scale, scale * sum} in
// each of the four. Every lane of a warp calls.
INLINE u32 quantise4(float4 v, float2 &meta) {
    u32 largest = larger_bits(larger_bits(magnitude_bits(v.x), magnitude_bits(v.y)),
                              larger_bits(magnitude_bits(v.z), magnitude_bits(v.w)));
    largest = larger_bits(largest, lane_xor(largest, 1));
    largest = larger_bits(largest, lane_xor(largest, 2));
    const GranuleScale of = granule_scale(largest);
    const int a = round_to_int(v.x * of.inverse), b = round_to_int(v.y * of.inverse);
    const int c = round_to_int(v.z * of.inverse), d = round_to_int(v.w * of.inverse);
    int sum = a + b + c + d;
    sum += lane_xor(sum, 1);
    sum += lane_xor(sum, 2);
    meta = make_float2(of.scale, of.scale * (float)sum);
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)d << 24;
}

// One value a lane, 16 neighbouring lanes a granule, with the same result as quantise4.
INLINE i8 quantise1(float v, float2 &meta) {
    u32 largest = magnitude_bits(v);
#pragma unroll
    for (int mask = 8; mask; mask >>= 1) largest = larger_bits(largest, lane_xor(largest, mask));
    const GranuleScale of = granule_scale(largest);
    const int byte = round_to_int(v * of.inverse);
    const int sum = lanes_sum<16>(byte);
    meta = make_float2(of.scale, of.scale * (float)sum);
    return (i8)byte;
}
