// The activation between an expert's gate and up projections and its down projection. All forms of
// spec.Activation are this function with different constants.
#pragma once
#include "common.cuh"

struct ActivationArgs {
    float limit, alpha, up_offset;
};

// e^x within 2 ulp, with the bits of the processor's (cpu/simd/exponentials.py): 2^n times a polynomial of
// the remainder. Source: Moshier's Cephes library, expf.
INLINE float exp_exact(float x) {
    // Beyond these the result is 0 or infinite anyway. A NaN passes both comparisons unchanged.
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = fmaf(x, 1.44269504088896341f, rounder);
    const int exponent = (int)(float_to_bits(shifted) - 0x4B400000u);
    const float turns = shifted - rounder;
    float rest = fmaf(turns, -0.693359375f, x);
    rest = fmaf(turns, 2.12194440e-4f, rest);
    float series = 1.9875691500e-4f;
    series = fmaf(series, rest, 1.3981999507e-3f);
    series = fmaf(series, rest, 8.3334519073e-3f);
    series = fmaf(series, rest, 4.1665795894e-2f);
    series = fmaf(series, rest, 1.6666665459e-1f);
    series = fmaf(series, rest, 5.0000001201e-1f);
    const float value = fmaf(series, rest * rest, rest) + 1.0f;
    // 2^n in two factors, since it need not be a normal float32.
    const int half = exponent >> 1;
    return value * bits_to_float((u32)(half + 127) << 23) *
           bits_to_float((u32)(exponent - half + 127) << 23);
}

// Comparisons are written so that NaN propagates.
INLINE float activate(const ActivationArgs &form, float gate, float up) {
    gate = gate > form.limit ? form.limit : gate;
    up = up > form.limit ? form.limit : up;
    up = up < -form.limit ? -form.limit : up;
    // exp overflows to infinity for very negative gates: the result is then 0.
    return gate * reciprocal(1.0f + exp_exact(-form.alpha * gate)) * (up + form.up_offset);
}
