"""How compiled code has a batch computed: words, and functions called through their addresses.

::

    int64 compute(experts, batch)      at a daemon: 1, or 0: the batch is not sound
    int64 post(port, request)          at a parent: payload bytes, or a status below 0
    int64 collect(port, request)       at a parent: payload bytes, or a status below 0

All arguments are addresses, and all memory is the caller's process's own.

`compute` belongs to whoever holds the experts. `experts` is what it put into LAYER_EXPERTS, `batch`
has BATCH_WORDS words. It adds weighted sums to BATCH_SUMS and must return: it waits for nothing but
its own threads. One thread at a time calls the functions of one CompiledExperts.

`post` and `collect` are the ring's (`client_functions` in `ring.compiled`); `request` has
REQUEST_WORDS words, the batch's first, and `port` is that of a slot that was lent
(`SharedClient.lend`). Statuses are those of `ring.compiled`:

* `post` writes the request into the slot and rings the daemon's bell. UNSENT: it is too large, or
  its rows overflow the link's payload type; or one is in flight in this slot already.
* `collect` waits up to SLICE_NS for the reply, receives its sums into BATCH_SUMS and adds them to
  REQUEST_OUT. NOTHING: not there yet, call it again. All else below 0 ends the request, and nothing
  was added: FAILURE, FAILURE - violation, NOT_FINITE; LATE, LOST, ABORTED: the daemon may still
  answer, so that `post` refuses to send another. LentSlot.error makes a status an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_protocol.ids import I64Array

# Of a batch: counts, then addresses of arrays as in RoutedBatch, rows contiguous.
(
    BATCH_TOKENS,
    BATCH_GROUPS,
    BATCH_PAIRS,
    BATCH_HIDDEN,  # [T, H] float32
    BATCH_EXPERT_IDS,  # [G] int32, local
    BATCH_GROUP_STARTS,  # [G + 1] int32
    BATCH_TOKEN_INDICES,  # [P] int32
    BATCH_WEIGHTS,  # [P] float32
    BATCH_SUMS,  # [T, H] float64
    BATCH_PHASE,  # index in ports.PHASES
    BATCH_WORDS,
) = range(11)

# Of a request, after those of its batch. Times are of the monotonic clock.
(
    REQUEST_LAYER,
    REQUEST_DEADLINE_NS,  # from `post` on
    REQUEST_SPIN_NS,  # how long the first `collect` polls before it sleeps
    REQUEST_ROWS,  # address of [T] int32, the rows of OUT that the sums belong to; 0: all, in order
    REQUEST_OUT,  # address of [.., H] float64
    REQUEST_ABORT,  # address of a word; if it is not 0 there, `collect` returns ABORTED
    REQUEST_IDLE,  # addresses, or 0: before it sleeps, `collect` copies the word at REGION to IDLE
    REQUEST_REGION,
    # Written by the functions.
    REQUEST_POSTED_NS,
    REQUEST_WAITING_NS,  # when the first `collect` began, or 0
    # Totals of all replies, for the caller to clear.
    REQUEST_NUM_REPLIES,
    REQUEST_BYTES_SENT,
    REQUEST_BYTES_RECEIVED,
    REQUEST_TRIP_NS,  # from `post` to the reply
    REQUEST_WAIT_NS,  # within `collect`
    REQUEST_COMPUTE_S,  # float64, as reported by the daemon
    REQUEST_QUEUE_S,  # float64, likewise
    REQUEST_WORDS,
) = range(BATCH_WORDS, BATCH_WORDS + 18)

SLICE_NS = 50_000_000
"""Longest time that `collect` waits."""

# Of a layer; all 0 for one that no compiled code computes.
(
    LAYER_COMPUTE,  # address of the function
    LAYER_EXPERTS,
    LAYER_NUM_EXPERTS,
    LAYER_HIDDEN_SIZE,
    LAYER_MAX_TOKENS,  # of a batch
    LAYER_MAX_PAIRS,
    LAYER_WORDS,
) = range(7)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledExperts:
    """The experts of a link that compiled code computes, by layer id."""

    layers: I64Array
    """Shapes: [largest layer id + 1, LAYER_WORDS]."""
    owner: object
    """Owns what the addresses point to."""
    max_tokens: int
    """Most tokens of a batch, in any layer."""
