// The experts chosen in a step and their slots, as arguments of the kernels in experts_decode.cu. A slot is
// the index of a resident expert in this device's arrays of weights.
//
// Parameters: EXPERTS, TOP_K; NORMALISE and GATE: see route.cuh.
#pragma once
#include "route.cuh"

struct Choices {
    const int *slot_of_expert;  // [EXPERTS], negative: not resident; or null: pair_slots is given
    const float *logits;        // [T, EXPERTS], if ROUTE: the kernel writes the next two
    int *topk_ids;              // [T, TOP_K]; negative: none
    float *topk_weights;        // [T, TOP_K]
    int *pair_slots;            // [T, TOP_K]: written by experts_gate_up, read by experts_down
    u32 *selections;            // null, or [EXPERTS]: incremented for each expert that was chosen
    int num_slots;

    INLINE void count(int expert) const {
        if (selections && (u32)expert < (u32)EXPERTS) atomic_add(selections + expert, 1);
    }
    INLINE int within(int slot) const { return slot < num_slots ? slot : -1; }
    INLINE bool has_slots() const { return !slot_of_expert; }
    // A pair's slot where has_slots(), or -1.
    INLINE int slot_at(i64 pair) const { return within((int)load_fresh4(pair_slots + pair)); }
    // An expert's slot, or -1.
    INLINE int slot_of(u32 expert) const {
        if (expert >= (u32)EXPERTS) return -1;
        return within((int)load_weights4(slot_of_expert + expert));
    }
};

struct ChosenPair {
    int expert, slot;  // negative: no expert; not resident
};

// Routing by one warp. Slots are loaded before the choice is known, while the router's logits are computed.
struct Chooser {
    using Choice = Router<EXPERTS, TOP_K, NORMALISE != 0, (Gate)GATE>;
    Choice router;
    int slots[Choice::EACH];

    INLINE void before_wait(const Choices &of) {
#pragma unroll
        for (int j = 0; j < Choice::EACH; j++) {
            slots[j] = Choice::expert(j) < EXPERTS ? of.slot_of((u32)Choice::expert(j)) : -1;
        }
    }
};
