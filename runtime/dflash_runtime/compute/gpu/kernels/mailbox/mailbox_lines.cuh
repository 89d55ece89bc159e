// Lines of a mailbox and the state of a step, in the parent or in the daemon: see mailbox.cuh.
//
// Parameters: CHECK_FACTOR, of mailbox_layout.py.
#pragma once
#include "common.cuh"

constexpr int LINE_BYTES = sizeof(uint4), HALF_BYTES = LINE_BYTES / 2;

// State of the step, in the own device's memory.
struct MailState {
    u64 began;    // clock_ticks() at the step's beginning
    u32 epoch;    // of the step
    u32 aborted;  // the epoch of the first step that failed; 0: none
    u32 blamed;   // 1 + the peer that did not answer in time; 0: none, or unknown
    u32 rounds;   // in a daemon: whether the parent wants this layer's reply as float32
};

// The check of a word. As the factor is odd, different words have different checks within an epoch, and
// a word has different checks in different epochs.
INLINE u32 check_of(u32 epoch, u32 word) { return epoch ^ word * (u32)CHECK_FACTOR; }

INLINE void send_line(void *line, u32 epoch, u32 first, u32 second) {
    store_line(line, make_uint4(first, check_of(epoch, first), second, check_of(epoch, second)));
}
INLINE bool is_of_epoch(u32 word, u32 check, u32 epoch) { return check == check_of(epoch, word); }
INLINE bool is_of_epoch(uint4 line, u32 epoch) {
    return is_of_epoch(line.x, line.y, epoch) && is_of_epoch(line.z, line.w, epoch);
}
// Sends one half of a line.
INLINE void send_half(void *half, u32 epoch, u32 word) {
    store_half_line(half, word, check_of(epoch, word));
}
// The epoch in the checks of rounded replies, so that these and float64 replies are never confused.
INLINE u32 rounded_epoch(u32 epoch) { return ~epoch; }

// A bit that is flipped in every id of a request whose reply may be rounded. The two highest bits of an
// id are otherwise equal.
constexpr u32 ROUNDS = 1u << 30;
INLINE bool asks_rounded(u32 id) { return (id >> 31) != (id >> 30 & 1); }

// A pair's expert, from the first half of a request's line.
struct AskedExpert {
    u32 id;  // local id; none if its highest bit is set
    bool rounds;

    INLINE explicit AskedExpert(uint4 line) {
        rounds = asks_rounded(line.x);
        id = rounds ? line.x ^ ROUNDS : line.x;
    }
};

INLINE u8 *line_at(void *lines, i64 index) { return (u8 *)lines + LINE_BYTES * index; }
INLINE const u8 *line_at(const void *lines, i64 index) {
    return (const u8 *)lines + LINE_BYTES * index;
}

union DoubleWords {
    double value;
    u32 words[2];
};
