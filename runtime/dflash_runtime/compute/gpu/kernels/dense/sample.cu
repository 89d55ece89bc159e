// Samples the next token from a step's logits as the host does (engine/sampling.py): the same random
// number gives the same token, or UNDECIDED where rounding could change the result. In this order:
//
//   sample_change in a ruled step: changes the logits of some tokens. One block
//   sample_mask   in a ruled step: tokens that may not come get the least logit, and `partials` the keys
//                 of the others. As many blocks as partials, or fewer
//   sample_weigh  counts the tokens of each bin and sums their weights. Any number of blocks
//   sample_place  sorts tokens by bin. Any number of blocks
//   sample_token  finds the token, by sorting only the few bins in which a filter cuts or the number
//                 falls. One block. Writes the token's id, position and history
//
// With temperature 0 the next two do nothing and the last takes the argmax. Parameters: VOCAB; WARPS;
// BIN_CAPACITY: a bin with more tokens makes the result UNDECIDED.
#include "sample_search.cuh"

// Infinite logits end a text. A token that may not come gets the least one, which weighs nothing.
constexpr float LARGEST = 3.402823466e38f;

KERNEL(sample_change, SampleArgs, BLOCK_THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    if (load_fresh_double(a.options + IS_RULED) == 0.0) return;
    const int given = (int)load_fresh4(a.num_changes), count = given < a.most_changes ? given : a.most_changes;
    for (int i = thread_index(); i < count; i += num_threads()) {
        const u32 token = load_fresh4(a.changed_ids + i);
        if (token >= (u32)VOCAB) continue;
        const float logit = bits_to_float(load_fresh4(a.logits + token));
        if (logit - logit != 0.0f) continue;  // not finite: it ends the text
        const float divisor = bits_to_float(load_fresh4(a.divisors + i));
        const float quotient = logit / (logit > 0.0f ? divisor : 1.0f / divisor);
        const float moved = quotient - bits_to_float(load_fresh4(a.offsets + i));
        a.logits[token] = moved < -LARGEST ? -LARGEST : moved > LARGEST ? LARGEST : moved;
    }
}

KERNEL(sample_mask, SampleArgs, BLOCK_THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    if (load_fresh_double(a.options + IS_RULED) == 0.0) return;
    u64 best = 0;
    each_four(a.logits, [&](const float(&four)[4], int token) {
        const u32 allowed = load_fresh4(a.mask + token / 32) >> token % 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (token + i >= VOCAB) break;
            const u64 key = argmax_key(four[i], (u32)(token + i));
            if (allowed >> i & 1) {
                best = larger_key(best, key);
            } else {
                if (!is_finite_key(key)) best = larger_key(best, key);
                a.logits[token + i] = -LARGEST;
            }
        }
    });
    best = block_largest(best);
    if (thread_index() == 0) a.partials[block_index_x()] = best;
    if (block_index_x() != 0) return;
    for (int i = num_blocks_x() + thread_index(); i < a.num_partials; i += num_threads()) a.partials[i] = 0;
}

KERNEL(sample_weigh, SampleArgs, BLOCK_THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    Scale scale = {load_fresh_double(a.options + INVERSE_TEMPERATURE), 0.0f};
    if (scale.inverse_temperature == 0.0) return;
    scale.peak = value_of_key(best_key(a));
    if (!scale.is_good()) return;
    each_four(a.logits, [&](const float(&four)[4], int) {
        int bins[4];
        u64 weights[4];
        u32 before[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const double distance = scale.distance(four[i]);
            bins[i] = bin_at(distance);
            weights[i] = bins[i] == NO_BIN ? 0 : weight_at(distance);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {  // independent of each other, so that they overlap
            if (bins[i] == NO_BIN) continue;
            before[i] = atomic_add(a.weights + 2 * bins[i], (u32)weights[i]);
            atomic_add(a.counts + bins[i], 1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (bins[i] == NO_BIN) continue;
            const u32 low = (u32)weights[i], carry = before[i] + low < low;
            const u32 high = (u32)(weights[i] >> 32) + carry;
            if (high) atomic_add(a.weights + 2 * bins[i] + 1, high);
        }
    });
}

KERNEL(sample_place, SampleArgs, BLOCK_THREADS, 1) {
    SHARED(u32, begins, BINS);
    let_next_begin();
    wait_for_previous();
    Scale scale = {load_fresh_double(a.options + INVERSE_TEMPERATURE), 0.0f};
    if (scale.inverse_temperature == 0.0) return;
    scale.peak = value_of_key(best_key(a));
    if (!scale.is_good()) return;
    u32 counts[EACH], count = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        counts[j] = Bins::bin(j) < BINS ? load_fresh4(a.counts + Bins::bin(j)) : 0;
        count += counts[j];
    }
    u64 total, begin = block_sum_before(count, total);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        if (Bins::bin(j) < BINS) begins[Bins::bin(j)] = (u32)begin;
        begin += counts[j];
    }
    block_barrier();
    each_four(a.logits, [&](const float(&four)[4], int token) {
        int bins[4];
        u32 places[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bins[i] = bin_at(scale.distance(four[i]));
            if (bins[i] != NO_BIN) places[i] = atomic_add(a.placed + bins[i], 1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (bins[i] == NO_BIN) continue;
            a.keys[begins[bins[i]] + places[i]] = argmax_key(four[i], (u32)(token + i));
        }
    });
}

KERNEL(sample_token, SampleArgs, BLOCK_THREADS, 1) {
    SHARED(u64, keys, BIN_CAPACITY);
    SHARED(u64, weights, BIN_CAPACITY + 1);
    let_next_begin();
    wait_for_previous();
    const u64 best = best_key(a);
    const int next = (int)load_fresh4(a.positions) + 1;
    const bool is_inside = next >= 0 && next < a.capacity;
    int token = (int)argmax_index(best), said = is_finite_key(best) ? token : NOT_FINITE;
    const double inverse_temperature = load_fresh_double(a.options + INVERSE_TEMPERATURE);
    if (inverse_temperature != 0.0 && said != NOT_FINITE) {
        const Scale scale = {inverse_temperature, value_of_key(best)};
        said = UNDECIDED;
        if (scale.is_good()) {
            TokenSearch search = {a, scale, {}, {keys, weights, NO_BIN}, 0, 0};
            said = search.sampled(is_inside ? load_fresh_double(a.numbers + next) : 0.0,
                              load_fresh_double(a.options + TOP_K),
                              load_fresh_double(a.options + TOP_P),
                              load_fresh_double(a.options + MIN_P_DISTANCE));
        }
        if (said != UNDECIDED) token = said;
    }
    if (thread_index() != 0) return;
    *a.token_ids = token;
    *a.positions = next;
    if (is_inside) a.history[next] = said;
}
