// WarpRows: attention of eight rows to tiles of sixteen keys, on tensor cores, with the accuracy of about
// float32. Each query (or probability) is split into two halves, x = upper + rest; row r of the 16x8x16
// product has the upper parts and row r + 8 the rests, and the sums of both rows are added. Keys and
// values are loaded from memory directly into fragments. The order of elements inside a product is free,
// so it is chosen such that a lane loads 16 neighbouring bytes:
//
//   scores    lane 4g + c holds key g, elements 32 step + 8c ... + 7: two products of 16 elements
//   values    lane 4g + c holds keys 2c, 2c + 1, 2c + 8, 2c + 9, elements 64 span + 8g ... + 7; product i
//             of a span takes element i of these, so that its column g is element 8g + i
#pragma once

static_assert(LANES == 32, "fragments of tensor cores");
static_assert(!KV_F32, "tensor cores take halves");

// B fragments of eight products, from eight neighbouring values of each of four keys: two keys in a
// register.
struct ValueFragments {
    u32 of_element[8][2];

    INLINE void set(const uint4 value[4]) {
        const u32 words[4][4] = {{value[0].x, value[1].x, value[2].x, value[3].x},
                                 {value[0].y, value[1].y, value[2].y, value[3].y},
                                 {value[0].z, value[1].z, value[2].z, value[3].z},
                                 {value[0].w, value[1].w, value[2].w, value[3].w}};
#pragma unroll
        for (int pair = 0; pair < 4; pair++)
#pragma unroll
            for (int keys = 0; keys < 2; keys++) {
                const u32 low = words[pair][2 * keys], high = words[pair][2 * keys + 1];
                of_element[2 * pair][keys] = (low & 0xFFFF) | high << 16;
                of_element[2 * pair + 1][keys] = low >> 16 | (high & 0xFFFF0000);
            }
    }
};

typedef u16 QueryElement;
constexpr int QUERY_ELEMENTS = 2 * WARP_ROWS * QUERY_ROW;  // upper parts of all rows, then the rests

struct WarpRows {
    static constexpr int SPANS = (VALUE_ROW + 63) / 64;

    Eight keys[2][KEY_STEPS], values[4][SPANS];
    float out[SPANS][8][4];
    float maximum, total;
    u32 probabilities[4];
    int last_visible;

    static INLINE int row() { return lane_index() / 4; }
    static INLINE int key_element(int step) { return 32 * step + 8 * (lane_index() % 4); }
    static INLINE int value_element(int span) { return 64 * span + 8 * (lane_index() / 4); }
    static INLINE int value_key(int i) { return 2 * (lane_index() % 4) + i % 2 + 8 * (i / 2); }
    static INLINE int score_key(int n, int e) { return 8 * n + 2 * (lane_index() % 4) + e; }

    // `row_positions`: the last position that each of these eight rows may see; -1: an unused row.
    INLINE void begin(const int *row_positions) {
        maximum = LOWEST;
        total = 0.0f;
        last_visible = row_positions[row()];
#pragma unroll
        for (int span = 0; span < SPANS; span++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int k = 0; k < 4; k++) out[span][i][k] = 0.0f;
    }

    // From now on each row sees positions up to last_of(row); -1: none.
    template <typename LastOf>
    INLINE void limit(LastOf last_of) { last_visible = last_of(row()); }

    INLINE void forget_keys() {}
    INLINE void forget_values() {}

    // row_of(key of the tile) is the row to load, or -1 to keep the registers as they are. The same holds
    // for load_values.
    template <int SOURCE, typename RowOf>
    INLINE void load_keys(HeadRows rows, RowOf row_of) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int row = row_of(8 * n + lane_index() / 4);
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++) {
                if (row >= 0 && key_element(step) < KEY_ROW)
                    keys[n][step].template load<SOURCE, KEY_ROW>(rows, row, key_element(step));
                else if (row >= 0) keys[n][step].clear();
            }
        }
    }
    template <int SOURCE, typename RowOf>
    INLINE void load_values(HeadRows rows, RowOf row_of) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = row_of(value_key(i));
#pragma unroll
            for (int span = 0; span < SPANS; span++) {
                if (row >= 0 && value_element(span) < VALUE_ROW)
                    values[i][span].template load<SOURCE, VALUE_ROW>(rows, row, value_element(span));
                else if (row >= 0) values[i][span].clear();
            }
        }
    }

    // Online softmax: scores of the loaded keys, which begin at position `first_key`, become
    // probabilities relative to the new maximum, and earlier results are rescaled to it.
    INLINE void score(const QueryElement *queries, int first_key) {
        float sums[2][4] = {};
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            const QueryElement *query = queries + row() * QUERY_ROW + key_element(step);
            const uint4 upper = *(const uint4 *)query;
            const uint4 rest = *(const uint4 *)(query + WARP_ROWS * QUERY_ROW);
            const u32 a[2][4] = {{upper.x, rest.x, upper.y, rest.y},
                                 {upper.z, rest.z, upper.w, rest.w}};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint4 key = keys[n][step].halves();
                const u32 b[2][2] = {{key.x, key.y}, {key.z, key.w}};
                mma_f16(sums[n], a[0], b[0]);
                mma_f16(sums[n], a[1], b[1]);
            }
        }
        float scores[2][2], highest = maximum;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                scores[n][e] = sums[n][e] + sums[n][2 + e];
                if (is_visible_at(first_key + score_key(n, e), last_visible))
                    highest = max_of(highest, scores[n][e]);
            }
        highest = lanes_max<4>(highest);
        const float correction = exp_fast(maximum - highest);
        maximum = highest;
        total *= correction;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float p[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool is_visible = is_visible_at(first_key + score_key(n, e), last_visible);
                p[e] = is_visible ? exp_fast(scores[n][e] - highest) : 0.0f;
                total += p[e];
            }
            split(p[0], p[1], probabilities[2 * n], probabilities[2 * n + 1]);
        }
#pragma unroll
        for (int span = 0; span < SPANS; span++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int k = 0; k < 4; k++) out[span][i][k] *= correction;
    }

    static INLINE void split(float x, float y, u32 &upper, u32 &rest) {
        const u16 low = float_to_half(x), high = float_to_half(y);
        upper = pack_halves(low, high);
        rest = to_halves(x - half_to_float(low), y - half_to_float(high));
    }

    INLINE void mix() {
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            uint4 value[4];
#pragma unroll
            for (int i = 0; i < 4; i++) value[i] = values[i][span].halves();
            ValueFragments fragments;
            fragments.set(value);
#pragma unroll
            for (int i = 0; i < 8; i++)
                mma_f16(out[span][i], probabilities, fragments.of_element[i]);
        }
    }

    // Completes the sums over lanes; call it before give_statistics and give_results.
    INLINE void end() { total = lanes_sum<4>(total); }

    // Calls take(row, maximum, total) once for each row.
    template <typename Take>
    INLINE void give_statistics(Take take) const {
        if (lane_index() % 4 == 0) take(row(), maximum, total);
    }
    // Calls take(row, first element, four elements) once for each group of four.
    template <typename Take>
    INLINE void give_results(Take take) const {
#pragma unroll
        for (int span = 0; span < SPANS; span++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int element = 64 * span + 8 * (2 * (lane_index() % 4) + e);
                if (element >= VALUE_ROW) continue;
#pragma unroll
                for (int i = 0; i < 8; i += 4)
                    take(row(), element + i,
                         make_float4(out[span][i][e] + out[span][i][2 + e],
                                     out[span][i + 1][e] + out[span][i + 1][2 + e],
                                     out[span][i + 2][e] + out[span][i + 2][2 + e],
                                     out[span][i + 3][e] + out[span][i + 3][2 + e]));
            }
    }

    // Stores one element of a scaled query.
    static INLINE void put_query(QueryElement *queries, int row, int element, float value) {
        const u16 upper = float_to_half(value);
        queries[row * QUERY_ROW + element] = upper;
        queries[(WARP_ROWS + row) * QUERY_ROW + element] =
            float_to_half(value - half_to_float(upper));
    }
};
