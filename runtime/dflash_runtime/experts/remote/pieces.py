"""Cuts a batch into requests, each with the rows of the step that it answers. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from dflash_protocol.batch import RoutedBatch, slice_tokens
from dflash_protocol.ids import I32Array
from dflash_protocol.wire.version1 import rectangles

Rows: TypeAlias = slice | I32Array
"""Rows of the step's hidden states: a run of them, or their indices."""


def pieces(
    compacted: RoutedBatch,
    rows: I32Array | None,
    *,
    max_tokens: int,
    version: int,
    first_row: int = 0,
) -> Iterator[tuple[Rows, RoutedBatch]]:
    """Cut a batch into requests of at most `max_tokens`, in the form that the protocol's `version`
    needs.

    They answer `rows` or, if None, all rows from `first_row` on. Shapes: rows [T].
    """
    if version == 1:
        return (
            (piece_rows if rows is None else rows[piece_rows], piece)
            for piece_rows, piece in rectangles(compacted, max_tokens)
        )
    num_tokens = compacted.num_tokens
    if num_tokens <= max_tokens:
        span = slice(first_row, first_row + num_tokens)
        return iter(((span if rows is None else rows, compacted),))
    return (
        (
            slice(first_row + first, first_row + first + piece.num_tokens)
            if rows is None
            else rows[first : first + piece.num_tokens],
            piece,
        )
        for first, piece in slice_tokens(compacted, max_tokens)
    )
