// A mailbox: requests of a parent's step to a daemon's device and its replies, layer by layer, with no
// host in between. mailbox/layout.py has the memory layout and says why it is correct.
//
// A line is 16 bytes: {data, check, data, check}. A check depends on its word and the step's epoch, so a
// reader that finds the expected check has the data that belongs to it: no flag, no fence, one transfer,
// and damaged data is not taken.
//
// MOST_PEERS: most mailboxes of a side.
#pragma once
#include "mailbox_lines.cuh"

constexpr int LINES_AT_ONCE = 4;   // polled together by a thread that has several: see Mail::receive
constexpr int REPLIES_AT_ONCE = 2;
constexpr int POLLS = 64;          // of lines, between two reads of the clock
constexpr int FAR_POLLS = 16 * POLLS;  // and between two reads of peers' abort words, over the bus

// One side's state and abort words, for all of its mailboxes.
struct Mail {
    MailState *state;
    u32 *own_aborts[MOST_PEERS];           // in the host's memory: written for each peer
    const u32 *other_aborts[MOST_PEERS];   // written by each peer; not 0: it has aborted
    u32 *failed;                           // null, or in our host's private memory: as state->aborted
    u64 limit;                             // of a step, in ticks
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
    // Whether the step has failed, or its wait for `peer` has reached the deadline.
    INLINE bool is_over(int peer, u32 epoch, u64 deadline, bool polls_far) const {
        if (is_aborted()) return true;
        int blamed = clock_ticks() > deadline ? peer : -1;
        for (int other = 0; polls_far && blamed < 0 && other < num_peers; other++) {
            if (load_word(other_aborts[other])) blamed = other;
        }
        if (blamed < 0) return false;
        store_word(&state->blamed, (u32)blamed + 1);
        abort(epoch);
        return true;
    }
    // Waits for `num` lines, at most N, from peers: those at line(0), line(1), … of peer(0), …. A poll
    // loads all missing lines before the first has arrived: over a bus one costs as much as all. False:
    // the step has failed. `polls_far`: also read peers' abort words over the bus; not needed if another
    // block that waits for the same does. FirstHalves: second halves may still be missing.
    template <bool FirstHalves = false, int N, typename LineOf, typename PeerOf>
    INLINE bool receive(uint4 (&found)[N], int num, LineOf line, PeerOf peer, u32 epoch, u64 deadline,
                        bool is_rounded = false, bool polls_far = true) const {
        const u32 checked_by = is_rounded ? rounded_epoch(epoch) : epoch;
        auto is_missing = [&](uint4 line) {
            return !(FirstHalves ? is_of_epoch(line.x, line.y, checked_by)
                                 : is_of_epoch(line, checked_by));
        };
#pragma unroll
        for (int j = 0; j < N; j++) found[j] = make_uint4(0, 0, 0, 0);  // of no epoch
        for (int poll = 1;; poll++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (j < num && is_missing(found[j])) found[j] = load_line(line(j));
            }
            int missing = -1;
#pragma unroll
            for (int j = N - 1; j >= 0; j--) {
                if (j < num && is_missing(found[j])) missing = j;
            }
            if (missing < 0) return true;
            if (poll % POLLS == 0 &&
                is_over(peer(missing), epoch, deadline, polls_far && poll % FAR_POLLS == 0)) {
                return false;
            }
            spin_pause();
        }
    }
};

// A request's rows: arrays of words, one after the other, each in whole lines.
constexpr int MOST_PARTS = 3;
struct MailParts {
    void *words[MOST_PARTS];
    int num_words[MOST_PARTS];  // 0: nothing

    INLINE int num_lines() const {
        int num = 0;
#pragma unroll
        for (int part = 0; part < MOST_PARTS; part++) num += lines_of(part);
        return num;
    }
    // The words of a line; the second is 0 where there is none.
    INLINE uint2 load(int line) const {
        bool has_second;
        const u32 *word = at(line, has_second);
        return make_uint2(load_fresh4(word), has_second ? load_fresh4(word + 1) : 0);
    }
    INLINE void store(int line, u32 first, u32 second) const {
        bool has_second;
        u32 *word = at(line, has_second);
        word[0] = first;
        if (has_second) word[1] = second;
    }

private:
    INLINE int lines_of(int part) const { return (num_words[part] + 1) / 2; }
    INLINE u32 *at(int line, bool &has_second) const {
        u32 *word = nullptr;
#pragma unroll
        for (int part = 0; part < MOST_PARTS; part++) {
            if (line >= 0 && line < lines_of(part)) {
                word = (u32 *)words[part] + 2 * line;
                has_second = 2 * line + 1 < num_words[part];
            }
            line -= lines_of(part);
        }
        return word;
    }
};

// What peers answer for a layer.
struct MailReplies {
    Mail mail;
    const void *lines[MOST_PEERS];  // [T, H] float64, one a line; or as mail_add_rounded reads them
    int peers[MOST_PEERS];          // whose each of them is
    int num_replies;

    // Adds the answers for one element, in the order of the peers. False: the step has failed.
    INLINE bool add(i64 element, u32 epoch, u64 deadline, double &total) const {
        if (mail.is_aborted()) return false;
        for (int begin = 0; begin < num_replies; begin += REPLIES_AT_ONCE) {
            uint4 found[REPLIES_AT_ONCE];
            const int num = num_replies - begin;
            auto line = [&](int j) { return line_at(lines[begin + j], element); };
            auto peer = [&](int j) { return peers[begin + j]; };
            if (!mail.receive(found, num, line, peer, epoch, deadline)) return false;
#pragma unroll
            for (int j = 0; j < REPLIES_AT_ONCE; j++) {
                if (j >= num) break;
                DoubleWords sum;
                sum.words[0] = found[j].x, sum.words[1] = found[j].z;
                total += sum.value;
            }
        }
        return true;
    }
};
