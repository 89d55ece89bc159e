// WarpRows without tensor cores: attention of eight rows to tiles of sixteen keys in float32, by one
// logical warp of any width. It has the interface of attention_mma.cuh.
//
// Scores: four neighbouring lanes share a key; each takes every fourth group of eight elements. Values: a
// lane has eight elements of all rows, and KEY_GROUPS groups of lanes take different keys. Probabilities
// stay in the registers of the lanes that computed them; other lanes read them by shuffles.
#pragma once

typedef float QueryElement;
constexpr int QUERY_ELEMENTS = WARP_ROWS * QUERY_ROW;  // for the rows of one warp

struct WarpRows {
    static constexpr int SCORE_LANES = 4;
    static constexpr int SCORE_KEYS = LANES / SCORE_LANES;       // keys that a warp scores at once
    static constexpr int LANE_KEYS = TILE_KEYS / SCORE_KEYS;     // keys of a tile per lane
    static constexpr int CHUNKS = VALUE_ROW <= 32 ? 4 : VALUE_ROW <= 64 ? 8 : VALUE_ROW <= 128 ? 16 : 32;
    static constexpr int KEY_GROUPS = LANES / CHUNKS;
    static constexpr int GROUP_KEYS = SCORE_KEYS / KEY_GROUPS;   // of SCORE_KEYS keys, those of a group
    static constexpr int LANE_ROWS = WARP_ROWS / SCORE_LANES;    // rows whose softmax a lane computes

    Eight keys[LANE_KEYS][KEY_STEPS], values[LANE_KEYS][GROUP_KEYS];
    float out[WARP_ROWS][8];
    float maximum[LANE_ROWS], total[LANE_ROWS], probability[LANE_KEYS][LANE_ROWS];
    int last_visible[LANE_ROWS];

    static INLINE int score_key(int n) { return SCORE_KEYS * n + lane_index() / SCORE_LANES; }
    static INLINE int score_row(int e) { return LANE_ROWS * (lane_index() % SCORE_LANES) + e; }
    static INLINE int key_element(int step) { return 32 * step + 8 * (lane_index() % SCORE_LANES); }
    static INLINE int value_element() { return 8 * (lane_index() % CHUNKS); }
    static INLINE int key_group() { return lane_index() / CHUNKS; }
    static INLINE int value_key(int n, int i) {
        return SCORE_KEYS * n + key_group() + KEY_GROUPS * i;
    }

    // `row_positions`: the last position that each of these eight rows may see; -1: an unused row.
    INLINE void begin(const int *row_positions) {
#pragma unroll
        for (int e = 0; e < LANE_ROWS; e++) {
            maximum[e] = LOWEST;
            total[e] = 0.0f;
            last_visible[e] = row_positions[score_row(e)];
        }
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++)
#pragma unroll
            for (int d = 0; d < 8; d++) out[r][d] = 0.0f;
    }

    // From now on each row sees positions up to last_of(row); -1: none.
    template <typename LastOf>
    INLINE void limit(LastOf last_of) {
#pragma unroll
        for (int e = 0; e < LANE_ROWS; e++) last_visible[e] = last_of(score_row(e));
    }

    // Tells the compiler that all keys (or values) are about to be replaced, in several partial loads.
    INLINE void forget_keys() {
        if constexpr (CLEARS_ROWS) {
#pragma unroll
            for (int n = 0; n < LANE_KEYS; n++)
#pragma unroll
                for (int step = 0; step < KEY_STEPS; step++) keys[n][step].clear();
        }
    }
    INLINE void forget_values() {
        if constexpr (CLEARS_ROWS) {
#pragma unroll
            for (int n = 0; n < LANE_KEYS; n++)
#pragma unroll
                for (int i = 0; i < GROUP_KEYS; i++) values[n][i].clear();
        }
    }

    // row_of(key of the tile) is the row to load, or -1 to keep the registers as they are. The same holds
    // for load_values.
    template <int SOURCE, typename RowOf>
    INLINE void load_keys(HeadRows rows, RowOf row_of) {
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++) {
            const int row = row_of(score_key(n));
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
        for (int n = 0; n < LANE_KEYS; n++)
#pragma unroll
            for (int i = 0; i < GROUP_KEYS; i++) {
                const int row = row_of(value_key(n, i));
                if (row >= 0 && value_element() < VALUE_ROW)
                    values[n][i].template load<SOURCE, VALUE_ROW>(rows, row, value_element());
                else if (row >= 0) values[n][i].clear();
            }
    }

    // Online softmax: scores of the loaded keys, which begin at position `first_key`, become
    // probabilities relative to the new maximum, and earlier results are rescaled to it.
    INLINE void score(const QueryElement *queries, int first_key) {
        float sums[LANE_KEYS][WARP_ROWS];
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++)
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) sums[n][r] = 0.0f;
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {

            float key[LANE_KEYS][8];
#pragma unroll
            for (int n = 0; n < LANE_KEYS; n++) keys[n][step].floats(key[n]);
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) {
                if (r % 2 == 0) read_anew();
                const float4 *query = (const float4 *)(queries + r * QUERY_ROW + key_element(step));
                const float4 low = query[0], high = query[1];
#pragma unroll
                for (int n = 0; n < LANE_KEYS; n++) {
                    float sum = sums[n][r];
                    sum += low.x * key[n][0], sum += low.y * key[n][1];
                    sum += low.z * key[n][2], sum += low.w * key[n][3];
                    sum += high.x * key[n][4], sum += high.y * key[n][5];
                    sum += high.z * key[n][6], sum += high.w * key[n][7];
                    sums[n][r] = sum;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++) share_rows(sums[n]);
        soften(sums, first_key);
    }

    // Sums over the four lanes of a key; lane c ends with rows 2c and 2c + 1 in the first two places.
    static INLINE void share_rows(float sums[WARP_ROWS]) {
#pragma unroll
        for (int mask = SCORE_LANES / 2, left = WARP_ROWS / 2; mask; mask >>= 1, left >>= 1) {
            const bool is_upper = lane_index() & mask;
#pragma unroll
            for (int r = 0; r < left; r++) {
                const float given = is_upper ? sums[r] : sums[r + left];
                const float kept = is_upper ? sums[r + left] : sums[r];
                sums[r] = kept + lane_xor(given, mask);
            }
        }
    }

    INLINE void soften(const float sums[LANE_KEYS][WARP_ROWS], int first_key) {
        float correction[LANE_ROWS];
#pragma unroll
        for (int e = 0; e < LANE_ROWS; e++) {
            float highest = maximum[e];
#pragma unroll
            for (int n = 0; n < LANE_KEYS; n++)
                if (is_visible_at(first_key + score_key(n), last_visible[e]))
                    highest = max_of(highest, sums[n][e]);
#pragma unroll
            for (int mask = SCORE_LANES; mask < LANES; mask <<= 1)
                highest = max_of(highest, lane_xor(highest, mask));
            correction[e] = exp_fast(maximum[e] - highest);
            total[e] *= correction[e];
#pragma unroll
            for (int n = 0; n < LANE_KEYS; n++) {
                const bool is_visible = is_visible_at(first_key + score_key(n), last_visible[e]);
                probability[n][e] = is_visible ? exp_fast(sums[n][e] - highest) : 0.0f;
                total[e] += probability[n][e];
            }
            maximum[e] = highest;
        }
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const float factor = lane_read(correction[r % LANE_ROWS], r / LANE_ROWS);
#pragma unroll
            for (int d = 0; d < 8; d++) out[r][d] *= factor;
        }
        settle_out();
    }

    INLINE void settle_out() {
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++)
#pragma unroll
            for (int d = 0; d < 8; d++) settle(out[r][d]);
    }

    INLINE void mix() {
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++)
#pragma unroll
            for (int i = 0; i < GROUP_KEYS; i++) {
                float value[8];
                values[n][i].floats(value);
                const int source = SCORE_LANES * (value_key(n, i) % SCORE_KEYS);
#pragma unroll
                for (int r = 0; r < WARP_ROWS; r++) {
                    const float weight =
                        lane_read(probability[n][r % LANE_ROWS], source + r / LANE_ROWS);
#pragma unroll
                    for (int d = 0; d < 8; d++) out[r][d] += weight * value[d];
                }
                settle_out();
            }
    }

    // Completes the sums over lanes; call it before give_statistics and give_results.
    INLINE void end() {
#pragma unroll
        for (int e = 0; e < LANE_ROWS; e++)
#pragma unroll
            for (int mask = SCORE_LANES; mask < LANES; mask <<= 1)
                total[e] += lane_xor(total[e], mask);
#pragma unroll
        for (int mask = CHUNKS; mask < LANES; mask <<= 1)
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++)
#pragma unroll
                for (int d = 0; d < 8; d++) out[r][d] += lane_xor(out[r][d], mask);
    }

    // Calls take(row, maximum, total) once for each row.
    template <typename Take>
    INLINE void give_statistics(Take take) const {
        if (lane_index() >= SCORE_LANES) return;
#pragma unroll
        for (int e = 0; e < LANE_ROWS; e++) take(score_row(e), maximum[e], total[e]);
    }
    // Calls take(row, first element, four elements) once for each group of four.
    template <typename Take>
    INLINE void give_results(Take take) const {
        if (value_element() >= VALUE_ROW) return;
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            if (r % KEY_GROUPS != key_group()) continue;
            take(r, value_element(), make_float4(out[r][0], out[r][1], out[r][2], out[r][3]));
            take(r, value_element() + 4, make_float4(out[r][4], out[r][5], out[r][6], out[r][7]));
        }
    }

    // Stores one element of a scaled query.
    static INLINE void put_query(QueryElement *queries, int row, int element, float value) {
        queries[row * QUERY_ROW + element] = value;
    }
};
