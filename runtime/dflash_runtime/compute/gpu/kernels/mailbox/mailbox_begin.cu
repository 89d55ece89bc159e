// mail_begin: the first kernel of a step that uses mailboxes, in the parent and in the daemon: increments
// the epoch and notes the time. Grid 1, one logical warp.
//
// Parameters: CHECK_FACTOR.
#include "mailbox_lines.cuh"

struct MailBeginArgs {
    MailState *state;
};

KERNEL(mail_begin, MailBeginArgs, LANES, 1) {
    let_next_begin();
    wait_for_previous();
    if (thread_index() != 0) return;
    a.state->epoch = load_fresh4(&a.state->epoch) + 1;
    a.state->began = clock_ticks();
}
