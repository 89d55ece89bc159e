// The main loop of all tiled products: one tile of C[rows, n] = A[rows, columns] . W[n, columns]^T.
//
// PRODUCT_TENSOR multiplies halves on tensor cores, PRODUCT_HALF the same halves by FMA, PRODUCT_FLOAT
// floats by FMA. Terms are added in order of columns, so an element's bits depend on its row of A and its
// row of W only, not on the tile.
//
// A block of WARPS_M x WARPS_N warps of 32 threads computes TILE_M x TILE_N. A stage in shared memory is
// 128 bytes of each row of A and W; STAGES of them are in flight. The eight 16-byte chunks of a row are
// swizzled by the row's number to avoid bank conflicts:
//
//     row r:  chunk c at  128 r + 16 (c ^ (r & 7))
//
// For every PRODUCT a thread holds the fragment layout of mma.cuh: with warp tiles cut into 16 x 8,
// totals[m][n][0..3] = rows g, g, g + 8, g + 8, columns 2t, 2t + 1, 2t, 2t + 1.
//
// With STORED_TYPE (a quantised type) W is read as stored, in rows of WEIGHT_ROW_BYTES: a stage is one
// unit per row, which a thread unpacks to halves on the way to shared memory. These are the halves that
// dequantise.cu writes, so that results have the same bits.
//
// With NUM_PARTS = 2 a row of A is the sum of two rows of halves, part_bytes apart; the second holds what
// the first rounds away. The loop then runs over the columns twice.
//
// Parameters: PRODUCT, TILE_M, TILE_N, WARPS_M, WARPS_N, STAGES, BLOCKS_PER_SM, NUM_COLUMNS,
// WEIGHT_ROW_BYTES, NUM_PARTS, STORED_TYPE (or undefined).
#pragma once
#ifdef STORED_TYPE
#define WEIGHTS_IN_L1
#endif
#include "mma.cuh"
#ifdef STORED_TYPE
#include "stored_units.cuh"
#endif

#define PRODUCT_FLOAT 0
#define PRODUCT_HALF 1
#define PRODUCT_TENSOR 2

constexpr int ELEMENT_BYTES = PRODUCT == PRODUCT_FLOAT ? 4 : 2;
constexpr int STEP_BYTES = 128, STEP_CHUNKS = STEP_BYTES / 16;
constexpr int NUM_CHUNKS = NUM_COLUMNS * ELEMENT_BYTES / 16;
constexpr int STEPS_OF_PART = (NUM_CHUNKS + STEP_CHUNKS - 1) / STEP_CHUNKS;
constexpr int NUM_STEPS = NUM_PARTS * STEPS_OF_PART;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int NUM_M = WARP_M / 16, NUM_N = WARP_N / 8;
constexpr int A_BYTES = TILE_M * STEP_BYTES, STAGE_BYTES = A_BYTES + TILE_N * STEP_BYTES;
constexpr int A_COPIES = TILE_M * STEP_CHUNKS / THREADS, W_COPIES = TILE_N * STEP_CHUNKS / THREADS;

static_assert(NUM_COLUMNS * ELEMENT_BYTES % 16 == 0, "rows must be whole chunks of 16 bytes");
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a warp's tile is cut into 16 x 16");
static_assert(NUM_M <= 4, "multiply_step knows up to four rows of 16 x 8");
static_assert(A_COPIES * THREADS == TILE_M * STEP_CHUNKS, "threads share the copies evenly");
static_assert(W_COPIES * THREADS == TILE_N * STEP_CHUNKS, "threads share the copies evenly");
#ifndef STORED_TYPE
static_assert(WEIGHT_ROW_BYTES % 16 == 0 && WEIGHT_ROW_BYTES >= 16 * NUM_CHUNKS, "rows of W");
#endif
static_assert(STAGES >= 2, "one stage is filled while another is read");

// This thread's place in the block's tile.
INLINE int tile_lane() { return thread_index() % 32; }
INLINE int warp_row() { return thread_index() / 32 / WARPS_N * WARP_M; }
INLINE int warp_column() { return thread_index() / 32 % WARPS_N * WARP_N; }
INLINE int total_row(int m, int upper) {
    return warp_row() + 16 * m + 8 * upper + tile_lane() / 4;
}
INLINE int total_column(int n) { return warp_column() + 8 * n + 2 * (tile_lane() % 4); }

INLINE int chunk_place(int row, int chunk) {
    return row * STEP_BYTES + 16 * (chunk ^ (row % STEP_CHUNKS));
}

// The rows that this thread copies: chunk `thread % 8` of rows `thread / 8 + i * COPIED_ROWS`. Rows of A
// have offsets of their own, rows of W are equally spaced. Copies from num_a (num_w) on write zeros.
constexpr int COPIED_ROWS = THREADS / STEP_CHUNKS;
struct TileRows {
    const u8 *a, *w;
    u32 a_offsets[A_COPIES];  // of each row, in units of 16 bytes
    int num_a, num_w;
};
INLINE int copied_row(int copy) { return thread_index() / STEP_CHUNKS + copy * COPIED_ROWS; }
// The number of this thread's copies whose rows are among the first `num_rows` of the tile.
INLINE int copies_within(int num_rows) {
    return (num_rows - thread_index() / STEP_CHUNKS + COPIED_ROWS - 1) / COPIED_ROWS;
}
INLINE u32 offset_of_a(i64 row) { return (u32)(row * NUM_CHUNKS); }

// Starts the copies of one stage. W_DISTANCE: bytes between W's rows of two copies; 0: StoredRows fills W.
template <int W_DISTANCE>
INLINE void copy_step(u8 *shared, const TileRows &rows, u64 part_bytes, int step) {
    const int part = NUM_PARTS == 1 ? 0 : step / STEPS_OF_PART;
    const int chunk = thread_index() % STEP_CHUNKS;
    const int column_chunk = (step - part * STEPS_OF_PART) * STEP_CHUNKS + chunk;
    const bool is_inside = NUM_CHUNKS % STEP_CHUNKS == 0 || column_chunk < NUM_CHUNKS;
    const int num_a = is_inside ? rows.num_a : 0, num_w = is_inside ? rows.num_w : 0;
    u8 *stage = shared + step % STAGES * STAGE_BYTES;
    const u8 *a = rows.a + part * part_bytes + 16 * column_chunk, *w = rows.w + 16 * column_chunk;
    copy_async16_each<A_COPIES>(
        [&](int i) { return stage + chunk_place(copied_row(i), chunk); },
        [&](int i) { return a + 16 * (u64)rows.a_offsets[i]; }, [&](int i) { return i < num_a; });
    if constexpr (W_DISTANCE != 0)
        copy_async16_each<W_COPIES>(
            [&](int i) { return stage + A_BYTES + chunk_place(copied_row(i), chunk); },
            [&](int i) { return w + i * (i64)W_DISTANCE; }, [&](int i) { return i < num_w; });
}

// Fills W's part of a stage where copy_step does not: nothing to do if W's rows are copied.
struct CopiedRows {
    static constexpr int TURNS = 1;
    template <int TURN>
    INLINE void fill(u8 *, int) {}
};
#ifdef STORED_TYPE
// Rows of W as stored: a thread unpacks one row. Two units are in flight, one for even and one for odd
// steps (TURN), as registers must be indexed by constants.
struct StoredRows {
    using Weights = UnitsInOrder<STORED_TYPE, NUM_COLUMNS>;
    static_assert(Weights::ROW_BYTES == WEIGHT_ROW_BYTES && NUM_PARTS == 1, "rows of W");
    static_assert(THREADS >= TILE_N && Weights::UNITS == NUM_STEPS, "a thread has a row");
    static constexpr int TURNS = 2;
    const u8 *row;
    typename Weights::Raw raw[TURNS];

    INLINE void begin(const u8 *first) {
        row = first;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
            if (turn < NUM_STEPS && thread_index() < TILE_N)
                Weights::load(raw[turn], row, turn);
    }
    template <int TURN>
    INLINE void fill(u8 *shared, int step) {
        if (thread_index() >= TILE_N) return;
        u8 *stage = shared + step % STAGES * STAGE_BYTES + A_BYTES;
        const int first_chunk = STEP_CHUNKS * (thread_index() - step);
        store_unit<Weights>(stage, raw[TURN], step, first_chunk);
        if (step + TURNS < NUM_STEPS) Weights::load(raw[TURN], row, step + TURNS);
    }
};
#endif

#if PRODUCT == PRODUCT_TENSOR
// Fragments of 16 columns: chunks `chunk` and `chunk + 1` of the warp's rows.
template <int M>
struct Fragments {
    u32 a[M][4], w[NUM_N / 2][4];
};
template <int M>
INLINE void load_fragments(Fragments<M> &fragments, const u8 *stage, int chunk) {
    const int lane = tile_lane();
    const int a_row = warp_row() + lane % 16, w_row = warp_column() + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int m = 0; m < M; m++)
        load_matrix_x4(fragments.a[m], stage + chunk_place(a_row + 16 * m, chunk + lane / 16));
#pragma unroll
    for (int n = 0; n < NUM_N / 2; n++)
        load_matrix_x4(fragments.w[n],
                       stage + A_BYTES + chunk_place(w_row + 16 * n, chunk + lane / 8 % 2));
}
template <int M>
INLINE void multiply_step(float totals[NUM_M][NUM_N][4], const u8 *stage) {
    Fragments<M> fragments[2];  // double buffered
    load_fragments(fragments[0], stage, 0);
#pragma unroll
    for (int chunk = 0; chunk < STEP_CHUNKS; chunk += 2) {
        const Fragments<M> &now = fragments[chunk / 2 % 2];
        if (chunk + 2 < STEP_CHUNKS)
            load_fragments(fragments[(chunk / 2 + 1) % 2], stage, chunk + 2);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < NUM_N; n++)
                mma_f16(totals[m][n], now.a[m], now.w[n / 2] + n % 2 * 2);
    }
}
#else
struct Four {
    float k[4];
};
// Elements 4 index … 4 index + 3 of a row in the stage.
INLINE Four elements(const u8 *tile, int row, int index) {
    Four four;
#if PRODUCT == PRODUCT_FLOAT
    const uint4 bits = *(const uint4 *)(tile + chunk_place(row, index));
    four.k[0] = bits_to_float(bits.x), four.k[1] = bits_to_float(bits.y);
    four.k[2] = bits_to_float(bits.z), four.k[3] = bits_to_float(bits.w);
#else
    const uint2 bits = *(const uint2 *)(tile + chunk_place(row, index / 2) + 8 * (index % 2));
    four.k[0] = half_to_float(bits.x & 0xffff), four.k[1] = half_to_float(bits.x >> 16);
    four.k[2] = half_to_float(bits.y & 0xffff), four.k[3] = half_to_float(bits.y >> 16);
#endif
    return four;
}
template <int M>
INLINE void multiply_step(float totals[NUM_M][NUM_N][4], const u8 *stage) {
    for (int index = 0; index < STEP_BYTES / (4 * ELEMENT_BYTES); index++) {
        Four a[2 * M];
#pragma unroll
        for (int r = 0; r < 2 * M; r++) a[r] = elements(stage, total_row(r / 2, r % 2), index);
#pragma unroll
        for (int c = 0; c < 2 * NUM_N; c++) {
            const Four w = elements(stage + A_BYTES, total_column(c / 2) + c % 2, index);
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                float &total = totals[r / 2][c / 2][r % 2 * 2 + c % 2];
#pragma unroll
                for (int k = 0; k < 4; k++) total += a[r].k[k] * w.k[k];
            }
        }
    }
}
#endif

// One step; TURN is its number modulo Weights::TURNS. Only the first num_m tiles of 16 rows are computed.
template <int W_DISTANCE, int TURN, typename Weights>
INLINE void multiply_turn(
    float totals[NUM_M][NUM_N][4], u8 *shared, const TileRows &rows, u64 part_bytes, int num_m,
    int step, Weights &weights) {
    copy_async_wait<STAGES - 2>();
    block_barrier();
    // After this barrier all threads have read the stage that is filled next.
    const int next = step + STAGES - 1;
    if (next < NUM_STEPS) copy_step<W_DISTANCE>(shared, rows, part_bytes, next);
    copy_async_commit();
    if (next < NUM_STEPS)
        weights.template fill<(TURN + STAGES - 1) % Weights::TURNS>(shared, next);
    const u8 *stage = shared + step % STAGES * STAGE_BYTES;
    if (num_m >= NUM_M) multiply_step<NUM_M>(totals, stage);
    else if (NUM_M > 3 && num_m == 3) multiply_step<(NUM_M > 3 ? 3 : 1)>(totals, stage);
    else if (NUM_M > 2 && num_m == 2) multiply_step<(NUM_M > 2 ? 2 : 1)>(totals, stage);
    else if (NUM_M > 1 && num_m == 1) multiply_step<1>(totals, stage);
}

// Computes `totals`. Rows of the tile past `num_rows`, rounded up to a multiple of 16, are skipped.
template <int W_DISTANCE, typename Weights>
INLINE void multiply_tile(
    float totals[NUM_M][NUM_N][4], u8 *shared, const TileRows &rows, u64 part_bytes, int num_rows,
    Weights &weights) {
#pragma unroll
    for (int m = 0; m < NUM_M; m++)
#pragma unroll
        for (int n = 0; n < NUM_N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) totals[m][n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < NUM_STEPS) copy_step<W_DISTANCE>(shared, rows, part_bytes, step);
        copy_async_commit();
        if (step < NUM_STEPS) {
            if (step % Weights::TURNS == 0) weights.template fill<0>(shared, step);
            else weights.template fill<Weights::TURNS - 1>(shared, step);
        }
    }
    const int num_m = (num_rows - warp_row() + 15) / 16;  // 0 or less: nothing for this warp
    for (int step = 0; step < NUM_STEPS; step += Weights::TURNS) {
        multiply_turn<W_DISTANCE, 0>(totals, shared, rows, part_bytes, num_m, step, weights);
        if (Weights::TURNS == 2 && step + 1 < NUM_STEPS)
            multiply_turn<W_DISTANCE, 1>(
                totals, shared, rows, part_bytes, num_m, step + 1, weights);
    }
    copy_async_wait<0>();
}
template <int W_DISTANCE>
INLINE void multiply_tile(
    float totals[NUM_M][NUM_N][4], u8 *shared, const TileRows &rows, u64 part_bytes, int num_rows) {
    CopiedRows copied;
    multiply_tile<W_DISTANCE>(totals, shared, rows, part_bytes, num_rows, copied);
}
