// Lines of a mailbox, and the step's state shared by all kernels of a side: see mailbox.cuh.
#pragma once
#include "common.cuh"

constexpr int LINE_BYTES = 16, HALF_BYTES = LINE_BYTES / 2;

// State of the step, in the memory of a side's own device.
struct MailState {
    u64 began;    // clock_ticks() when the step did
    u32 epoch;    // of the step
    u32 aborted;  // the epoch of the first step that failed; 0: none
    u32 blamed;   // the peer, plus one, that did not answer in time; 0: none, or it is not known
    u32 rounds;   // whether the layer's answer is wanted as float32: a daemon's
};

// The check beside a word. The factor is odd, so in an epoch every word has another check, and a word
// has another check in every epoch.
constexpr u32 CHECK_FACTOR = 0x9e3779b1u;
INLINE u32 check_of(u32 epoch, u32 word) { return epoch ^ word * CHECK_FACTOR; }

INLINE void send_line(void *line, u32 epoch, u32 first, u32 second) {
    store_line(line, make_uint4(first, check_of(epoch, first), second, check_of(epoch, second)));
}
INLINE bool is_of_epoch(u32 word, u32 check, u32 epoch) { return check == check_of(epoch, word); }
INLINE bool is_of_epoch(uint4 line, u32 epoch) {
    return is_of_epoch(line.x, line.y, epoch) && is_of_epoch(line.z, line.w, epoch);
}
// A half by itself.
INLINE void send_half(void *half, u32 epoch, u32 word) {
    store_half_line(half, word, check_of(epoch, word));
}
// Epoch in the checks of rounded replies, which are thus never taken for float64, nor float64 for them.
INLINE u32 rounded_epoch(u32 epoch) { return ~epoch; }

// Flipped in every id of a request whose answer may be rounded. An id's highest two bits are the same.
constexpr u32 ROUNDS = 1u << 30;
INLINE bool asks_rounded(u32 id) { return (id >> 31) != (id >> 30 & 1); }

// First half of a request's line: a pair's expert.
struct AskedExpert {
    u32 id;  // local; its highest bit: none
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
