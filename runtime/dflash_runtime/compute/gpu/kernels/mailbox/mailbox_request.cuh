// Receives a layer's request inside experts_gate_up: every block polls for the lines it needs, without a
// kernel before it. The lines must be in this device's memory; if they arrive over a bus, mail_relay copies
// them there first. A device that serves several parents uses mail_take instead, as polling blocks would
// occupy it.
//
// Parameters: TOKENS, TOP_K, EXPERTS, MOST_PEERS, CHECK_FACTOR.
#pragma once
#include "choices.cuh"
#include "mailbox.cuh"
#include "staging.cuh"

struct MailRequest {
    Mail mail;
    const void *lines;
    int is_relayed;  // not 0: the preceding kernel is mail_relay, which waits for all kernels before it
};

// The row of one token in a request: the places of its lines, and how they are stored to `Rows` (a Staged
// of one row). After the lines of the pairs come int8 bytes, their scales, and floats, each for all tokens.
// Padding is not read.
template <typename Rows, int Columns, bool AsBytes, bool AsFloats>
struct RequestRow {
    static_assert(Columns % (AsBytes ? 32 : 4) == 0, "rows of activations");
    static constexpr int QUANTS = AsBytes ? Columns / 8 : 0, META = AsBytes ? Columns / 16 : 0;
    static constexpr int FLOATS = AsFloats ? Columns / 2 : 0, LINES = QUANTS + META + FLOATS;
    static constexpr int ALL_QUANTS = AsBytes ? Rows::PADDED / 8 : 0;
    static constexpr int ALL_META = AsBytes ? Rows::GRANULES : 0;

    // Index in the request of a line of the token's row.
    INLINE static int place(int token, int line) {
        constexpr int Meta = TOKENS * (TOP_K + ALL_QUANTS), Floats = Meta + TOKENS * ALL_META;
        if (line < QUANTS) return TOKENS * TOP_K + token * ALL_QUANTS + line;
        if (line < QUANTS + META) return Meta + token * ALL_META + line - QUANTS;
        return Floats + token * FLOATS + line - QUANTS - META;
    }
    INLINE static void store(const Rows &to, int line, uint2 words) {
        void *at = to.values + 2 * (line - QUANTS - META);
        if (line < QUANTS) at = to.granule(0, line / 2) + line % 2 * 8;
        else if (line < QUANTS + META) at = to.meta + (line - QUANTS);
        *(uint2 *)at = words;
    }
    INLINE static void clear_padding(const Rows &to, int thread, int num_threads) {
        if constexpr (AsBytes) {
            for (int i = Columns / 16 + thread; i < Rows::GRANULES; i += num_threads) {
                *(uint4 *)to.granule(0, i) = make_uint4(0, 0, 0, 0);
                to.meta[i] = make_float2(0.0f, 0.0f);
            }
        }
        if constexpr (AsFloats) {
            for (int i = Columns + thread; i < Rows::PADDED; i += num_threads) to.values[i] = 0.0f;
        }
    }
};

// Receives one warp's share of a row, divided among NumWarps warps. Lines arrive at about the same time:
// until the last line of the share is there, all lanes poll that line only, which is one access.
template <typename Row, int NumWarps, typename Rows>
INLINE bool receive_row(const MailRequest &from, const Rows &to, int token, int warp, bool polls_far,
                        u32 epoch, u64 deadline) {
    constexpr int Share = padded_to((Row::LINES + NumWarps - 1) / NumWarps, 8);
    constexpr int Each = (Share + LANES - 1) / LANES;
    constexpr int AtOnce = Each < LINES_AT_ONCE ? Each : LINES_AT_ONCE;
    const int end = min_of((warp + 1) * Share, Row::LINES);
    if (warp * Share >= end) return true;
    auto parent = [](int) { return 0; };
    auto last = [&](int) { return line_at(from.lines, Row::place(token, end - 1)); };
    uint4 first_seen[1];
    if (!from.mail.receive(first_seen, 1, last, parent, epoch, deadline, false, polls_far)) {
        return false;
    }
    for (int first = warp * Share + lane_index(); first < end; first += AtOnce * LANES) {
        uint4 found[AtOnce];
        const int num = (end - first + LANES - 1) / LANES;
        auto line = [&](int j) {
            return line_at(from.lines, Row::place(token, first + j * LANES));
        };
        if (!from.mail.receive(found, num, line, parent, epoch, deadline, false, polls_far)) {
            return false;
        }
#pragma unroll
        for (int j = 0; j < AtOnce; j++) {
            if (j < num) Row::store(to, first + j * LANES, make_uint2(found[j].x, found[j].z));
        }
    }
    return true;
}

// Stages the row of a pair's token and finds its expert's slot, as begin_pair in experts_decode.cu does.
// The block of tile 0 writes the choice but not the weight, which may arrive later. All threads call; the
// function ends with a barrier. If lines do not arrive, the step has failed: slots are -1.
template <typename Row, int Threads, typename Rows>
INLINE ChosenPair take_request(const MailRequest &from, const Choices &to, const Rows &x, int pair,
                              int tile) {
    SHARED(int, slots, EXPERTS);  // loaded before the pair arrives
    SHARED(int, taken, 3);        // expert, slot, whether the step has failed
    constexpr int NumWarps = Threads / LANES, First = NumWarps == 1 ? 0 : 1;
    for (int i = thread_index(); i < EXPERTS; i += Threads) {
        slots[i] = (int)load_weights4(to.slot_of_expert + i);
    }
    if (thread_index() == 0) taken[2] = 0;
    Row::clear_padding(x, thread_index(), Threads);
    if (from.is_relayed) previous_has_waited();
    else wait_for_previous();
    block_barrier();
    const Mail &mail = from.mail;
    const u32 epoch = mail.epoch();
    const u64 deadline = mail.deadline();
    // The blocks of tile 0 poll the abort words in host memory, so that the others need not.
    const bool polls_far = tile == 0;
    bool is_there = !mail.is_aborted();
    const int warp = warp_index();
    // Rows are sent before the choice is known, so they have mostly arrived before the expert's id.
    if (is_there && warp >= First) {
        is_there = receive_row<Row, NumWarps - First>(from, x, pair / TOP_K, warp - First, polls_far,
                                                      epoch, deadline);
    }
    if (warp == 0) {
        uint4 found[1];
        auto line = [&](int) { return line_at(from.lines, pair); };
        auto parent = [](int) { return 0; };
        if (is_there) {
            is_there = mail.receive<true>(found, 1, line, parent, epoch, deadline, false, polls_far);
        }
        if (is_there && lane_index() == 0) {
            const AskedExpert asked(found[0]);
            taken[0] = (int)asked.id;
            taken[1] = asked.id < (u32)EXPERTS ? to.within(slots[asked.id]) : -1;
            if (tile == 0) {
                if (pair == 0) mail.state->rounds = asked.rounds;
                to.topk_ids[pair] = taken[0], to.pair_slots[pair] = taken[1];
                to.count(taken[0]);
            }
        }
        let_next_begin();  // only now, so that experts_down usually finds the slots
    }
    if (!is_there) taken[2] = 1;
    block_barrier();
    if (!taken[2]) return {taken[0], taken[1]};
    if (tile == 0 && thread_index() == 0) {  // nothing is computed
        to.topk_ids[pair] = to.pair_slots[pair] = -1;
    }
    return {-1, -1};
}

// Waits for a pair's weight and stores it for experts_down. Called by one thread.
INLINE void await_weight(const MailRequest &from, const Choices &to, int pair) {
    const Mail &mail = from.mail;
    uint4 found[1];
    auto line = [&](int) { return line_at(from.lines, pair); };
    auto parent = [](int) { return 0; };
    const bool is_there =
        !mail.is_aborted() && mail.receive(found, 1, line, parent, mail.epoch(), mail.deadline());
    to.topk_weights[pair] = is_there ? bits_to_float(found[0].z) : 0.0f;
}
// The same, given the line as it was when the expert's id arrived; the weight is usually there already.
INLINE void take_weight(const MailRequest &from, const Choices &to, int pair, uint4 seen) {
    const u32 epoch = check_of(seen.y, seen.x);  // recovers the epoch of the id's check
    if (is_of_epoch(seen.z, seen.w, epoch)) to.topk_weights[pair] = bits_to_float(seen.z);
    else await_weight(from, to, pair);
}
