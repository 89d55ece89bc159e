// The experts that a step has chosen, and their slots, as arguments of the experts' kernels.
//
// EXPERTS, TOP_K; NORMALISE and GATE: see route.cuh.
#pragma once
#include "route.cuh"

// A step's choice.
struct Choices {
    const int *slot_of_expert;  // [EXPERTS]; or null: pair_slots are known already
    const float *logits;        // [T, EXPERTS], if ROUTE: the next two are written then
    int *topk_ids;              // [T, TOP_K]; negative: none
    float *topk_weights;        // [T, TOP_K]
    int *pair_slots;            // [T, TOP_K]: written by gate and up for down
    u32 *selections;            // null, or [EXPERTS]: how often each was chosen, added to
    int num_slots;

    INLINE void count(int expert) const {
        if (selections && (u32)expert < (u32)EXPERTS) atomic_add(selections + expert, 1);
    }
    INLINE int within(int slot) const { return slot < num_slots ? slot : -1; }
    INLINE bool has_slots() const { return !slot_of_expert; }
    // The slot of a pair that has_slots(), or -1.
    INLINE int slot_at(i64 pair) const { return within((int)load_fresh4(pair_slots + pair)); }
    // The slot of an expert, or -1.
    INLINE int slot_of(u32 expert) const {
        if (expert >= (u32)EXPERTS) return -1;
        return within((int)load_weights4(slot_of_expert + expert));
    }
};

// Of one pair.
struct ChosenPair {
    int expert, slot;  // negative: none; not resident
};

// One warp's choices; it loads slots before it knows which it needs.
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
