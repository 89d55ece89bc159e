// The attention mask. A token sees positions up to its own: the last WINDOW of them, those in the same
// CHUNK of positions (llama4), or all (both 0).
#pragma once
#include "common.cuh"

constexpr bool IS_MASKED = WINDOW != 0 || CHUNK != 0;

// The first position that a token at `position` sees; it never decreases with the position.
INLINE int first_visible(int position) {
    int first = 0;
    if constexpr (WINDOW != 0) first = position >= WINDOW ? position - WINDOW + 1 : 0;
    if constexpr (CHUNK != 0) {
        constexpr int SIZE = CHUNK != 0 ? CHUNK : 1;  // so that no compiler sees a division by zero
        const int begin = position / SIZE * SIZE;
        first = begin > first ? begin : first;
    }
    return first;
}
INLINE bool is_visible_at(int key, int position) {
    return key <= position && (!IS_MASKED || key >= first_visible(position));
}
