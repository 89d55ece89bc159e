// Gate functions: sigmoid, SiLU, softplus (as layers.Gate names them).
#pragma once
#include "common.cuh"

INLINE float sigmoid(float g) { return reciprocal(1.0f + exp_fast(-g)); }
INLINE float silu(float g) { return g * sigmoid(g); }
// ln(1 + exp(g)); above 20 this equals g in float32.
INLINE float softplus(float g) { return g > 20.0f ? g : log_fast(1.0f + exp_fast(g)); }
