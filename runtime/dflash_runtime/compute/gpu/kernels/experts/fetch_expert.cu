// fetch_expert: brings the expert that mailbox_post.cuh has decided on over the bus, from the host's
// memory, where its matrices lie as in the file, into its slot, in the device layout; then changes the
// tables of steps. Grid: any number of blocks: a few read as fast as the bus is.
//
// Parameters: HIDDEN, FFN; TYPE_GATE, TYPE_UP, TYPE_DOWN; CHUNK_BYTES of rows that a block reads at once, or
// one row if it is longer; THREADS.
#include "fetch_decision.cuh"
#include "repack.cuh"

struct FetchArgs {
    const u64 *places;    // [experts that the peer has, 3]: gate, up, down in the host's memory
    u8 *gate, *up, *down;  // of the first slot
    const FetchDecision *decision;
    const int *own_ids;   // [EXPERTS]: the peer's local ids, whatever is kept here
    int *local_ids;       // [EXPERTS]: the same, negative for what is kept
    int *slot_of_expert;  // [EXPERTS]
    int *pair_slots;      // [pairs]: of the first that needs it
    int first_slot;       // of those that follow what is chosen
};

template <int Type, int Columns>
INLINE void fetch_matrix(u64 place, u8 *first_slot, int slot, int num_rows, u8 *staged) {
    using Rows = Repacked<Type, Columns>;
    constexpr int Chunk = Rows::NATIVE_BYTES > CHUNK_BYTES ? 1 : CHUNK_BYTES / Rows::NATIVE_BYTES;
    u8 *out = first_slot + (i64)slot * num_rows * Rows::ROW_BYTES;
    for (int row = block_index_x() * Chunk; row < num_rows; row += num_blocks_x() * Chunk) {
        const int rows = min_of(Chunk, num_rows - row);
        const u64 begin = place + (u64)row * Rows::NATIVE_BYTES;
        const u64 first = begin / 16 * 16, end = begin + (u64)rows * Rows::NATIVE_BYTES;
        block_barrier();  // of the chunk before
        for (u64 at = first + 16 * thread_index(); at < end; at += 16 * THREADS) {
            *(uint4 *)(staged + (at - first)) = load_fresh16((const void *)at);
        }
        block_barrier();
        for (int i = thread_index(); i < rows * Rows::PIECES; i += THREADS) {
            const u8 *from = staged + (begin - first) + i / Rows::PIECES * Rows::NATIVE_BYTES;
            *(uint4 *)(out + (i64)row * Rows::ROW_BYTES + 16 * i) = Rows::piece(from, i % Rows::PIECES);
        }
    }
}

KERNEL(fetch_expert, FetchArgs, THREADS, 1) {
    DYNAMIC_SHARED(staged);
    let_next_begin();
    wait_for_previous();
    const int pair = (int)load_fresh4(&a.decision->pair);
    if (pair < 0) return;
    const int slot = (int)load_fresh4(&a.decision->slot);
    const int expert = (int)load_fresh4(&a.decision->expert);
    const int leaving = (int)load_fresh4(&a.decision->leaving);
    const u64 *places = a.places + 3 * (i64)(int)load_weights4(a.own_ids + expert);
    fetch_matrix<TYPE_GATE, HIDDEN>(places[0], a.gate, slot, FFN, staged);
    fetch_matrix<TYPE_UP, HIDDEN>(places[1], a.up, slot, FFN, staged);
    fetch_matrix<TYPE_DOWN, FFN>(places[2], a.down, slot, HIDDEN, staged);
    if (block_index_x() != 0 || thread_index() != 0) return;
    a.pair_slots[pair] = a.first_slot + slot;
    if (leaving == FETCH_NOT_KEPT) return;
    if (leaving >= 0) {
        a.slot_of_expert[leaving] = -1;
        a.local_ids[leaving] = (int)load_weights4(a.own_ids + leaving);
    }
    a.slot_of_expert[expert] = a.first_slot + slot;
    a.local_ids[expert] = -1;
}
