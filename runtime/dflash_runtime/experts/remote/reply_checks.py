"""Checks of daemons' replies: the parent computes some of them too, and compares before use.

::

    every request ──► schedule: is it checked? ──► no: used as it is
                                               └─► a few of its rows are computed by the parent
                                                     same bits, or within the bound: used
                                                     else: the daemon is dropped

Which requests are checked is unpredictable, and their number is bounded by the time that checks
take: a sample finds bad memory and wrong models sooner or later, and guarantees nothing.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from dflash_protocol.batch import HostHidden, RoutedBatch
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array, I32Array
from dflash_protocol.payloads import PayloadType, as_received
from dflash_protocol.wire.transport import Reply
from dflash_runtime.compute import ExpertBank
from dflash_runtime.experts.remote.session import RemoteTicket, Sent

EVERY = 4096
"""One request of this many is checked by default."""
MOST_SHARE = 1e-3
"""Most of the time, as a fraction, that checks may take by default."""

CLASS_BOUND = 0.1
"""Largest allowed difference (*Exactness*) between one layer's sums of a token that two numeric
classes compute from the same row, as a fraction of the length of its experts' outputs.

Each class keeps within 0.02 of float32 in the mean of many rows (tests of compute/cpu/experts), two
of them within 0.04 of each other, and single rows are further off: see test_reply_checks, where
honest daemons of every class and payload type stay below half of the bound. Outputs of another
expert are about 1.4 away.
"""

_MOST_ROWS = 4
"""Rows checked of one request: the bits of a row do not depend on how many there are."""
_REPLY, _STEP = "reply", "step"
_EXPECTED_S = {_REPLY: 5e-3, _STEP: 0.1}
"""Assumed cost of a check before the first one."""


class CheckSchedule:
    """Decides which requests are checked. `every`: one request of this many, whatever it costs;
    None: one of EVERY, as long as all checks together take no more than MOST_SHARE of the time.

    Used by one thread.
    """

    def __init__(
        self, every: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every = EVERY if every is None else every
        self._share = MOST_SHARE if every is None else math.inf
        self._clock = clock
        self._began_s = clock()
        self._spent_s = 0.0
        self._cost_s = dict(_EXPECTED_S)
        self._is_owed = False
        self._num_left = self._gap()

    def takes_reply(self) -> bool:
        """Whether the next request is checked; report the check's cost to `note_reply`."""
        self._num_left -= 1
        if self._num_left > 0:
            return False
        self._num_left = self._gap()
        is_owed, self._is_owed = self._is_owed, False
        return is_owed or self._can_afford(_REPLY)

    def takes_some(self, num_requests: int) -> bool:
        """Whether one of the next `num_requests` requests is checked, for all of which
        `takes_reply` is called then; else they are counted here."""
        if self._num_left <= num_requests:
            return True
        self._num_left -= num_requests
        return False

    def takes_step(self, num_requests: int) -> bool:
        """Whether a step in which devices would make `num_requests` is run through the host
        instead, so that one of its requests is checked; report the cost of all of it to
        `note_step`."""
        self._num_left -= num_requests
        if self._num_left > 0:
            return False
        self._num_left = self._gap()
        if not self._can_afford(_STEP):
            return False
        self._num_left = min(self._num_left, 1 + secrets.randbelow(max(num_requests, 1)))
        self._is_owed = True
        return True

    def note_reply(self, elapsed_s: float) -> None:
        self._note(_REPLY, elapsed_s)

    def note_step(self, elapsed_s: float) -> None:
        self._note(_STEP, elapsed_s)

    def _note(self, kind: str, elapsed_s: float) -> None:
        self._spent_s += elapsed_s
        self._cost_s[kind] = elapsed_s

    def _can_afford(self, kind: str) -> bool:
        elapsed_s = self._clock() - self._began_s
        return self._spent_s + self._cost_s[kind] <= self._share * elapsed_s

    def _gap(self) -> int:
        """Requests until the next one that is checked; each has the same probability."""
        if self._every == 1:
            return 1
        chance = (1 + secrets.randbelow(1 << 53)) * 2.0**-53
        return 1 + int(math.log(chance) / math.log1p(-1.0 / self._every))


class ReplyChecker:
    """Computes rows of replies with the parent's own experts. Used by one thread.

    `banks`, not owned, have every expert of every layer under its global id.
    """

    def __init__(
        self, banks: Mapping[int, ExpertBank], numeric_class: str, schedule: CheckSchedule
    ) -> None:
        self.schedule = schedule
        self.numeric_class = numeric_class
        self._banks = banks

    def difference(
        self,
        layer_id: int,
        batch: RoutedBatch,
        sums: F64Array,
        *,
        global_ids: I32Array,
        payload: PayloadType,
        is_same_class: bool,
    ) -> str:
        """What is wrong with the sums of a batch, in words; empty if nothing is.

        Sums of the same numeric class must have the same bits, after the payload type's rounding;
        those of another class must lie within CLASS_BOUND. Rows that are not finite are not
        compared. Shapes: sums [T, H]; global_ids [E], of the batch's ids.
        """
        rows = _some(np.unique(batch.token_indices))
        part = _rows_of(batch, rows, global_ids, payload)
        bank = self._banks[layer_id]
        if is_same_class:
            return _different_bits(bank, part, sums[rows], payload)
        return _too_far_apart(bank, part, sums[rows])


def _some(rows: I32Array) -> I32Array:
    """A random few of the rows, in order."""
    if rows.size <= _MOST_ROWS:
        return rows
    places = secrets.SystemRandom().sample(range(rows.size), _MOST_ROWS)
    return rows[sorted(places)]


def _rows_of(
    batch: RoutedBatch, rows: I32Array, global_ids: I32Array, payload: PayloadType
) -> RoutedBatch:
    """These rows with their pairs, in the batch's order, in which terms are added."""
    pairs = batch.pairs()
    kept = pairs.where(np.isin(pairs.token_indices, rows))
    in_rows = replace(
        kept, token_indices=np.searchsorted(rows, kept.token_indices).astype(np.int32)
    )
    hidden = as_received(batch.rows.chosen(rows).to_host(), payload)
    part = RoutedBatch.group(
        batch.phase, HostHidden(np.ascontiguousarray(hidden, np.float32)), in_rows
    )
    return replace(part, expert_ids=global_ids[part.expert_ids])


def _different_bits(
    bank: ExpertBank, part: RoutedBatch, found: F64Array, payload: PayloadType
) -> str:
    own = np.zeros(part.hidden.shape)
    bank.accumulate(part, own)
    own = as_received(own, payload)
    is_wrong = (found != own) & np.isfinite(own).all(axis=1, keepdims=True)
    if not is_wrong.any():
        return ""
    largest = np.abs(found - own)[is_wrong].max()
    return (
        f"{np.count_nonzero(is_wrong)} of {own.size} sums have other bits than those computed "
        f"by the parent, by up to {largest:.3g}"
    )


def _too_far_apart(bank: ExpertBank, part: RoutedBatch, found: F64Array) -> str:
    own, lengths = np.zeros(part.hidden.shape), np.zeros(part.num_tokens)
    for group in range(part.num_groups):
        pairs = slice(int(part.group_starts[group]), int(part.group_starts[group + 1]))
        output = np.zeros_like(own)
        alone = RoutedBatch(
            part.phase,
            part.rows,
            part.expert_ids[group : group + 1],
            np.array([0, pairs.stop - pairs.start], np.int32),
            part.token_indices[pairs],
            part.weights[pairs],
        )
        bank.accumulate(alone, output)
        own += output
        lengths += np.linalg.norm(output, axis=1)
    with np.errstate(all="ignore"):
        distances = np.linalg.norm(found - own, axis=1)
        is_wrong = (distances > CLASS_BOUND * lengths) & np.isfinite(lengths)
    if not is_wrong.any():
        return ""
    furthest = (distances[is_wrong] / np.maximum(lengths[is_wrong], 1e-300)).max()
    return (
        f"sums of {np.count_nonzero(is_wrong)} of {part.num_tokens} rows are {furthest:.3g} of "
        f"their length from those of the parent, {CLASS_BOUND} is allowed"
    )


def require_finite(ticket: RemoteTicket, sent: Sent, reply: Reply) -> None:
    """Check that a reply is finite wherever its input rows are; NaN in the rows is the model's
    fault.

    Raises: ProtocolError if other rows are NaN or infinite.
    """
    hidden = ticket.rows.to_host()
    if sent.rows is not None:
        hidden = hidden[sent.rows]
    is_good = np.isfinite(hidden).all(axis=1)
    num_wrong = np.count_nonzero(is_good & ~np.isfinite(reply.sums).all(axis=1))
    if num_wrong:
        reason = f"layer {ticket.layer_id}: {num_wrong} rows of a reply are NaN or infinite"
        raise ProtocolError(reason, code="not_finite")
