"""Arguments of one attention call, as words that the kernel writes and the tasks read.

Addresses, except where the unit or the comment says otherwise.
"""

from __future__ import annotations

(
    # A layer's cache.
    KEYS,
    VALUES,
    KV_HEADS,
    KEY_DIM,
    VALUE_DIM,
    KEY_HEAD_BYTES,
    KEY_BLOCK_BYTES,
    VALUE_HEAD_BYTES,
    VALUE_ROW_BYTES,
    WINDOW_ROWS,  # position j is row j % WINDOW_ROWS
    WINDOW,  # 0: none
    CHUNK,  # 0: none
    # Functions for the cache's element type, and the tasks.
    FETCH_SCORE,
    MIX,
    EXPAND_KEYS,
    EXPAND_VALUES,
    STORE_KEY,
    STORE_VALUES,
    SCORE_EXPANDED,
    MIX_EXPANDED,
    STORE_TASK,
    ATTEND_TASK,
    # A call and its scratch memory.
    SCRATCH,
    SCRATCH_BYTES,
    PARTIALS,
    DONE,
    QUERIES,
    NEW_KEYS,
    NEW_VALUES,
    SINKS,  # or 0
    OUT,
    FIRST_POSITION,
    NUM_TOKENS,
    NUM_HEADS,
    SCALE_BITS,
    TILE_TOKENS,
    PARTIAL_BYTES,
    ITEMS_A_PAIR,
) = range(38)

NUM_ARGUMENTS = 38
NUM_LAYER_WORDS = SCRATCH
