// linear_decode: up to four matrices times the same 1 to 8 rows of activations (GEMV). A block stages the
// rows in shared memory (staging.cuh), then computes tiles of rows of the matrices; a team of lanes, or of
// warps, shares the weights of a row. Grid: tiles, or fewer blocks that compute several each, + 1 if SIDE.
//
// Parameters: SEGMENTS matrices of TYPE0 … with ROWS0 … rows, COLUMNS; TOKENS; INPUT (InputMode).
// ADD: the product is added to `out`. GATED: it is multiplied by the sigmoid of each token's gate. SIDE: an
// extra block writes the staged rows. ARGMAX: each block also writes the argmax over its rows.
// Tuning: WARPS per block, TEAM lanes per row of quantised weights, ROW_WARPS warps per row (TEAM is then
// LANES), TEAM_ROWS rows per team at once, MOST_DEEP units per lane in flight, MIN_BLOCKS.
#include "argmax.cuh"
#include "products.cuh"
#include "reduce.cuh"

struct LinearDecodeArgs {
    const u8 *weights[4];
    float *out[4];            // [T, rows]
    const float *x;           // [T, COLUMNS], unless QUANTISED
    const i8 *quants;         // [T, padded], if QUANTISED
    const float2 *meta;       // [T, padded / 16]
    const float *norm_weight; // [COLUMNS], if NORM
    const float *up;          // [T, COLUMNS], if SWIGLU: the activations are silu(x) * up
    const float *gate;        // [T], if GATED
    SideOutputs side;
    u64 *partials;            // [blocks, T], if ARGMAX
    float eps;
};

constexpr int BLOCK_THREADS = WARPS * LANES;
constexpr bool HAS_FLOATS = IsFloat<TYPE0>::VALUE || IsFloat<TYPE1>::VALUE ||
                            IsFloat<TYPE2>::VALUE || IsFloat<TYPE3>::VALUE;
constexpr bool HAS_BYTES = !IsFloat<TYPE0>::VALUE || !IsFloat<TYPE1>::VALUE ||
                           !IsFloat<TYPE2>::VALUE || !IsFloat<TYPE3>::VALUE;
using Rows = Staged<TOKENS, COLUMNS, HAS_BYTES, HAS_FLOATS>;

// How the threads of a block divide the rows of a tile.
template <int Type>
struct Tiling {
    static constexpr int TEAM_LANES = IsFloat<Type>::VALUE ? LANES : TEAM;
    static constexpr int TEAMS = ROW_WARPS > 1 ? WARPS / ROW_WARPS : WARPS * (LANES / TEAM_LANES);
    static constexpr int TILE_ROWS = TEAMS * TEAM_ROWS, STRIDE = TEAM_LANES * ROW_WARPS;
    static_assert(ROW_WARPS == 1 || (TEAM_LANES == LANES && WARPS % ROW_WARPS == 0), "row's warps");
    INLINE static constexpr int tiles(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
};

constexpr int END0 = Tiling<TYPE0>::tiles(ROWS0);
constexpr int END1 = END0 + (SEGMENTS > 1 ? Tiling<TYPE1>::tiles(ROWS1) : 0);
constexpr int END2 = END1 + (SEGMENTS > 2 ? Tiling<TYPE2>::tiles(ROWS2) : 0);
constexpr int NUM_TILES = END2 + (SEGMENTS > 3 ? Tiling<TYPE3>::tiles(ROWS3) : 0);

// Stages the rows of activations in shared memory, once per block.
template <int Mode>
struct Input {
    FloatInput<TOKENS, COLUMNS, BLOCK_THREADS, (InputMode)Mode, HAS_BYTES, HAS_FLOATS> floats;

    INLINE void before_wait(const LinearDecodeArgs &a) { floats.before_wait(a.norm_weight); }
    INLINE void stage(const LinearDecodeArgs &a, const Rows &to, const SideOutputs *side) {
        floats.stage(to, a.x, Mode == SWIGLU ? a.up : a.norm_weight, a.eps, side);
    }
};
template <>
struct Input<QUANTISED> {
    INLINE void before_wait(const LinearDecodeArgs &) {}
    INLINE void stage(const LinearDecodeArgs &a, const Rows &to, const SideOutputs *) {
        stage_bytes<TOKENS, COLUMNS, BLOCK_THREADS>(to, a.quants, a.meta);
    }
};

struct Block {
    const LinearDecodeArgs &a;
    Rows rows;
    Input<INPUT> input;
    bool has_input;
    u64 best[TOKENS];  // with ARGMAX: this thread's largest keys

    INLINE void take_input(const SideOutputs *side) {
        input.stage(a, rows, side);
        block_barrier();
        has_input = true;
    }

    template <int Type>
    INLINE void compute(const u8 *weights, float *out, int num_rows, int tile) {
        using Tile = Tiling<Type>;
        using Products = RowProducts<Type, COLUMNS, TEAM_ROWS, Tile::STRIDE, MOST_DEEP>;
        using Sums = TeamSums<TEAM_ROWS * TOKENS, Tile::TEAM_LANES>;
        constexpr int LANES_A_ROW = Tile::STRIDE;
        int thread = thread_index();
        settle(thread);  // recompute addresses for each tile instead of keeping them in registers
        const int team = thread / LANES_A_ROW, place = thread % LANES_A_ROW;
        const int first = tile * Tile::TILE_ROWS + team * TEAM_ROWS;
        const u8 *begins[TEAM_ROWS];
#pragma unroll
        for (int r = 0; r < TEAM_ROWS; r++) {  // past the last row: the last one again, not written
            begins[r] = weights + (i64)min_of(first + r, num_rows - 1) * Products::Product::ROW_BYTES;
        }
        Products products;
        Sums sums;
        products.load(begins, place);
        const bool waits = !has_input;
        if (waits) wait_for_previous();
        float addend[Sums::CHUNKS];
        if constexpr (ADD) {  // loaded long before it is needed
#pragma unroll
            for (int c = 0; c < Sums::CHUNKS; c++) {
                const int row = first + Sums::index(c) / TOKENS, token = Sums::index(c) % TOKENS;
                addend[c] = 0.0f;
                if (Sums::is_writer(c) && row < num_rows) {
                    addend[c] = bits_to_float(load_fresh4(out + (i64)token * num_rows + row));
                }
            }
        }
        if (waits) take_input(nullptr);
        sums.clear();
        products.template add<TOKENS>(sums.values, begins, rows, 0, place);
        if constexpr (ROW_WARPS > 1) block_barrier();  // `partial` of the previous tile has been read
#pragma unroll
        for (int c = 0; c < Sums::CHUNKS; c++) {
            float sum = sums.sum(c);
            const int index = Sums::index(c), row = first + index / TOKENS, token = index % TOKENS;
            bool writes = Sums::is_writer(c);
            if constexpr (ROW_WARPS > 1) {
                SHARED(float, partial, WARPS *Sums::PADDED);
                if (writes) partial[warp_index() * Sums::PADDED + index] = sum;
                block_barrier();
                writes = writes && warp_index() % ROW_WARPS == 0;
                if (writes) {
                    for (int warp = 1; warp < ROW_WARPS; warp++) {
                        sum += partial[(warp_index() + warp) * Sums::PADDED + index];
                    }
                }
            }
            if (!writes || row >= num_rows) continue;
            if constexpr (GATED) sum *= sigmoid(bits_to_float(load_fresh4(a.gate + token)));
            if constexpr (ADD) sum += addend[c];
            out[(i64)token * num_rows + row] = sum;
            if constexpr (ARGMAX) {
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    if (t == token) best[t] = larger_key(best[t], argmax_key(sum, (u32)row));
                }
            }
        }
    }

    // Segments of the same type share one instance of compute().
    INLINE void compute_tile(int tile) {
        const u8 *weights = a.weights[0];
        float *out = a.out[0];
        int type = TYPE0, rows_of = ROWS0;
        if (SEGMENTS > 3 && tile >= END2) {
            weights = a.weights[3], out = a.out[3], type = TYPE3, rows_of = ROWS3, tile -= END2;
        } else if (SEGMENTS > 2 && tile >= END1) {
            weights = a.weights[2], out = a.out[2], type = TYPE2, rows_of = ROWS2, tile -= END1;
        } else if (SEGMENTS > 1 && tile >= END0) {
            weights = a.weights[1], out = a.out[1], type = TYPE1, rows_of = ROWS1, tile -= END0;
        }
        if (type == TYPE0) compute<TYPE0>(weights, out, rows_of, tile);
        else if (type == TYPE1) compute<TYPE1>(weights, out, rows_of, tile);
        else if (type == TYPE2) compute<TYPE2>(weights, out, rows_of, tile);
        else compute<TYPE3>(weights, out, rows_of, tile);
    }

    INLINE void write_best() {
        SHARED(u64, found, WARPS *TOKENS);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const u64 key = lanes_largest(best[t]);
            if (lane_index() == 0) found[warp_index() * TOKENS + t] = key;
        }
        block_barrier();
        const int t = thread_index();
        if (t >= TOKENS) return;
        u64 key = 0;
        for (int warp = 0; warp < WARPS; warp++) key = larger_key(key, found[warp * TOKENS + t]);
        a.partials[(i64)block_index_x() * TOKENS + t] = key;
    }
};

KERNEL(linear_decode, LinearDecodeArgs, BLOCK_THREADS, MIN_BLOCKS) {
    DYNAMIC_SHARED(shared);
    Block block = {a, Rows(shared), {}, false, {}};
    let_next_begin();
    block.input.before_wait(a);
    const int num_blocks = num_blocks_x() - SIDE;
    if (SIDE && block_index_x() == num_blocks) {
        wait_for_previous();
        block.take_input(&a.side);
        return;
    }
    for (int tile = block_index_x(); tile < NUM_TILES; tile += num_blocks) {
        block.compute_tile(tile);
    }
    if constexpr (ARGMAX) block.write_best();
}
