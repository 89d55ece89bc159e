// The routed experts of a step of TOKENS tokens with TOP_K experts each: P = TOKENS * TOP_K pairs.
//
//   experts_gate_up  gate and up projections and the activation of each pair. Grid P * tiles of FFN rows.
//                    Takes the choice of experts from memory, from router logits (ROUTE) or from a
//                    mailbox (MAIL); writes the pairs' slots for experts_down. With POST its first blocks,
//                    one for each peer, ask peers for their pairs. With FETCHED it does the pairs whose
//                    expert was fetched, if one was. Grid TOKENS * tiles of FFN rows
//   experts_down     down projections, weighted and added over a token's experts. Grid TOKENS * tiles of
//                    HIDDEN rows. Writes float64 sums (SUMS), or adds the rounded sums to the residual
//
// Pairs whose expert is not resident (slot -1) are skipped. A pair's term depends only on its own row,
// weight and expert; terms are added in float64 in the order of the choice, and rounded once.

// Parameters: HIDDEN, FFN, EXPERTS, TOP_K, TOKENS, MOST_PEERS; TYPE_GATE, TYPE_UP, TYPE_DOWN; VECTORS: experts
// have biases or scales; SUMS; ROUTE, with NORMALISE and GATE of route.cuh; MAIL: the choice and the rows
// come from a mailbox's request in this device's memory; POST; FETCHED; CHECK_FACTOR.
// Tuning, GATE_UP_ or DOWN_: WARPS, TEAM lanes per row, MOST_DEEP units per lane in flight, MIN_BLOCKS;
// GATE_UP_ROWS per team at once; DOWN_TILE rows per block, DOWN_GROUP items in flight.
#include "activation.cuh"
#include "choices.cuh"
#include "mailbox_post.cuh"
#include "mailbox_request.cuh"
#include "products.cuh"
#include "reduce.cuh"

// One projection: weights of the resident experts by slot; biases and scales of all experts by id.
struct Projection {
    const u8 *weights;   // [slots, rows, row bytes]
    const float *bias;   // null, or [EXPERTS, rows]
    const float *scale;  // null, or [EXPERTS]
};

constexpr int PAIRS = TOKENS * TOP_K;
static_assert(!MAIL || (SUMS && !ROUTE), "what is asked for is chosen, and answered with sums");
static_assert(!MAIL || !POST, "a daemon asks no peers");
static_assert(!FETCHED || (!MAIL && !POST && !ROUTE), "what is fetched is chosen");

// Applies the expert's scale and bias to the product of a row.
INLINE float projected(const Projection &of, int expert, int rows, int row, float product) {
    if constexpr (VECTORS) {
        float scale = 1.0f, bias = 0.0f;
        if (of.scale) scale = bits_to_float(load_weights4(of.scale + expert));
        if (of.bias) bias = bits_to_float(load_weights4(of.bias + (i64)expert * rows + row));
        return fmaf(product, scale, bias);
    }
    return product;
}

// -- gate and up ------------------------------------------------------------------------------

struct GateUpArgs {
    Projection gate, up;
    Choices choices;
    const i8 *quants;           // [T, padded], if a type is quantised
    const float2 *meta;         // [T, padded / 16]
    const float *x;             // [T, HIDDEN], if a type is not
    i8 *h_quants;               // [P, padded], if TYPE_DOWN is quantised
    float2 *h_meta;             // [P, padded / 16]
    float *h;                   // [P, FFN], if it is not
    ActivationArgs form;
    MailRequest request;        // if MAIL: the source of rows, ids and weights
    MailPost post;              // if POST: what peers are asked for
    int num_posts;              // peers, if POST
    const FetchDecision *fetched;  // if FETCHED
};

constexpr int GATE_UP_THREADS = GATE_UP_WARPS * LANES;
constexpr bool X_FLOATS = IsFloat<TYPE_GATE>::VALUE || IsFloat<TYPE_UP>::VALUE;
constexpr bool X_BYTES = !IsFloat<TYPE_GATE>::VALUE || !IsFloat<TYPE_UP>::VALUE;
constexpr int GATE_UP_TEAMS = GATE_UP_THREADS / GATE_UP_TEAM;
constexpr int GATE_UP_TILE = GATE_UP_TEAMS * GATE_UP_ROWS;
static_assert(GATE_UP_TILE % 16 == 0, "a tile is whole granules of the activations");

// Writes one tile of a pair's activations, from `values` [GATE_UP_TILE] or zeros (null), as floats or
// int8, as the down projection reads them. All threads call.
INLINE void write_hidden(const GateUpArgs &a, int pair, int tile, const float *values) {
    using HiddenRows = Staged<1, FFN, true, false>;
    for (int base = 0; base < GATE_UP_TILE; base += GATE_UP_THREADS) {
        if (base + warp_index() * LANES >= GATE_UP_TILE) break;  // a whole warp
        const int i = base + thread_index(), element = tile * GATE_UP_TILE + i;
        const bool is_real = i < GATE_UP_TILE && element < FFN;
        const float value = is_real && values ? values[i] : 0.0f;
        if constexpr (IsFloat<TYPE_DOWN>::VALUE) {
            if (is_real) a.h[(i64)pair * FFN + element] = value;
        } else {
            float2 meta;
            const i8 byte = quantise1(value, meta);
            if (i >= GATE_UP_TILE || element >= HiddenRows::PADDED) continue;
            a.h_quants[(i64)pair * HiddenRows::PADDED + element] = byte;
            if (element % 16 == 0) {
                a.h_meta[(i64)pair * HiddenRows::GRANULES + element / 16] = meta;
            }
        }
    }
}

using GateUpRows = Staged<1, HIDDEN, X_BYTES, X_FLOATS>;

// A token's pair whose expert was fetched for pair `first`; negative: it did not choose that.
INLINE int fetched_pair(const GateUpArgs &a, int token, int first) {
    const u32 expert = load_fresh4(a.choices.topk_ids + first);
    int pair = -1;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
        if (load_fresh4(a.choices.topk_ids + token * TOP_K + k) == expert) pair = token * TOP_K + k;
    }
    return pair;
}

// Stages the row of a pair's token and finds its expert's slot, that of pair `first` if it was fetched for
// that. The block of tile 0 writes the choice. All threads call; the function ends with a barrier.
INLINE ChosenPair begin_pair(const GateUpArgs &a, const GateUpRows &x, int pair, int tile, int first) {
    SHARED(int, chosen, 2);  // expert, slot
    const i64 token = pair / TOP_K;
    const bool chooses = warp_index() == 0;
    [[maybe_unused]] Chooser chooser;
    if (ROUTE && chooses) chooser.before_wait(a.choices);
    wait_for_previous();
    if (chooses) {
        if constexpr (ROUTE) {
            const float *logits = a.choices.logits + token * EXPERTS;
            chooser.router.load([&](int e) { return bits_to_float(load_fresh4(logits + e)); });
            int last = -1, expert = -1, slot = -1;  // the latest choice that fell to this lane
            chooser.router.choose(pair % TOP_K + 1, [&](int k, int j) {
                last = k, expert = chooser.router.expert(j), slot = chooser.slots[j];
            });
            if (last == pair % TOP_K) {
                chosen[0] = expert, chosen[1] = slot;
                if (tile == 0) {
                    a.choices.pair_slots[pair] = slot, a.choices.topk_ids[pair] = expert;
                    a.choices.count(expert);
                }
            }
            if (tile == 0 && pair % TOP_K == TOP_K - 1) {  // this block made all choices of its token
                const float weight = chooser.router.weight();
                if (lane_index() < TOP_K) {
                    a.choices.topk_weights[token * TOP_K + lane_index()] = weight;
                }
            }
        } else if (lane_index() == 0) {
            chosen[0] = (int)load_fresh4(a.choices.topk_ids + pair);
            if (a.choices.has_slots()) chosen[1] = a.choices.slot_at(first);
            else chosen[1] = a.choices.slot_of((u32)chosen[0]);
            if (tile == 0) {
                if (!a.choices.has_slots() || pair != first) a.choices.pair_slots[pair] = chosen[1];
                a.choices.count(chosen[0]);
            }
        }
        let_next_begin();  // only now, so that experts_down usually finds the slots
    }
    if (GATE_UP_WARPS == 1 || !chooses) {  // the other warps stage rows meanwhile
        constexpr int First = GATE_UP_WARPS == 1 ? 0 : LANES;
        if constexpr (X_BYTES) {
            stage_bytes<1, HIDDEN, GATE_UP_THREADS, First>(x, a.quants + token * GateUpRows::PADDED,
                                                           a.meta + token * GateUpRows::GRANULES);
        }
        if constexpr (X_FLOATS) {
            stage_floats<1, HIDDEN, GATE_UP_THREADS, First>(x, a.x + token * HIDDEN);
        }
    }
    block_barrier();
    return {chosen[0], chosen[1]};
}

// The same for a request in a mailbox.
INLINE ChosenPair take_pair(const GateUpArgs &a, const GateUpRows &x, int pair, int tile) {
    using Row = RequestRow<GateUpRows, HIDDEN, X_BYTES, X_FLOATS>;
    return take_request<Row, GATE_UP_THREADS>(a.request, a.choices, x, pair, tile);
}

// Blocks of the same tile are neighbours: pairs that share an expert read its rows at about the same time.
KERNEL(experts_gate_up, GateUpArgs, GATE_UP_THREADS, GATE_UP_MIN_BLOCKS) {
    using Gate = RowProducts<TYPE_GATE, HIDDEN, GATE_UP_ROWS, GATE_UP_TEAM, GATE_UP_MOST_DEEP>;
    using Up = RowProducts<TYPE_UP, HIDDEN, GATE_UP_ROWS, GATE_UP_TEAM, GATE_UP_MOST_DEEP>;
    using Sums = TeamSums<GATE_UP_ROWS, GATE_UP_TEAM>;
    DYNAMIC_SHARED(shared);
    SHARED(float, hidden, GATE_UP_TILE);
    int block = block_index_x();
    if constexpr (POST) {
        if (block < a.num_posts) {
            post_request<GATE_UP_THREADS>(a.post, block, false);
            return;
        }
        block -= a.num_posts;
    }
    int pair = block % PAIRS, tile = block / PAIRS, first = pair;
    if constexpr (FETCHED) {
        wait_for_previous();
        pair = first = (int)load_fresh4(&a.fetched->pair), tile = block / TOKENS;
        if (first < 0) return;
        if (TOKENS > 1) pair = fetched_pair(a, block % TOKENS, first);
        if (pair < 0) return;
    }
    const GateUpRows x(shared);
    const ChosenPair chosen = MAIL ? take_pair(a, x, pair, tile) : begin_pair(a, x, pair, tile, first);
    const int expert = chosen.expert, slot = chosen.slot;
    const bool takes_weight = MAIL && tile == 0 && thread_index() == 0;
    if (slot < 0) {
        if (MAIL) wait_for_previous();
        if (takes_weight) await_weight(a.request, a.choices, pair);
        write_hidden(a, pair, tile, nullptr);
        return;
    }
    const int team = thread_index() / GATE_UP_TEAM, place = thread_index() % GATE_UP_TEAM;
    const int first_row = tile * GATE_UP_TILE + team * GATE_UP_ROWS;
    const u8 *gate_rows[GATE_UP_ROWS], *up_rows[GATE_UP_ROWS];
#pragma unroll
    for (int r = 0; r < GATE_UP_ROWS; r++) {
        const i64 row = (i64)slot * FFN + min_of(first_row + r, FFN - 1);
        gate_rows[r] = a.gate.weights + row * Gate::Product::ROW_BYTES;
        up_rows[r] = a.up.weights + row * Up::Product::ROW_BYTES;
    }
    Gate gate;
    Up up;
    gate.load(gate_rows, place);
    up.load(up_rows, place);
    uint4 asked = make_uint4(0, 0, 0, 0);
    if (takes_weight) asked = load_line(line_at(a.request.lines, pair));  // needed only at the end
    Sums gates, ups;
    gates.clear();
    ups.clear();
    gate.template add<1>(gates.values, gate_rows, x, 0, place);
    up.template add<1>(ups.values, up_rows, x, 0, place);
#pragma unroll
    for (int c = 0; c < Sums::CHUNKS; c++) {
        float g = gates.sum(c), u = ups.sum(c);
        const int row = first_row + Sums::index(c);
        if (!Sums::is_writer(c) || row >= FFN) continue;
        g = projected(a.gate, expert, FFN, row, g);
        u = projected(a.up, expert, FFN, row, u);
        hidden[row - tile * GATE_UP_TILE] = activate(a.form, g, u);
    }
    if (MAIL) wait_for_previous();  // so that later kernels also run after those before this one
    if (takes_weight) take_weight(a.request, a.choices, pair, asked);
    block_barrier();
    write_hidden(a, pair, tile, hidden);
}

// -- down -------------------------------------------------------------------------------------

struct DownArgs {
    Projection down;
    Choices choices;             // ids, weights and slots, written by experts_gate_up
    const i8 *h_quants;          // as GateUpArgs
    const float2 *h_meta;
    const float *h;
    float *residual;             // [T, HIDDEN], added to unless SUMS
    double *sums;                // [T, HIDDEN], if SUMS
    void *reply;                 // null, or lines of a mailbox: sums go there, one per line, or rounded
                                 // sums, two per line, if `mail` says so
    const MailState *mail;       // state of the step, if there is a reply
    MailReplies replies;         // unless SUMS: peers' sums, if any, are added to the local ones
};

constexpr int DOWN_THREADS = DOWN_WARPS * LANES;
constexpr bool H_FLOATS = IsFloat<TYPE_DOWN>::VALUE;
constexpr int DOWN_TEAMS = DOWN_THREADS / DOWN_TEAM, DOWN_ITEMS = DOWN_TILE * TOP_K;
constexpr int ITEMS_A_TEAM = (DOWN_ITEMS + DOWN_TEAMS - 1) / DOWN_TEAMS;
static_assert(DOWN_TILE <= DOWN_THREADS, "a thread adds each row's terms");
static_assert(TOP_K <= DOWN_THREADS, "a thread brings each weight");

using DownRows = Staged<TOP_K, FFN, !H_FLOATS, H_FLOATS>;

// One row of one of the token's experts, multiplied by one team of lanes.
struct DownItem {
    RowProducts<TYPE_DOWN, FFN, 1, DOWN_TEAM, DOWN_MOST_DEEP> products;
    const u8 *row[1];
    int slot;  // -1: none, or not resident

    INLINE static bool exists(int item) { return item < DOWN_ITEMS; }
    // Neighbouring teams take neighbouring rows of the same expert.
    INLINE static int choice(int item) { return item / DOWN_TILE; }
    INLINE static int row_of(int item, int tile) {
        return min_of(tile * DOWN_TILE + item % DOWN_TILE, HIDDEN - 1);
    }
    // The index of an item's pair.
    INLINE static int pair(int token, int item) {
        return token * TOP_K + min_of(choice(item), TOP_K - 1);
    }
    INLINE void load(const DownArgs &a, int of_slot, int tile, int item, int place) {
        slot = exists(item) ? of_slot : -1;
        if (slot < 0) return;
        const i64 index = (i64)slot * HIDDEN + row_of(item, tile);
        row[0] = a.down.weights + index * decltype(products)::Product::ROW_BYTES;
        products.load(row, place);
    }
    // The pair's term for this row, in the team's first lane. All lanes of the warp call.
    INLINE float term(const DownArgs &a, const float *weights, const DownRows &h, int token,
                      int tile, int item, int place) {
        TeamSums<1, DOWN_TEAM> sums;
        sums.clear();
        if (slot >= 0) products.template add<1>(sums.values, row, h, choice(item), place);
        float sum = sums.sum(0);
        if (slot < 0) return 0.0f;
        if constexpr (VECTORS) {
            const int expert = (int)load_fresh4(a.choices.topk_ids + pair(token, item));
            sum = projected(a.down, expert, HIDDEN, row_of(item, tile), sum);
        }
        return weights[choice(item)] * sum;
    }
};

// Blocks of the same tile are neighbours: tokens that share an expert read its rows at about the same time.
KERNEL(experts_down, DownArgs, DOWN_THREADS, DOWN_MIN_BLOCKS) {
    DYNAMIC_SHARED(shared);
    SHARED(float, terms, DOWN_ITEMS);
    SHARED(float, weights, TOP_K);
    const int token = block_index_x() % TOKENS, tile = block_index_x() / TOKENS;
    const int team = thread_index() / DOWN_TEAM, place = thread_index() % DOWN_TEAM;
    const int row = tile * DOWN_TILE + thread_index();
    const bool adds = thread_index() < DOWN_TILE && row < HIDDEN;
    let_next_begin();
    // experts_gate_up writes the slots long before it ends, so weights are prefetched by slots that are
    // read before the wait. These may still be those of an earlier layer: they are compared with the
    // slots read after the wait, and weights are loaded again where they differ.
    DownItem items[DOWN_GROUP];
#pragma unroll
    for (int i = 0; i < DOWN_GROUP; i++) {
        const int item = i * DOWN_TEAMS + team;
        const int guess = (int)load_early4(a.choices.pair_slots + DownItem::pair(token, item));
        items[i].load(a, a.choices.within(guess), tile, item, place);
    }
    wait_for_previous();
    int slots[DOWN_GROUP];
#pragma unroll
    for (int i = 0; i < DOWN_GROUP; i++) {
        const int pair = DownItem::pair(token, i * DOWN_TEAMS + team);
        slots[i] = a.choices.within((int)load_fresh4(a.choices.pair_slots + pair));
    }
    float before = 0.0f, weight = 0.0f;
    if (!SUMS && adds) {
        before = bits_to_float(load_fresh4(a.residual + (i64)token * HIDDEN + row));
    }
    u32 epoch = 0;  // of the reply that is written, or of those that are read; 0: there is none
    [[maybe_unused]] u32 waited = 0;
    [[maybe_unused]] u64 deadline = 0;
    [[maybe_unused]] bool rounds = false;
    if (SUMS && adds && a.reply && !load_word(&a.mail->aborted)) {
        epoch = load_fresh4(&a.mail->epoch), rounds = load_fresh4(&a.mail->rounds);
    }
    if (!SUMS && adds && a.replies.num_replies) {
        waited = a.replies.waited();
        epoch = a.replies.mail.epoch(), deadline = a.replies.mail.deadline();
    }
    if (thread_index() < TOP_K) {
        weight = bits_to_float(load_fresh4(a.choices.topk_weights + token * TOP_K + thread_index()));
    }
    const DownRows h(shared);
    const i64 first_pair = (i64)token * TOP_K;
    if constexpr (H_FLOATS) {
        stage_floats<TOP_K, FFN, DOWN_THREADS>(h, a.h + first_pair * FFN);
    } else {
        stage_bytes<TOP_K, FFN, DOWN_THREADS>(h, a.h_quants + first_pair * DownRows::PADDED,
                                              a.h_meta + first_pair * DownRows::GRANULES);
    }
    if (thread_index() < TOP_K) weights[thread_index()] = weight;
    block_barrier();
    for (int begin = 0; begin < ITEMS_A_TEAM; begin += DOWN_GROUP) {
#pragma unroll
        for (int i = 0; i < DOWN_GROUP; i++) {
            const int item = (begin + i) * DOWN_TEAMS + team;
            if (begin) {
                slots[i] = a.choices.within(
                    (int)load_fresh4(a.choices.pair_slots + DownItem::pair(token, item)));
            }
            if (begin || (DownItem::exists(item) && slots[i] != items[i].slot)) {
                items[i].load(a, slots[i], tile, item, place);
            }
        }
#pragma unroll
        for (int i = 0; i < DOWN_GROUP; i++) {
            const int item = (begin + i) * DOWN_TEAMS + team;
            const float term = items[i].term(a, weights, h, token, tile, item, place);
            if (place == 0 && DownItem::exists(item)) terms[item] = term;
        }
    }
    block_barrier();
    if (!adds) return;
    double total = 0.0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) total += (double)terms[k * DOWN_TILE + thread_index()];
    const i64 place_out = (i64)token * HIDDEN + row;
    if constexpr (!SUMS) {
        if (waited) {
            double others = 0.0;
            if (!a.replies.add(place_out, waited, epoch, deadline, others)) return;
            total += others;
        }
        a.residual[place_out] = before + (float)total;
    } else if (!a.reply) {
        a.sums[place_out] = total;
    } else if (epoch && rounds) {
        send_half((u8 *)a.reply + HALF_BYTES * place_out, rounded_epoch(epoch),
                  float_to_bits((float)total));
    } else if (epoch) {
        DoubleWords sum;
        sum.value = total;
        send_line(line_at(a.reply, place_out), epoch, sum.words[0], sum.words[1]);
    }
}
