"""Kernels that choose and group (token, expert, weight) triples on their way into the ring.

`compiled` compiles them and describes their arguments and results. Each passes over the pairs once
or twice, where numpy needs some ten passes. `experts.pairs` and `batch` get the same arrays from
numpy when nothing is compiled.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dflash_protocol.ring import compiled as native


def choose_pairs(
    expert_ids,
    weights,
    num_used,
    is_wanted,
    chosen_tokens,
    chosen_ids,
    chosen_weights,
    counts,
):
    num_pairs, num_experts = expert_ids.shape[0], is_wanted.shape[0]
    if (
        num_used < 1
        or num_pairs % num_used != 0
        or weights.shape[0] != num_pairs
        or counts.shape[0] != num_experts
        or min(chosen_tokens.shape[0], chosen_ids.shape[0], chosen_weights.shape[0]) < num_pairs
    ):
        return native.BAD_ARRAYS
    num_chosen = num_whole = 0
    for token in range(num_pairs // num_used):
        before = num_chosen
        for pair in range(token * num_used, (token + 1) * num_used):
            expert_id = expert_ids[pair]
            if expert_id < 0 or expert_id >= num_experts:
                return native.OUT_OF_RANGE
            counts[expert_id] += 1
            # Branch-free: always written, and overwritten by the next pair unless wanted.
            chosen_tokens[num_chosen] = token
            chosen_ids[num_chosen] = expert_id
            chosen_weights[num_chosen] = weights[pair]
            num_chosen += is_wanted[expert_id] != 0
        num_whole += num_chosen - before == num_used
    return num_chosen << native.COUNT_BITS | num_whole


def group_pairs(
    token_indices, expert_ids, weights, whole_from, indices, grouped_weights, next_places
):
    num_pairs = token_indices.shape[0]
    if (
        expert_ids.shape[0] != num_pairs
        or weights.shape[0] != num_pairs
        or indices.shape[0] != 4
        or indices.shape[1] < num_pairs + 1
        or grouped_weights.shape[0] < num_pairs
    ):
        return native.BAD_ARRAYS
    rows, group_ids, group_starts, grouped_rows = indices[0], indices[1], indices[2], indices[3]
    lowest = highest = 0
    for pair in range(num_pairs):
        lowest, highest = min(lowest, expert_ids[pair]), max(highest, expert_ids[pair])
    if lowest < 0 or highest >= next_places.shape[0]:
        return native.OUT_OF_RANGE
    for expert_id in range(highest + 1):
        next_places[expert_id] = 0
    last, num_rows = -1, 0
    for pair in range(num_pairs):
        next_places[expert_ids[pair]] += 1
        token = token_indices[pair]
        if token < 0 or token < last:
            return native.OUT_OF_RANGE
        num_rows += token != last
        last = token
    is_whole = num_rows >= whole_from
    num_groups = num_before = 0
    for expert_id in range(highest + 1):
        count = next_places[expert_id]
        next_places[expert_id] = num_before
        if count > 0:
            group_ids[num_groups] = expert_id
            group_starts[num_groups] = num_before
            num_groups += 1
            num_before += count
    group_starts[num_groups] = num_pairs
    last, row = -1, -1
    for pair in range(num_pairs):
        token = token_indices[pair]
        if is_whole:
            row = token
        elif token != last:
            row += 1
            rows[row] = token
            last = token
        place = next_places[expert_ids[pair]]
        next_places[expert_ids[pair]] = place + 1
        grouped_rows[place] = row
        grouped_weights[place] = weights[pair]
    return num_rows << native.COUNT_BITS | num_groups
