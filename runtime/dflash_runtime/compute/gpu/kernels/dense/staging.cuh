// Stages rows of activations in shared memory, as int8 with scales, as floats, or both, once per block.
// Without it all warps of the device would read the same few lines of the L2 cache, which makes kernels
// two to three times slower.
#pragma once
#include "common.cuh"
#include "formats.cuh"
#include "gates.cuh"
#include "quantise.cuh"

// Rows are: normalised floats, plain floats, int8 already, silu(x) * up, floats times a factor per row.
enum InputMode { NORM, PLAIN, QUANTISED, SWIGLU, SCALED };

// The staged rows in shared memory, padded with zeros to whole units of every weight type.
template <int Tokens, int Columns, bool AsBytes, bool AsFloats>
struct Staged {
    static constexpr int PADDED = padded_to(Columns, 256), GRANULES = PADDED / 16;
    i8 *quants;
    float2 *meta;
    float *values;

    INLINE explicit Staged(u8 *shared) {
        constexpr int bytes = AsBytes ? Tokens * PADDED : 0;
        constexpr int meta_bytes = AsBytes ? Tokens * GRANULES * 8 : 0;
        quants = (i8 *)shared;
        meta = (float2 *)(shared + bytes);
        values = (float *)(shared + bytes + meta_bytes);
    }
    // Granules are swizzled so that eight lanes which read the same granule of neighbouring units, of
    // any type, access different banks.
    INLINE static int place(int granule) {
        return (granule ^ (granule >> 3 & 1) * 3 ^ (granule >> 4 & 1) * 5) * 16;
    }
    INLINE i8 *granule(int token, int index) const { return quants + token * PADDED + place(index); }
};

// Copies of the staged rows in global memory; one block writes those that are not null.
struct SideOutputs {
    float *values;  // [T, Columns]
    i8 *quants;     // [T, PADDED]
    float2 *meta;   // [T, PADDED / 16]
};

// Stages float rows x [T, Columns]. `other` is what the mode needs: norm weights [Columns], the rows `up`
// [T, Columns] of SWIGLU, or factors [T]. Sums of squares are added in an order that does not depend on T.
template <int Tokens, int Columns, int Threads, InputMode Mode, bool AsBytes, bool AsFloats>
struct FloatInput {
    using Rows = Staged<Tokens, Columns, AsBytes, AsFloats>;
    static_assert(Columns % (AsBytes ? 32 : 4) == 0, "rows of activations");
    static constexpr int QUADS = Rows::PADDED / 4, CHUNKS = (QUADS + Threads - 1) / Threads;
    static constexpr bool KEEPS_WEIGHT = Mode == NORM && CHUNKS <= 4;
    static constexpr bool KEEPS_ROWS = Tokens * CHUNKS <= 4;
    float4 weight[KEEPS_WEIGHT ? CHUNKS : 1], rows[KEEPS_ROWS ? Tokens * CHUNKS : 1];

    INLINE static int quad(int chunk) { return chunk * Threads + thread_index(); }
    INLINE static bool is_inside(int chunk) { return quad(chunk) < Columns / 4; }
    INLINE static float4 as_floats(uint4 v) {
        return make_float4(bits_to_float(v.x), bits_to_float(v.y), bits_to_float(v.z),
                           bits_to_float(v.w));
    }
    INLINE static float4 weight_at(const float *norm_weight, int chunk) {
        if (!is_inside(chunk)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return as_floats(load_weights16(norm_weight + 4 * quad(chunk)));
    }
    INLINE static float4 row_at(const float *x, int token, int chunk) {
        if (!is_inside(chunk)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return as_floats(load_fresh16(x + (i64)token * Columns + 4 * quad(chunk)));
    }
    INLINE static float4 activated(float4 gate, float4 up) {
        return make_float4(silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z,
                           silu(gate.w) * up.w);
    }

    INLINE void before_wait(const float *norm_weight) {
        if constexpr (KEEPS_WEIGHT) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) weight[c] = weight_at(norm_weight, c);
        }
    }
    // The factor that normalises each row, the same bits in all threads.
    INLINE void factors(float (&factor)[Tokens], const float *x, float eps) {
        constexpr int NumWarps = Threads / LANES;
        constexpr int Fours = (NumWarps + 3) / 4;
        SHARED(float, partial, Tokens * 4 * Fours);
        if (thread_index() < Tokens * 4 * Fours && thread_index() % (4 * Fours) >= NumWarps) {
            partial[thread_index()] = 0.0f;
        }
#pragma unroll
        for (int t = 0; t < Tokens; t++) {
            float squares = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const float4 v = row_at(x, t, c);
                if constexpr (KEEPS_ROWS) rows[t * CHUNKS + c] = v;
                squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
            }
            factor[t] = squares;
        }
#pragma unroll
        for (int t = 0; t < Tokens; t++) {
            const float squares = lanes_sum(factor[t]);
            if (lane_index() == 0) partial[t * 4 * Fours + warp_index()] = squares;
        }
        block_barrier();
#pragma unroll
        for (int t = 0; t < Tokens; t++) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < Fours; i++) {
                const float4 four = *(const float4 *)(partial + 4 * (t * Fours + i));
                squares += four.x + four.y + (four.z + four.w);
            }
            factor[t] = reciprocal_root(squares / (float)Columns + eps);
        }
    }
    // Called by all threads after wait_for_previous(). The caller needs a block_barrier() before reading.
    INLINE void stage(const Rows &to, const float *x, const float *other, float eps,
                      const SideOutputs *side) {
        float factor[Tokens];
        if constexpr (Mode == NORM) factors(factor, x, eps);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float4 scale = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            if constexpr (KEEPS_WEIGHT) scale = weight[c];
            else if constexpr (Mode == NORM) scale = weight_at(other, c);
#pragma unroll
            for (int t = 0; t < Tokens; t++) {
                float4 v;
                if constexpr (Mode == NORM && KEEPS_ROWS) v = rows[t * CHUNKS + c];
                else v = row_at(x, t, c);
                if constexpr (Mode == NORM) {
                    v = make_float4(v.x * factor[t] * scale.x, v.y * factor[t] * scale.y,
                                    v.z * factor[t] * scale.z, v.w * factor[t] * scale.w);
                }
                if constexpr (Mode == SWIGLU) v = activated(v, row_at(other, t, c));
                if constexpr (Mode == SCALED) {
                    const float by = bits_to_float(load_fresh4(other + t));
                    v = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
                }
                put(to, t, quad(c), v, side);
            }
        }
    }
    INLINE static void put(const Rows &to, int token, int quad, float4 v, const SideOutputs *side) {
        const bool is_padded = quad < QUADS;
        if (AsFloats && is_padded) *(float4 *)(to.values + token * Rows::PADDED + 4 * quad) = v;
        if (side && side->values && quad < Columns / 4) {
            *(float4 *)(side->values + (i64)token * Columns + 4 * quad) = v;
        }
        if (!AsBytes && !(side && side->quants)) return;  // the same for the whole block
        float2 meta;
        const u32 bytes = quantise4(v, meta);
        if (!is_padded) return;
        if constexpr (AsBytes) {
            *(u32 *)(to.granule(token, quad / 4) + 4 * (quad % 4)) = bytes;
            if (quad % 4 == 0) to.meta[token * Rows::GRANULES + quad / 4] = meta;
        }
        if (side && side->quants) {
            *(u32 *)(side->quants + (i64)token * Rows::PADDED + 4 * quad) = bytes;
            if (quad % 4 == 0) side->meta[token * Rows::GRANULES + quad / 4] = meta;
        }
    }
};

// Stages rows that are int8 already: quants [rows, PADDED], meta [rows, GRANULES]. Padding is not read.
// Called by threads First to Threads - 1.
template <int NumRows, int Columns, int Threads, int First = 0, typename Rows>
INLINE void stage_bytes(const Rows &to, const i8 *quants, const float2 *meta) {
    static_assert(Columns % 32 == 0, "rows of activations");
    constexpr int Count = NumRows * Rows::GRANULES, Step = Threads - First;
    [[maybe_unused]] constexpr int Rounds = Count > 4 * Step ? 4 : (Count + Step - 1) / Step;
#pragma unroll Rounds
    for (int i = thread_index() - First; i < Count; i += Step) {
        const int row = i / Rows::GRANULES, granule = i % Rows::GRANULES;
        uint4 bytes = make_uint4(0, 0, 0, 0);
        if (granule < Columns / 16) bytes = load_fresh16(quants + 16 * (i64)i);
        *(uint4 *)to.granule(row, granule) = bytes;
    }
#pragma unroll Rounds
    for (int i = thread_index() - First; i < Count / 2; i += Step) {
        uint4 two = make_uint4(0, 0, 0, 0);
        if (i % (Rows::GRANULES / 2) < Columns / 32) two = load_fresh16(meta + 2 * (i64)i);
        *(uint4 *)(to.meta + 2 * i) = two;
    }
}

// Stages float rows [rows, Columns] as they are. Called by threads First to Threads - 1.
template <int NumRows, int Columns, int Threads, int First = 0, typename Rows>
INLINE void stage_floats(const Rows &to, const float *x) {
    static_assert(Columns % 4 == 0, "rows of activations");
    constexpr int Quads = Rows::PADDED / 4;
    for (int i = thread_index() - First; i < NumRows * Quads; i += Threads - First) {
        const int row = i / Quads, quad = i % Quads;
        uint4 four = make_uint4(0, 0, 0, 0);
        if (quad < Columns / 4) four = load_fresh16(x + (i64)row * Columns + 4 * quad);
        *(uint4 *)(to.values + 4 * i) = four;
    }
}
