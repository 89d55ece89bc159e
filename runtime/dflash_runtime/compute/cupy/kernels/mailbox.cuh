// A mailbox: what a parent's step asks of a daemon's device and what that answers, layer by layer, with
// no host in between. `mailbox_layout.py` draws where everything lies, and says why it is right.
//
// A line is 16 bytes: {data, check, data, check}. A check is of its word and the step's epoch, so that a
// reader which finds the one that it waits for has the data that belongs to it: no flag, no fence, one
// crossing, and what is damaged on its way is not taken.
//
// MOST_PEERS: mailboxes that a side has a part in at once.
#pragma once
#include "mailbox_lines.cuh"

constexpr int LOOKS = 64;          // at a line, between two at the clock
constexpr int FAR_LOOKS = 16 * LOOKS;  // and between two at what peers say, which is far away

// One side's part in all of its mailboxes.
struct Mail {
    MailState *state;
    u32 *own_aborts[MOST_PEERS];           // in memory of the host: what we tell each peer
    const u32 *other_aborts[MOST_PEERS];   // and each peer tells us; not 0: it has given up
    u32 *failed;                           // null, or in memory of our host alone: as state->aborted
    u64 limit;                             // ticks that a step may take
    int num_peers;

    INLINE u32 epoch() const { return load_fresh4(&state->epoch); }
    INLINE bool is_aborted() const { return load_word(&state->aborted) != 0; }
    INLINE u64 deadline() const {
        const uint2 began = load_fresh8(&state->began);
        return ((u64)began.y << 32 | began.x) + limit;
    }
    // Every later wait and post of this side and of its peers returns at once.
    INLINE void abort(u32 epoch) const {
        store_word(&state->aborted, epoch);
        if (failed) store_word(failed, epoch);
        for (int peer = 0; peer < num_peers; peer++) store_word(own_aborts[peer], epoch);
    }
    // Whether nobody should wait any longer in this step, for that peer or any.
    INLINE bool is_over(int peer, u32 epoch, u64 deadline, bool looks_far) const {
        if (is_aborted()) return true;
        int blamed = clock_ticks() > deadline ? peer : -1;
        for (int other = 0; looks_far && blamed < 0 && other < num_peers; other++) {
            if (load_word(other_aborts[other])) blamed = other;
        }
        if (blamed < 0) return false;
        store_word(&state->blamed, (u32)blamed + 1);
        abort(epoch);
        return true;
    }
    // Waits for a line's data, which a peer sends. False: the step has failed.
    INLINE bool receive(const void *line, int peer, u32 epoch, u64 deadline, u32 &first, u32 &second,
                        bool is_rounded = false) const {
        const u32 checked_by = is_rounded ? rounded_epoch(epoch) : epoch;
        for (int look = 1;; look++) {
            const uint4 found = load_line(line);
            first = found.x, second = found.z;
            if (is_of_epoch(found, checked_by)) return true;
            if (look % LOOKS == 0 && is_over(peer, epoch, deadline, look % FAR_LOOKS == 0)) {
                return false;
            }
            spin_pause();
        }
    }
};

// What a request has besides the choice: arrays of words, one after the other, whole lines each.
constexpr int MOST_PARTS = 3;
struct MailParts {
    void *words[MOST_PARTS];
    int num_words[MOST_PARTS];  // 0: nothing

    // Calls take(word, is_there, next word, is_there) for every line of every part, by all threads.
    template <typename Take>
    INLINE void each_line(int thread, int num_threads, Take take) const {
        int first_line = 0;
        for (int part = 0; part < MOST_PARTS; part++) {
            const int num_lines = (num_words[part] + 1) / 2;
            for (int i = thread; i < num_lines; i += num_threads) {
                u32 *word = (u32 *)words[part] + 2 * i;
                take(first_line + i, word, 2 * i + 1 < num_words[part]);
            }
            first_line += num_lines;
        }
    }
};

// What peers answer for a layer.
struct MailReplies {
    Mail mail;
    const void *lines[MOST_PEERS];  // [T, H] float64, one a line
    int peers[MOST_PEERS];          // whose each of them is
    int num_replies;

    // Adds the answers for one element, in the order of the peers. False: the step has failed.
    INLINE bool add(i64 element, u32 epoch, u64 deadline, double &total) const {
        if (mail.is_aborted()) return false;
        for (int reply = 0; reply < num_replies; reply++) {
            DoubleWords sum;
            const u8 *line = line_at(lines[reply], element);
            if (!mail.receive(line, peers[reply], epoch, deadline, sum.words[0], sum.words[1])) {
                return false;
            }
            total += sum.value;
        }
        return true;
    }
};
