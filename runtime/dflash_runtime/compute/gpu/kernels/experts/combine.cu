// combine: adds the terms of each token's experts in float64, in the order in which the token chose them,
// and rounds once. Reads gemm_down's terms of some columns; writes sums, or adds them to the residual.
// Grid T, up to 256 threads: a block per token.
//
// Parameters: HIDDEN.
#include "groups.cuh"

constexpr int COMBINE_THREADS = 256, PAIRS_AT_ONCE = 4;
static_assert(HIDDEN % 4 == 0, "columns are added in fours");

struct CombineArgs {
    const float *terms;         // [rows, num_columns]
    const int *rows_of_tokens;  // [T, pairs_per_token]
    const double *sums;         // [T, HIDDEN]: initial values of the sums; null: zeros
    const float *residual;      // [T, HIDDEN]: added to the rounded sums; null: zeros
    float *out;                 // [T, HIDDEN]: rounded sums, may be `residual`; null: not written
    double *out_sums;           // [T, HIDDEN]: the sums, may be `sums`; null: not written
    int pairs_per_token, first_column, num_columns, unused;
};

KERNEL(combine, CombineArgs, COMBINE_THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 token = block_index_x();
    const int *rows = a.rows_of_tokens + token * a.pairs_per_token;
    for (int column = 4 * thread_index(); column < a.num_columns; column += 4 * num_threads()) {
        const i64 place = token * HIDDEN + a.first_column + column;
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
            // Pairs without a row load row 0, but do not add it.
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++)
                terms[i] = load_fresh16(
                    a.terms + (i64)(found[i] < 0 ? 0 : found[i]) * a.num_columns + column);
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
