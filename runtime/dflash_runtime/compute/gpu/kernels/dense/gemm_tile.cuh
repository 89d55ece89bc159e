// One tile of C[rows, n] = A[rows, columns] . W[n, columns]^T in registers: the loop over columns.
//
// PRODUCT says how: PRODUCT_TENSOR halves on tensor cores, PRODUCT_HALF the same halves by FMA
// where there are none, PRODUCT_FLOAT floats by FMA. A product's terms are always added in order of
// columns, so an element's bits depend on its own row of A and of W only, not on the tile it lies
// in.
//
// A block computes TILE_M x TILE_N by WARPS_M x WARPS_N warps of 32 threads. A stage in shared
// memory is the next 128 bytes of each row of both, STAGES of them under way. A row's eight chunks
// of 16 bytes are swapped by the row's number, so that eight rows' chunks lie in different banks:
//
//     row r:  chunk c at  128 r + 16 (c ^ (r & 7))
//
// Whatever PRODUCT is, a thread holds what mma.cuh draws: with warp tiles cut into 16 x 8,
// totals[m][n][0..3] = rows g, g, g + 8, g + 8, columns 2t, 2t + 1, 2t, 2t + 1.
//
// Defines: PRODUCT, TILE_M, TILE_N, WARPS_M, WARPS_N, STAGES, BLOCKS_PER_SM, NUM_COLUMNS,
// WEIGHT_ROW_BYTES, NUM_PARTS.
//
// With STORED_TYPE, a quantised type that UnitsInOrder knows, rows of W are read as they are stored, WEIGHT_ROW_BYTES apart: a step is a unit, which a thread makes halves of on its way into
// shared memory. They are the halves that dequantise.cu makes, so that bits are the same.
//
// With NUM_PARTS = 2 a row of A is the sum of two rows of halves, the second PART_BYTES after: what
// the first rounds away. The columns are gone over twice.
#pragma once
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

// Place of this thread in its block's tile.
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

// What this thread copies: chunk `thread % 8` of rows `thread / 8 + i * COPIED_ROWS`. Rows of A lie
// anywhere, rows of W at even distances; those from num_a and num_w copies on are zeros.
constexpr int COPIED_ROWS = THREADS / STEP_CHUNKS;
struct TileRows {
    const u8 *a, *w;
    u32 a_offsets[A_COPIES];  // of the row, in units of 16 bytes
    int num_a, num_w;
};
INLINE int copied_row(int copy) { return thread_index() / STEP_CHUNKS + copy * COPIED_ROWS; }
// Copies of this thread whose rows are among the first `num_rows` of the tile.
INLINE int copies_within(int num_rows) {
    return (num_rows - thread_index() / STEP_CHUNKS + COPIED_ROWS - 1) / COPIED_ROWS;
}
INLINE u32 offset_of_a(i64 row) { return (u32)(row * NUM_CHUNKS); }

// W_DISTANCE: bytes between the rows of W of two copies; 0: W is left to StoredRows.
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

// What fills W's part of a stage besides: nothing, if its rows are copied.
struct CopiedRows {
    static constexpr int TURNS = 1;
    template <int TURN>
    INLINE void fill(u8 *, int) {}
};
#ifdef STORED_TYPE
// Or a row of each thread's, in the order of the tile. Two units of it are on their way, those of
// even and of odd steps: what holds one must be known when the kernel is compiled.
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
// Of 16 columns: chunks `chunk` and the next of the warp's rows.
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
    Fragments<M> fragments[2];  // those of the next columns are loaded meanwhile
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
// Elements 4 index … 4 index + 3 of a row of the stage.
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

// One step, of those whose number is TURN when divided by the turns of `weights`.
template <int W_DISTANCE, int TURN, typename Weights>
INLINE void multiply_turn(
    float totals[NUM_M][NUM_N][4], u8 *shared, const TileRows &rows, u64 part_bytes, int num_m,
    int step, Weights &weights) {
    copy_async_wait<STAGES - 2>();
    block_barrier();
    // This barrier also says that all have read the stage that is filled now.
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

// Fills `totals`. Rows of the tile from `num_rows` on are not computed, to the next multiple of 16.
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
