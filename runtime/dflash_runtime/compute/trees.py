"""Tokens that are computed at once although not all of them follow each other.

Each token of a tree follows its parent, one that stands before it, or the last token that counts:

    positions   n - 1    n      n + 1   n + 2        parents  [-1, 0, 0, 1, -1]
                 …  ─┬─  0  ─┬─  1  ───  3           segments [0, 1, 3], [2], [4]
                     │       └─  2
                     └─  4

Walked through depth first, every token finds what its ancestors have left at the positions before
its own, if each overwrites what others have left at its position. A segment is a walk's part in
which every token follows the one before it.

Knows nothing of what layers keep, nor of what tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from dflash_protocol.ids import F32Array, I32Array

MOST_NODES = 64

OnAccept = Callable[[I32Array], None]
"""Have a layer keep the tokens of a path, which are the next ones that count. Shapes: [L]."""


class Tree:
    """Shapes: parents [W] int32, -1 for the last token that counts, which is before `position`."""

    def __init__(self, parents: I32Array, position: int) -> None:
        """Raises: ValueError if a parent does not stand before its child, there are too many, or
        none before them."""
        size = parents.size
        if position < 1:
            raise ValueError("a tree goes on from a token")
        if parents.shape != (size,) or size > MOST_NODES:
            raise ValueError(f"a tree has up to {MOST_NODES} tokens in a row, not {parents.shape}")
        if bool((parents < -1).any() or (parents >= np.arange(size)).any()):
            raise ValueError("a parent must stand before its children, or be -1")
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
        """Where each token would stand if it counted. Shapes: [W]."""
        positions: I32Array = self.position + self.depths
        return positions

    @cached_property
    def walk(self) -> I32Array:
        """All tokens, depth first: children after their parent, the first one at once. [W]."""
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
        """Parts of the walk in which every token follows the one before it."""
        walk = self.walk
        is_first = self.parents[walk[1:]] != walk[:-1]
        return np.split(walk, np.flatnonzero(is_first) + 1) if walk.size else []

    def ancestors(self, count: int) -> I32Array:
        """Each token's last ancestors and itself; what stands before the tree as -1, -2, …, the
        last token that counts first. Shapes: result [W, count]."""
        table = np.empty((self.parents.size, count), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            table[node, -1] = node
            before = table[parent] if parent >= 0 else np.arange(-count, 0, dtype=np.int32)
            table[node, :-1] = before[1:]
        return table

    def check_path(self, path: I32Array) -> None:
        """Raises: ValueError unless each token follows the one before it, from -1 on. Shapes: path
        [L]."""
        before = -1
        for node in path.tolist():
            if not 0 <= node < self.parents.size or self.parents[node] != before:
                raise ValueError(f"{path.tolist()} is not a way through the tree from its root")
            before = node

    def check_size(self, num_tokens: int) -> None:
        """Raises: ValueError unless the tree has so many tokens."""
        if num_tokens != self.parents.size:
            raise ValueError(f"{num_tokens} tokens for a tree of {self.parents.size}")

    def keep(self, on_accept: OnAccept) -> None:
        """To be called, in order, for the path that is accepted."""
        self._on_accept.append(on_accept)

    @property
    def kept(self) -> list[OnAccept]:
        """What layers have wanted kept so far."""
        return [*self._on_accept]

    def accept(self, path: I32Array) -> None:
        """Have all layers keep a path's tokens. Shapes: path [L].

        Raises: as `check_path`.
        """
        self.check_path(path)
        if path.size:
            for on_accept in self._on_accept:
                on_accept(path)


@dataclass(frozen=True, slots=True, eq=False)
class TreeResult:
    """What a model says of a tree's tokens. Shapes: next_token_ids [W], the argmax after each;
    features, by layer id, [W, H]."""

    next_token_ids: I32Array
    features: dict[int, F32Array]


@runtime_checkable
class BranchingCache(Protocol):
    """The part of a cache that lets trees be computed over it."""

    def branching(self, tree: Tree) -> AbstractContextManager[None]:
        """Within it operations compute the tokens of a tree, which goes on from where the sequence
        is; afterwards it is there again, and the tree may be accepted.

        Raises: CheckpointMissing if the sequence is elsewhere.
        """


Attend = Callable[[F32Array, F32Array, F32Array, I32Array], F32Array]
"""Attention of tokens that follow each other: q, k, v, positions."""


def attend_segments(
    tree: Tree, attend: Attend, out: F32Array, *, q: F32Array, k: F32Array, v: F32Array
) -> None:
    """Attention of a tree's tokens: its segments one after the other, each over what its ancestors
    have left behind. Shapes: q, out [W, heads, D]; k, v [W, kv_heads, D]."""
    tree.check_size(q.shape[0])
    positions = tree.positions
    for part in tree.segments:
        out[part] = attend(q[part], k[part], v[part], positions[part])
