// Quantisation of activations to int8: granules of 16 with {scale, scale * sum of the bytes}. The second
// is what the offset of the weights is multiplied by.
#pragma once
#include "common.cuh"

INLINE u32 magnitude_bits(float value) { return float_to_bits(value) & 0x7fffffffu; }
INLINE u32 larger_bits(u32 a, u32 b) { return a > b ? a : b; }

// Scale and inverse from the bits of a granule's largest magnitude. Magnitudes are compared as integers,
// so that NaN is the largest; NaN and infinity make the scale NaN, as int8 would hide them.
struct GranuleScale { float scale, inverse; };
INLINE GranuleScale granule_scale(u32 largest) {
    const float magnitude = bits_to_float(largest);
    if (largest >= 0x7f800000u) return {bits_to_float(0x7fc00000u), 0.0f};
    // Magnitudes whose inverse would overflow count as zero.
    if (magnitude < 1e-35f) return {0.0f, 0.0f};
    return {magnitude / 127.0f, 127.0f / magnitude};
}

// Four values per lane, four neighbouring lanes per granule. Returns the lane's four bytes; `meta` is
// {scale, scale * sum} in each of the four lanes. All lanes of a warp call.
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

// One value per lane, 16 neighbouring lanes per granule; the results are those of quantise4.
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
