"""Trees of draft tokens, verified in one pass.

Each token's parent is an earlier token of the tree or, written -1, the last accepted token:

    positions   n - 1    n      n + 1   n + 2        parents  [-1, 0, 0, 1, -1]
                 …  ─┬─  0  ─┬─  1  ───  3           segments [0, 1, 3], [2], [4]
                     │       └─  2
                     └─  4

In a depth-first walk where every token overwrites the cache at its position, each token finds its
ancestors' rows at the positions before it. A segment is a run of the walk in which each token is
the child of the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_protocol.ids import F32Array, I32Array

MOST_NODES = 64

OnAccept = Callable[[I32Array], None]
"""Makes a layer keep the tokens of an accepted path. Shapes: [L]."""


class Tree:
    """Shapes: parents [W] int32, -1 for the last accepted token, which is before `position`."""

    def __init__(self, parents: I32Array, position: int) -> None:
        """Raises: ValueError if a parent is not before its child, there are over MOST_NODES tokens,
        or no token precedes the tree."""
        size = parents.size
        if position < 1:
            raise ValueError("a tree needs at least one token before it")
        if parents.shape != (size,) or size > MOST_NODES:
            raise ValueError(f"parents have shape {parents.shape}, not [W] with W <= {MOST_NODES}")
        if bool((parents < -1).any() or (parents >= np.arange(size)).any()):
            raise ValueError("a parent must be -1 or an earlier token")
        self.parents = parents.astype(np.int32)
        self.position = position
        self._on_accept: list[OnAccept] = []

    @cached_property
    def depths(self) -> I32Array:
        """How many ancestors each token has in the tree. Shapes: [W]."""
        depths = np.zeros(self.parents.size, np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 0 if parent < 0 else depths[parent] + 1
        return depths

    @property
    def positions(self) -> I32Array:
        """Each token's position in the sequence if it were accepted. Shapes: [W]."""
        positions: I32Array = self.position + self.depths
        return positions

    @cached_property
    def walk(self) -> I32Array:
        """All tokens, depth first, children in order. Shapes: [W]."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents.tolist()):
            children.setdefault(parent, []).append(node)
        walk: list[int] = []
        ahead = children.get(-1, [])[::-1]
        while ahead:
            node = ahead.pop()
            walk.append(node)
            ahead += children.get(node, [])[::-1]
        return np.array(walk, np.int32)

    @cached_property
    def segments(self) -> list[I32Array]:
        """Runs of the walk in which each token is the child of the one before it."""
        walk = self.walk
        is_first = self.parents[walk[1:]] != walk[:-1]
        return np.split(walk, np.flatnonzero(is_first) + 1) if walk.size else []

    def ancestors(self, count: int) -> I32Array:
        """Each token's last `count` - 1 ancestors, then itself; tokens before the tree are -1, -2,
        …, the last accepted token -1. Shapes: result [W, count]."""
        table = np.empty((self.parents.size, count), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            table[node, -1] = node
            before = table[parent] if parent >= 0 else np.arange(-count, 0, dtype=np.int32)
            table[node, :-1] = before[1:]
        return table

    def check_path(self, path: I32Array) -> None:
        """Raises: ValueError unless each token is the child of the one before it, from -1 on.

        Shapes: path [L].
        """
        before = -1
        for node in path.tolist():
            if not 0 <= node < self.parents.size or self.parents[node] != before:
                raise ValueError(f"{path.tolist()} is not a path from the root of the tree")
            before = node

    def check_size(self, num_tokens: int) -> None:
        """Raises: ValueError unless the tree has `num_tokens` tokens."""
        if num_tokens != self.parents.size:
            raise ValueError(f"{num_tokens} tokens for a tree of {self.parents.size}")

    def keep(self, on_accept: OnAccept) -> None:
        """Register a callback for the accepted path; callbacks run in this order."""
        self._on_accept.append(on_accept)

    @property
    def kept(self) -> list[OnAccept]:
        """Callbacks registered so far."""
        return [*self._on_accept]

    def accept(self, path: I32Array) -> None:
        """Make all layers keep a path's tokens. Shapes: path [L].

        Raises: ValueError as `check_path`.
        """
        self.check_path(path)
        if path.size:
            for on_accept in self._on_accept:
                on_accept(path)


@dataclass(frozen=True, slots=True, eq=False)
class TreeResult:
    """A model's results for a tree. Shapes: next_token_ids [W], the argmax after each token;
    features, by layer id, [W, H]."""

    next_token_ids: I32Array
    features: dict[int, F32Array]


Attend = Callable[[F32Array, F32Array, F32Array, I32Array], F32Array]
"""Attention of consecutive tokens: q, k, v, positions."""


def attend_segments(
    tree: Tree, attend: Attend, out: F32Array, *, q: F32Array, k: F32Array, v: F32Array
) -> None:
    """Attention of a tree's tokens, segment by segment, each over its ancestors' rows in the cache.
    Shapes: q, out [W, heads, D]; k, v [W, kv_heads, D]."""
    tree.check_size(q.shape[0])
    positions = tree.positions
    for part in tree.segments:
        out[part] = attend(q[part], k[part], v[part], positions[part])
