// Adds the terms of each token's pairs in float64, in order of the token's choice, and rounds once.
//
// Defines: HIDDEN.
#include "groups.cuh"

constexpr int COMBINE_THREADS = 256, PAIRS_AT_ONCE = 4;
static_assert(HIDDEN % 4 == 0, "columns are added in fours");

struct CombineArgs {
    const float *terms;         // [rows, HIDDEN]
    const int *rows_of_tokens;  // [T, pairs_per_token]
    const double *sums;         // [T, HIDDEN]: what the terms are added to; null: nothing
    const float *residual;      // [T, HIDDEN]: added to the rounded sums; null: nothing
    float *out;                 // [T, HIDDEN]: rounded sums; null: not wanted; may be `residual`
    double *out_sums;           // [T, HIDDEN]: the sums; null: not wanted; may be `sums`
    int pairs_per_token;
};

// A block a token.
KERNEL(combine, CombineArgs, COMBINE_THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 token = block_index_x();
    const int *rows = a.rows_of_tokens + token * a.pairs_per_token;
    for (int column = 4 * thread_index(); column < HIDDEN; column += 4 * COMBINE_THREADS) {
        const i64 place = token * HIDDEN + column;
        double sums[4] = {0.0, 0.0, 0.0, 0.0};
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (a.sums) sums[c] = a.sums[place + c];
        for (int first = 0; first < a.pairs_per_token; first += PAIRS_AT_ONCE) {
            int found[PAIRS_AT_ONCE];
            uint4 terms[PAIRS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++)
                found[i] = first + i < a.pairs_per_token ? load_int(rows + first + i) : -1;
            // The terms of pairs without a row are not added; any row may be read instead.
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++)
                terms[i] = load_fresh16(
                    a.terms + (i64)(found[i] < 0 ? 0 : found[i]) * HIDDEN + column);
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++) {
                if (found[i] < 0) continue;
                sums[0] += (double)bits_to_float(terms[i].x);
                sums[1] += (double)bits_to_float(terms[i].y);
                sums[2] += (double)bits_to_float(terms[i].z);
                sums[3] += (double)bits_to_float(terms[i].w);
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (a.out_sums) a.out_sums[place + c] = sums[c];
            const float residual = a.residual ? a.residual[place + c] : 0.0f;
            if (a.out) a.out[place + c] = residual + (float)sums[c];
        }
    }
}
