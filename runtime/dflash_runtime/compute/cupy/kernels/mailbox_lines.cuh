// The lines of a mailbox, and what all of a side's kernels know of the step: see mailbox.cuh.
#pragma once
#include "common.cuh"

constexpr int LINE_BYTES = 16;

// In the memory of a side's own device, for all of its kernels.
struct MailState {
    u64 began;    // clock_ticks() when the step did
    u32 epoch;    // of the step
    u32 aborted;  // the epoch of the first step that failed; 0: none
    u32 blamed;   // the peer, plus one, that did not answer in time; 0: none, or it is not known
    u32 unused;
};

INLINE void send_line(void *line, u32 epoch, u32 first, u32 second) {
    store_line(line, make_uint4(first, epoch, second, epoch));
}
INLINE u8 *line_at(void *lines, i64 index) { return (u8 *)lines + LINE_BYTES * index; }
INLINE const u8 *line_at(const void *lines, i64 index) {
    return (const u8 *)lines + LINE_BYTES * index;
}

union DoubleWords {
    double value;
    u32 words[2];
};
