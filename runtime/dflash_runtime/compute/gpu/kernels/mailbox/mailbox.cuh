// A mailbox carries a step's requests from a parent's device to a daemon's, and the replies, layer by
// layer, without the hosts. mailbox_layout.py has the memory layout and explains why it is correct.
//
// A line is 16 bytes: {data, check, data, check}. A check depends on its word and on the step's epoch
// (a counter of steps), so a reader that finds the expected check has the right data: no flag and no
// fence are needed, one transfer suffices, and damaged data is not accepted.
//
// Parameters: MOST_PEERS, the most mailboxes of one process; CHECK_FACTOR, of mailbox_layout.py.
#pragma once
#include "mailbox_lines.cuh"

constexpr int LINES_AT_ONCE = 4;   // lines that a thread polls together: see Mail::receive
constexpr int REPLIES_AT_ONCE = 2;
constexpr int POLLS = 64;          // polls of lines between two reads of the clock
constexpr int FAR_POLLS = 16 * POLLS;  // polls between two reads of peers' abort words, over the bus
constexpr int SLOW_PAUSES = 32;  // between two polls of a slow peer
constexpr int SLOW_LINES = 32;   // neighbouring lines of such a peer, of which one is polled

// State and abort words of one end (parent or daemon), shared by all of its mailboxes.
struct Mail {
    MailState *state;
    u32 *own_aborts[MOST_PEERS];           // in host memory, read by each peer
    const u32 *other_aborts[MOST_PEERS];   // in host memory, written by each peer; not 0: it has aborted
    u32 *failed;                           // null, or a copy of state->aborted in this host's memory
    u64 limit;                             // time limit of a step, in ticks
    int num_peers;

    INLINE u32 epoch() const { return load_fresh4(&state->epoch); }
    INLINE bool is_aborted() const { return load_word(&state->aborted) != 0; }
    INLINE u64 deadline() const {
        const uint2 began = load_fresh8(&state->began);
        return ((u64)began.y << 32 | began.x) + limit;
    }
    // Aborts the step: every later wait and post of this end and of its peers returns at once.
    INLINE void abort(u32 epoch) const {
        store_word(&state->aborted, epoch);
        if (failed) store_word(failed, epoch);
        for (int peer = 0; peer < num_peers; peer++) store_word(own_aborts[peer], epoch);
    }
    // Whether the step has failed. Aborts it if the wait for `peer` has passed the deadline, or (with
    // polls_far) if a peer has aborted.
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
    // Waits for `num` lines, at most N: line(j) is an address, written by peer(j). Returns false if the
    // step has failed. A poll loads all missing lines at once: over a bus this takes as long as one.
    // `polls_far`: also reads peers' abort words over the bus; one of the blocks that wait for the same
    // lines is enough. FirstHalves: waits for the first halves only. `skipped`: a bit for each line that is
    // not waited for.
    template <bool FirstHalves = false, int N, typename LineOf, typename PeerOf>
    INLINE bool receive(uint4 (&found)[N], int num, LineOf line, PeerOf peer, u32 epoch, u64 deadline,
                        bool is_rounded = false, bool polls_far = true, u32 skipped = 0) const {
        const u32 checked_by = is_rounded ? rounded_epoch(epoch) : epoch;
        auto is_missing = [&](int j) {
            if (j >= num || skipped >> j & 1) return false;
            return !(FirstHalves ? is_of_epoch(found[j].x, found[j].y, checked_by)
                                 : is_of_epoch(found[j], checked_by));
        };
#pragma unroll
        for (int j = 0; j < N; j++) found[j] = make_uint4(0, 0, 0, 0);  // valid in no epoch
        for (int poll = 1;; poll++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (is_missing(j)) found[j] = load_line(line(j));
            }
            int missing = -1;
#pragma unroll
            for (int j = N - 1; j >= 0; j--) {
                if (is_missing(j)) missing = j;
            }
            if (missing < 0) return true;
            if (poll % POLLS == 0 &&
                is_over(peer(missing), epoch, deadline, polls_far && poll % FAR_POLLS == 0)) {
                return false;
            }
            spin_pause();
        }
    }
    // Waits for the first half of a line of a peer that takes long: rarely polled, so that the bus and the
    // host's memory are left to its work. Returns false if the step has failed.
    INLINE bool await_slowly(const void *line, int peer, u32 epoch, u64 deadline, u32 checked_by) const {
        for (int poll = 1;; poll++) {
            const uint4 found = load_line(line);
            if (is_of_epoch(found.x, found.y, checked_by)) return true;
            if (poll % POLLS == 0 && is_over(peer, epoch, deadline, poll % FAR_POLLS == 0)) return false;
            for (int i = 0; i < SLOW_PAUSES; i++) spin_pause();
        }
    }
};

// The rows of a request: up to three arrays of words, sent one after the other, each in whole lines.
constexpr int MOST_PARTS = 3;
struct MailParts {
    void *words[MOST_PARTS];
    int num_words[MOST_PARTS];  // 0: unused

    INLINE int num_lines() const {
        int num = 0;
#pragma unroll
        for (int part = 0; part < MOST_PARTS; part++) num += lines_of(part);
        return num;
    }
    // The two words of a line; the second is 0 past the end of an array.
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

// The peers' replies for a layer.
struct MailReplies {
    Mail mail;
    const void *lines[MOST_PEERS];  // [T, H] float64, one per line; or float32: see mail_add_rounded
    int peers[MOST_PEERS];          // the peer that writes each of them
    int num_replies;
    const u32 *asked;               // null, or [num_replies]: 0: nothing was asked of it, see mail_post
    u32 slow;                       // a bit for each reply of a peer that takes long

    // A bit for each reply that is waited for. Loaded long before it is needed.
    INLINE u32 waited() const {
        u32 result = 0;
        for (int reply = 0; reply < num_replies; reply++) {
            if (!asked || load_fresh4(asked + reply)) result |= 1u << reply;
        }
        return result;
    }
    // Waits for a line near the one at this index, if the peer is slow: the same for neighbouring threads.
    INLINE bool await_slow(int reply, i64 index, u32 epoch, u64 deadline, bool is_rounded) const {
        if (!(slow >> reply & 1)) return true;
        const void *line = line_at(lines[reply], index / SLOW_LINES * SLOW_LINES);
        return mail.await_slowly(line, peers[reply], epoch, deadline,
                                 is_rounded ? rounded_epoch(epoch) : epoch);
    }
    // Adds the sums of one element, of the peers in `waited`, to `total`, in the order of the peers.
    // False: the step failed.
    INLINE bool add(i64 element, u32 waited, u32 epoch, u64 deadline, double &total) const {
        if (mail.is_aborted()) return false;
        for (int begin = 0; begin < num_replies; begin += REPLIES_AT_ONCE) {
            uint4 found[REPLIES_AT_ONCE];
            const int num = min_of(num_replies - begin, REPLIES_AT_ONCE);
            u32 skipped = 0;
            for (int j = 0; j < num; j++) {
                if (!(waited >> (begin + j) & 1)) skipped |= 1u << j;
                else if (!await_slow(begin + j, element, epoch, deadline, false)) return false;
            }
            auto line = [&](int j) { return line_at(lines[begin + j], element); };
            auto peer = [&](int j) { return peers[begin + j]; };
            if (!mail.receive(found, num, line, peer, epoch, deadline, false, true, skipped)) {
                return false;
            }
#pragma unroll
            for (int j = 0; j < REPLIES_AT_ONCE; j++) {
                if (j >= num || skipped >> j & 1) continue;
                DoubleWords sum;
                sum.words[0] = found[j].x, sum.words[1] = found[j].z;
                total += sum.value;
            }
        }
        return true;
    }
};
