// Receives a layer's request in the daemon. experts_decode.cu then computes it and writes the reply.
//
//   mail_take   waits for the request and stores rows, ids, weights and slots for experts_gate_up
//   mail_relay  copies the request's lines from over the bus to this device's memory as they arrive, where
//               the blocks of experts_gate_up poll for them (mailbox_request.cuh): few blocks poll the bus
//
// Neither is needed if the lines already are in this device's memory. Grid TOKENS, THREADS threads; each
// block polls for an equal share of the lines.
// Parameters: TOKENS, TOP_K, EXPERTS, THREADS, MOST_PEERS, CHECK_FACTOR.
#include "mailbox.cuh"

constexpr int PAIRS = TOKENS * TOP_K;

struct MailTakeArgs {
    Mail mail;
    MailParts parts;        // written to
    const void *request;    // lines
    int *topk_ids;          // [PAIRS] local ids; negative: none
    float *topk_weights;    // [PAIRS]
    const int *slot_of_expert;  // [EXPERTS] by local id; negative: not resident
    int *pair_slots;        // [PAIRS]
};

INLINE void take_pair(const MailTakeArgs &a, const int *slots, int pair, uint4 line) {
    const AskedExpert asked(line);
    if (pair == 0) a.mail.state->rounds = asked.rounds;
    a.topk_ids[pair] = (int)asked.id;
    a.pair_slots[pair] = asked.id < (u32)EXPERTS ? slots[asked.id] : -1;
    a.topk_weights[pair] = bits_to_float(line.z);
}

KERNEL(mail_take, MailTakeArgs, THREADS, 1) {
    SHARED(int, slots, EXPERTS);  // loaded before the request arrives
    let_next_begin();
    for (int i = thread_index(); i < EXPERTS; i += THREADS) {
        slots[i] = (int)load_weights4(a.slot_of_expert + i);
    }
    wait_for_previous();
    block_barrier();
    const u32 epoch = a.mail.epoch();
    const u64 deadline = a.mail.deadline();
    const int num_lines = PAIRS + a.parts.num_lines();
    bool is_there = !a.mail.is_aborted();
    constexpr int All = TOKENS * THREADS, Step = LINES_AT_ONCE * All;
    const int index = block_index_x() * THREADS + thread_index();
    for (int first = index; is_there && first < num_lines; first += Step) {
        uint4 found[LINES_AT_ONCE];
        const int num = (num_lines - first + All - 1) / All;
        auto line = [&](int j) { return line_at(a.request, first + j * All); };
        auto parent = [](int) { return 0; };
        is_there = a.mail.receive(found, num, line, parent, epoch, deadline);
        if (!is_there) break;
#pragma unroll
        for (int j = 0; j < LINES_AT_ONCE; j++) {
            const int i = first + j * All;
            if (i < PAIRS) take_pair(a, slots, i, found[j]);
            else if (i < num_lines) a.parts.store(i - PAIRS, found[j].x, found[j].z);
        }
    }
    if (is_there) return;
    for (int pair = index; pair < PAIRS; pair += All) {
        a.topk_ids[pair] = a.pair_slots[pair] = -1;  // the step failed: nothing is computed
        a.topk_weights[pair] = 0.0f;
    }
}

struct MailRelayArgs {
    Mail mail;
    const void *request;  // lines, over the bus
    void *lines;          // the copy in this device's memory; a line is written as soon as it arrives
    int num_lines;
};

// The first warp of a block relays its token's pairs, ids before weights; the others relay rows.
KERNEL(mail_relay, MailRelayArgs, THREADS, 1) {
    static_assert(TOP_K <= LANES, "a warp has a token's pairs");
    wait_for_previous();
    let_next_begin();  // only after the wait: the next kernel writes memory that the last layer reads
    const u32 epoch = a.mail.epoch();
    const u64 deadline = a.mail.deadline();
    if (a.mail.is_aborted()) return;
    auto parent = [](int) { return 0; };
    if (warp_index() == 0) {
        const int pair = block_index_x() * TOP_K + lane_index();
        if (lane_index() >= TOP_K) return;
        uint4 found[1];
        auto line = [&](int) { return line_at(a.request, pair); };
        if (!a.mail.receive<true>(found, 1, line, parent, epoch, deadline)) return;
        u8 *to = line_at(a.lines, pair);
        store_half_line(to, found[0].x, found[0].y);
        if (!is_of_epoch(found[0].z, found[0].w, epoch) &&
            !a.mail.receive(found, 1, line, parent, epoch, deadline)) {
            return;
        }
        store_half_line(to + HALF_BYTES, found[0].z, found[0].w);
        return;
    }
    constexpr int Others = THREADS - LANES, All = TOKENS * Others, Step = LINES_AT_ONCE * All;
    int first = PAIRS + block_index_x() * Others + thread_index() - LANES;
    for (; first < a.num_lines; first += Step) {
        uint4 found[LINES_AT_ONCE];
        const int num = (a.num_lines - first + All - 1) / All;
        auto line = [&](int j) { return line_at(a.request, first + j * All); };
        if (!a.mail.receive(found, num, line, parent, epoch, deadline)) return;
#pragma unroll
        for (int j = 0; j < LINES_AT_ONCE; j++) {
            const int i = first + j * All;
            if (i < a.num_lines) store_line(line_at(a.lines, i), found[j]);
        }
    }
}
