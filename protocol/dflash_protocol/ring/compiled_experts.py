"""How compiled code has a batch computed: words, and a function called through its address.

::

    int64 compute(experts, batch)      both addresses; 1, or 0: the batch is not sound

`experts` is what the function's owner put into LAYER_EXPERTS, `batch` the address of BATCH_WORDS
words. The function adds weighted sums to BATCH_SUMS and must return: it waits for nothing but its
own threads. One thread at a time calls the functions of one CompiledExperts.
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
    BATCH_WORDS,
) = range(10)

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
