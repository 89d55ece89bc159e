// The activation between an expert's gate and up projections and its down projection. All forms of
// spec.Activation are this function with different constants.
#pragma once
#include "common.cuh"

struct ActivationArgs {
    float limit, alpha, up_offset;
};

// Comparisons are written so that NaN propagates.
INLINE float activate(const ActivationArgs &form, float gate, float up) {
    gate = gate > form.limit ? form.limit : gate;
    up = up > form.limit ? form.limit : up;
    up = up < -form.limit ? -form.limit : up;
    // exp overflows to infinity for very negative gates: the result is then 0.
    return gate * reciprocal(1.0f + exp_fast(-form.alpha * gate)) * (up + form.up_offset);
}
