// The search of sample_token: where top-k, top-p and min-p cut, and on which token the random number
// falls, among tokens in descending order of their logits. Finds the bin first, then the token in it.
// One block; all of its threads call every function here.
#pragma once
#include "sample.cuh"

constexpr int BLOCK_THREADS = WARPS * LANES, EACH = (BINS + BLOCK_THREADS - 1) / BLOCK_THREADS;
constexpr int UNDECIDED = -2;

// A bin, and the tokens and weight in bins before it.
struct BinPlace {
    int bin;
    u32 num_before, count;
    u64 weight_before;
};

// Counts and weights of all bins, divided among the threads.
struct Bins {
    u32 counts[EACH];
    u64 weights[EACH];
    u64 num_before, weight_before, total_weight;  // tokens and weight before this thread's first bin

    INLINE static int bin(int j) { return thread_index() * EACH + j; }

    // Loads counts and weights, and clears them for the next step.
    INLINE void take(const SampleArgs &a) {
        u64 count = 0, weight = 0, total_count;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            counts[j] = bin(j) < BINS ? load_fresh4(a.counts + bin(j)) : 0;
            weights[j] = bin(j) < BINS ? load_fresh_u64(a.weights + 2 * bin(j)) : 0;
            count += counts[j];
            weight += weights[j];
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (bin(j) >= BINS) break;
            a.counts[bin(j)] = a.placed[bin(j)] = 0;
            a.weights[2 * bin(j)] = a.weights[2 * bin(j) + 1] = 0;
        }
        num_before = block_sum_before(count, total_count);
        weight_before = block_sum_before(weight, total_weight);
    }
    // The bin for which holds(place, weight); `bin` is NO_BIN if there is none.
    template <typename Holds>
    INLINE BinPlace find(Holds holds) const {
        SHARED(BinPlace, found, 1);
        if (thread_index() == 0) found->bin = NO_BIN;
        block_barrier();
        BinPlace place = {bin(0), (u32)num_before, 0, weight_before};
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            place.bin = bin(j);
            place.count = counts[j];
            if (holds(place, weights[j])) *found = place;
            place.num_before += counts[j];
            place.weight_before += weights[j];
        }
        block_barrier();
        place = *found;
        block_barrier();
        return place;
    }
};

// The first i of 0 … count - 1 with holds(i), else `count`. If holds(i), then holds(i + 1) too.
template <typename Holds>
INLINE int first_where(int count, Holds holds) {
    SHARED(int, first, 1);
    if (thread_index() == 0) *first = count;
    block_barrier();
    for (int i = thread_index(); i < count; i += BLOCK_THREADS) {
        if (holds(i) && (i == 0 || !holds(i - 1))) *first = i;
    }
    block_barrier();
    const int found = *first;
    block_barrier();
    return found;
}

// The tokens of one bin, sorted, in shared memory.
struct Bin {
    u64 *keys;     // [BIN_CAPACITY]
    u64 *weights;  // [BIN_CAPACITY + 1]: sum over the bin's tokens before each one
    int bin;

    // Loads and sorts a bin. False if it has more than BIN_CAPACITY tokens.
    INLINE bool take(const BinPlace &place, const SampleArgs &a, const Scale &scale) {
        if (place.count > BIN_CAPACITY) return false;
        if (bin == place.bin) return true;
        bin = place.bin;
        int size = 1;
        while (size < (int)place.count) size *= 2;
        for (int i = thread_index(); i < size; i += BLOCK_THREADS) {
            keys[i] = i < (int)place.count ? load_fresh_u64(a.keys + place.num_before + i) : 0;
        }
        block_barrier();
        sort(size);
        const int count = place.count, own = (count + BLOCK_THREADS - 1) / BLOCK_THREADS;
        const int first = thread_index() * own, end = min_of(first + own, count);
        u64 sum = 0, total;
        for (int i = first; i < end; i++) {
            weights[i] = weight_at(distance(i, scale));
            sum += weights[i];
        }
        u64 before = block_sum_before(sum, total);
        for (int i = first; i < end; i++) {
            const u64 weight = weights[i];
            weights[i] = before;
            before += weight;
        }
        if (thread_index() == 0) weights[count] = total;
        block_barrier();
        return true;
    }
    INLINE double distance(int i, const Scale &scale) const {
        return scale.distance(value_of_key(keys[i]));
    }
    // Bitonic sort, descending; `size` is a power of two.
    INLINE void sort(int size) {
        for (int run = 2; run <= size; run *= 2) {
            for (int step = run / 2; step; step /= 2) {
                for (int pair = thread_index(); pair < size / 2; pair += BLOCK_THREADS) {
                    const int i = 2 * pair - pair % step, j = i + step;
                    const u64 first = keys[i], second = keys[j];
                    if ((first < second) == !(i & run)) keys[i] = second, keys[j] = first;
                }
                block_barrier();
            }
        }
    }
};

// Bound of the difference between a sum of weights and the host's sum of probabilities.
INLINE u64 margin_of(u64 weight) {
    constexpr double Share = (VOCAB + 4096) * (1.0 / (1ull << 51));
    return VOCAB + 2 + (u64)((double)weight * Share);
}

struct TokenSearch {
    const SampleArgs &a;
    Scale scale;
    Bins bins;
    Bin bin;
    u64 num_kept, weight_kept;

    struct Token {
        u64 key, rank, weight_after;
    };

    // The token at which the running sum of weights passes `weight`. False: not known.
    INLINE bool find_token(u64 weight, Token &token) {
        const BinPlace place = bins.find([&](const BinPlace &each, u64 its_weight) {
            return each.weight_before <= weight && weight < each.weight_before + its_weight;
        });
        if (place.bin == NO_BIN || !bin.take(place, a, scale)) return false;
        const u64 inside = weight - place.weight_before;
        const int i = first_where(place.count, [&](int j) { return bin.weights[j + 1] > inside; });
        if (i == (int)place.count) return false;
        token.key = bin.keys[i];
        token.rank = place.num_before + i;
        token.weight_after = place.weight_before + bin.weights[i + 1];
        return true;
    }
    // Each filter keeps the first tokens of those that are left. False: its cut is not known.
    INLINE bool keep_top_k(u64 count) {
        if (count >= num_kept) return true;
        const BinPlace place = bins.find([&](const BinPlace &each, u64) {
            return each.num_before < count && count <= (u64)each.num_before + each.count;
        });
        num_kept = count;
        if (place.bin == NO_BIN) return true;  // keeps every token that has weight
        if (!bin.take(place, a, scale)) return false;
        weight_kept = place.weight_before + bin.weights[count - place.num_before];
        return true;
    }
    INLINE bool keep_top_p(double share) {
        if (share >= 1.0) return true;
        const u64 reached = (u64)(share * (double)weight_kept), margin = margin_of(weight_kept);
        Token last;
        if (!find_token(reached > margin ? reached - margin : 0, last)) return false;
        num_kept = last.rank + 1;
        weight_kept = last.weight_after;
        return weight_kept > reached + margin;
    }
    INLINE bool keep_min_p(double farthest) {
        constexpr double Far = 1e300;
        if (farthest >= Far) return true;
        if (farthest > 30.0) return false;  // too near the last bin
        const double margin = 1e-12 * (1.0 + farthest), high = farthest + margin;
        const double low = farthest > margin ? farthest - margin : 0.0;
        const int edge = bin_at(low);
        const BinPlace place =
            bins.find([&](const BinPlace &each, u64) { return each.bin == edge; });
        if (bin_at(high) != edge || !bin.take(place, a, scale)) return false;
        const auto num_within = [&](double limit) {
            return first_where(place.count, [&](int i) { return bin.distance(i, scale) > limit; });
        };
        const int count = num_within(low);
        if (count != num_within(high)) return false;
        if (place.num_before + count < num_kept) {
            num_kept = place.num_before + count;
            weight_kept = place.weight_before + bin.weights[count];
        }
        return true;
    }
    // The sampled token, or UNDECIDED.
    INLINE int sampled(double number, double top_k, double top_p, double farthest) {
        bins.take(a);
        num_kept = VOCAB;
        weight_kept = bins.total_weight;
        if (!keep_top_k((u64)top_k) || !keep_top_p(top_p) || !keep_min_p(farthest)) return UNDECIDED;
        const u64 reached = (u64)(number * (double)weight_kept), margin = margin_of(weight_kept);
        Token token;
        if (!find_token(reached > margin ? reached - margin : 0, token)) return UNDECIDED;
        const bool is_last = token.rank + 1 == num_kept;
        if (!is_last && token.weight_after <= reached + margin) return UNDECIDED;
        return (int)argmax_index(token.key);
    }
};
