// Rows of a request, from the lines of a mailbox straight into shared memory: for lines in the memory
// of the device that reads them, since every block does. See staging.cuh for rows that lie elsewhere.
#pragma once
#include "mailbox.cuh"
#include "staging.cuh"

// What a layer is asked for, with one token.
struct MailRequest {
    Mail mail;
    const void *lines;  // pairs, then int8 rows, what belongs to them, and float32 rows, if wanted
};

// Waits for a request, in one thread or another. What does not come in time is anything: the step has
// failed then, and nobody reads what is made of it.
struct MailReader {
    const MailRequest &request;
    u32 epoch;
    u64 deadline;

    INLINE explicit MailReader(const MailRequest &of)
        : request(of), epoch(of.mail.epoch()), deadline(of.mail.deadline()) {}

    INLINE uint2 line(i64 index) const {
        uint2 words;
        const u8 *place = line_at(request.lines, index);
        if (!request.mail.receive(place, 0, epoch, deadline, words.x, words.y)) {
            words = make_uint2(~0u, 0u);
        }
        return words;
    }
    INLINE uint4 two_lines(i64 first) const {
        const uint2 low = line(first), high = line(first + 1);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
};

// The row of a request of `Pairs` pairs, by all threads.
template <int Pairs, int Columns, int Threads, bool AsBytes, bool AsFloats>
INLINE void stage_request(const Staged<1, Columns, AsBytes, AsFloats> &to, const MailReader &from) {
    using Rows = Staged<1, Columns, AsBytes, AsFloats>;
    constexpr int QuantLines = AsBytes ? Rows::PADDED / 8 : 0;
    constexpr int MetaLines = AsBytes ? Rows::GRANULES : 0;
    if constexpr (AsBytes) {
        for (int i = thread_index(); i < Rows::GRANULES; i += Threads) {
            uint4 bytes = make_uint4(0, 0, 0, 0);  // padding is not written by who sends it
            if (i < Columns / 16) bytes = from.two_lines(Pairs + 2 * i);
            *(uint4 *)to.granule(0, i) = bytes;
        }
        for (int i = thread_index(); i < Rows::GRANULES / 2; i += Threads) {
            uint4 two = make_uint4(0, 0, 0, 0);
            if (i < Columns / 32) two = from.two_lines(Pairs + QuantLines + 2 * i);
            *(uint4 *)(to.meta + 2 * i) = two;
        }
    }
    if constexpr (AsFloats) {
        for (int i = thread_index(); i < Rows::PADDED / 4; i += Threads) {
            uint4 four = make_uint4(0, 0, 0, 0);
            if (i < Columns / 4) four = from.two_lines(Pairs + QuantLines + MetaLines + 2 * i);
            *(uint4 *)(to.values + 4 * i) = four;
        }
    }
}
