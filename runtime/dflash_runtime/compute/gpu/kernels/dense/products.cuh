// Products of rows of weights with staged rows of activations, for the kernels of steps. Every rounding
// is explicit (fmaf), so that a product has the same bits in every kernel.
#pragma once
#include "formats.cuh"
#include "staging.cuh"

// A row's activations that one unit of quantised weights is multiplied by, in a lane's registers.
struct ActivationUnit {
    uint4 q[4];
    float scale[4], sum[4];

    template <typename Rows, typename Weights>
    INLINE void load(const Rows &from, int token, int unit) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            q[j] = *(const uint4 *)from.granule(token, Weights::granule(unit, j));
        }
        const float2 *meta = from.meta + token * Rows::GRANULES;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            if constexpr (Weights::ADJACENT) {
                const float4 two = *(const float4 *)(meta + Weights::granule(unit, j));
                scale[j] = two.x, sum[j] = two.y, scale[j + 1] = two.z, sum[j + 1] = two.w;
            } else {
                const float2 a = meta[Weights::granule(unit, j)];
                const float2 b = meta[Weights::granule(unit, j + 1)];
                scale[j] = a.x, sum[j] = a.y, scale[j + 1] = b.x, sum[j + 1] = b.y;
            }
        }
    }
};

INLINE float dot16(const u32 *weights, uint4 x) {
    int sum = dot4((int)weights[3], (int)x.w, 0);
    sum = dot4((int)weights[2], (int)x.z, sum);
    sum = dot4((int)weights[1], (int)x.y, sum);
    return (float)dot4((int)weights[0], (int)x.x, sum);
}

template <typename Weights>
INLINE float add_product(float total, const Unpacked &w, const ActivationUnit &x) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const float first = x.scale[j] * dot16(w.q + 4 * j, x.q[j]);
        const float second = dot16(w.q + 4 * j + 4, x.q[j + 1]);
        if constexpr (Weights::PAIRED) {
            total = fmaf(w.scale[j], fmaf(x.scale[j + 1], second, first), total);
            if constexpr (Weights::HAS_OFFSET) {
                total = fmaf(w.offset[j], x.sum[j] + x.sum[j + 1], total);
            }
        } else {
            total = fmaf(w.scale[j], first, total);
            total = fmaf(w.scale[j + 1], x.scale[j + 1] * second, total);
            if constexpr (Weights::HAS_OFFSET) {
                total = fmaf(w.offset[j], x.sum[j], total);
                total = fmaf(w.offset[j + 1], x.sum[j + 1], total);
            }
        }
    }
    return total;
}

// Products of one unit of NumRows rows of weights, in registers, with all tokens. The sum of row r and
// token t is sums[r * Tokens + t].
template <int Type, int Columns, bool IsFloatType = IsFloat<Type>::VALUE>
struct UnitProducts {
    using Weights = Format<Type, Columns>;
    using Raw = typename Weights::Raw;
    static constexpr int UNITS = Weights::UNITS, ROW_BYTES = Weights::ROW_BYTES;

    INLINE static void load(Raw &raw, const u8 *row, int unit) { Weights::load(raw, row, unit); }

    template <int NumRows, int Tokens, typename Rows>
    INLINE static void add(float *sums, const Raw *raw, const Rows &x, int first_row, int unit) {
        if constexpr (NumRows > 2) {  // two at a time: unpacked bytes of more would fill the registers
            add<2, Tokens>(sums, raw, x, first_row, unit);
            add<NumRows - 2, Tokens>(sums + 2 * Tokens, raw + 2, x, first_row, unit);
        } else {
            Unpacked weights[NumRows];
#pragma unroll
            for (int r = 0; r < NumRows; r++) Weights::unpack(weights[r], raw[r], unit);
#pragma unroll
            for (int t = 0; t < Tokens; t++) {
                if (t % 2 == 0) read_anew();  // activations of eight tokens at once would spill
                ActivationUnit act;
                act.template load<Rows, Weights>(x, first_row + t, unit);
#pragma unroll
                for (int r = 0; r < NumRows; r++) {
                    float &sum = sums[r * Tokens + t];
                    sum = add_product<Weights>(sum, weights[r], act);
                    settle(sum);
                }
            }
        }
    }
};

template <int Type, int Columns>
struct UnitProducts<Type, Columns, true> {
    using Weights = FloatRow<Type, Columns>;
    using Raw = typename Weights::Raw;
    static constexpr int UNITS = Weights::UNITS, ROW_BYTES = Weights::ROW_BYTES;

    INLINE static void load(Raw &raw, const u8 *row, int unit) { Weights::load(raw, row, unit); }

    template <int NumRows, int Tokens, typename Rows>
    INLINE static void add(float *sums, const Raw *raw, const Rows &x, int first_row, int unit) {
        constexpr int ELEMENTS = Weights::ELEMENTS;
#pragma unroll
        for (int t = 0; t < Tokens; t++) {
            const float *row = x.values + (first_row + t) * Rows::PADDED + ELEMENTS * unit;
#pragma unroll
            for (int i = 0; i < ELEMENTS; i += 4) {
                const float4 v = *(const float4 *)(row + i);
#pragma unroll
                for (int r = 0; r < NumRows; r++) {
                    float sum = sums[r * Tokens + t];
                    sum = fmaf(Weights::value(raw[r], i), v.x, sum);
                    sum = fmaf(Weights::value(raw[r], i + 1), v.y, sum);
                    sum = fmaf(Weights::value(raw[r], i + 2), v.z, sum);
                    sums[r * Tokens + t] = fmaf(Weights::value(raw[r], i + 3), v.w, sum);
                }
            }
        }
    }
};

// Products of NumRows rows of weights, whose units Stride lanes divide among themselves: lane `place`
// takes units place, place + Stride, … in groups of DEPTH, whose loads are in flight together.
template <int Type, int Columns, int NumRows, int Stride, int MostDeep>
struct RowProducts {
    using Product = UnitProducts<Type, Columns>;
    static constexpr int UNITS = Product::UNITS, PASSES = (UNITS + Stride - 1) / Stride;
    static constexpr int DEPTH = PASSES < MostDeep ? PASSES : MostDeep;
    typename Product::Raw raw[DEPTH][NumRows];

    // Loads a group; row r begins at rows[r]. The first group may be loaded before wait_for_previous().
    INLINE void load(const u8 *const (&rows)[NumRows], int place, int first_pass = 0) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int unit = place + (first_pass + d) * Stride;
            if (unit >= UNITS) continue;
#pragma unroll
            for (int r = 0; r < NumRows; r++) Product::load(raw[d][r], rows[r], unit);
        }
    }
    template <int Tokens, typename Rows>
    INLINE void add(float *sums, const u8 *const (&rows)[NumRows], const Rows &x, int first_row,
                    int place) {
        for (int pass = 0; pass < PASSES; pass += DEPTH) {
            if (pass) load(rows, place, pass);
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int unit = place + (pass + d) * Stride;
                if (unit >= UNITS) continue;
                Product::template add<NumRows, Tokens>(sums, raw[d], x, first_row, unit);
            }
        }
    }
};
