"""Trees of draft tokens on a device: arrays that kernels read, uploaded once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.trees import MOST_NODES, Tree

GOES_ON, FROM_SEQUENCE, NOWHERE = -2, -1, -1
"""Mirrors delta_tree.cu."""


_Key: TypeAlias = tuple[object, ...]
_Thing = TypeVar("_Thing")


class Branch:
    """A tree of at least one token. If it `stays`, `aim` writes another tree of the kind to the
    same arrays, so that captured graphs can be replayed.

    Owns: its arrays on the device.
    """

    def __init__(self, device: KernelDevice, tree: Tree, *, stays: bool = False) -> None:
        self._device, self._stays = device, stays
        self._arrays: dict[_Key, tuple[DeviceArray, Callable[[Tree], I32Array]]] = {}
        self._memory: dict[_Key, Any] = {}
        self.aim(tree)

    @staticmethod
    def kind_of(tree: Tree, *, has_states: bool) -> tuple[int, int, int]:
        """What trees of a kind share: number of tokens, context bucket and, if there are layers
        with states, the number of places for these."""
        num_places = state_walk(tree)[1] if has_states else 0
        return tree.parents.size, _bucket_of(tree), num_places

    def aim(self, tree: Tree) -> None:
        """Replace the tree by another one of the same kind."""
        # Layers' callbacks in the tree refer to this object, so it must not refer to them.
        self.tree = Tree(tree.parents, tree.position)
        self._path: tuple[I32Array, DeviceArray] | None = None
        for array, make in self._arrays.values():
            self._device.write(array, make(self.tree))

    @property
    def num_tokens(self) -> int:
        return self.tree.parents.size

    @property
    def position(self) -> int:
        """The tree's first position."""
        return self.tree.position

    def memory(self, key: _Key, make: Callable[[], _Thing]) -> _Thing:
        """Uninitialised memory of a layer for the tree; the same for the same key if this object
        stays."""
        if not self._stays:
            return make()
        if key not in self._memory:
            self._memory[key] = make()
        kept: _Thing = self._memory[key]
        return kept

    @property
    def positions(self) -> DeviceArray:
        """Position of each token. Shapes: [W] int32."""
        return self._array(("positions",), lambda tree: tree.positions)

    @property
    def begin(self) -> DeviceArray:
        """The tree's first position. Shapes: [1] int32."""
        return self._array(("begin",), lambda tree: np.array([tree.position], np.int32))

    @property
    def paths(self) -> DeviceArray:
        """Tokens from the tree's first position up to each token's own; nothing after that.

        Shapes: [W, MOST_NODES] int32.
        """
        return self._array(("paths",), _paths_of)

    def ancestors(self, count: int) -> DeviceArray:
        """Tree.ancestors on the device. Shapes: [W, count] int32."""
        return self._array(("ancestors", count), lambda tree: tree.ancestors(count))

    @property
    def walk(self) -> DeviceArray:
        """`state_walk` on the device. Shapes: [W, 3] int32."""
        return self._array(("walk",), lambda tree: state_walk(tree)[0])

    @cached_property
    def num_places(self) -> int:
        """Most states kept at the same time."""
        return state_walk(self.tree)[1]

    def _array(self, key: _Key, make: Callable[[Tree], I32Array]) -> DeviceArray:
        if key not in self._arrays:
            self._arrays[key] = self._device.upload(make(self.tree)), make
        return self._arrays[key][0]

    def path_on_device(self, path: I32Array) -> DeviceArray:
        """An accepted path on the device, uploaded once for all layers. Shapes: both [L]."""
        if self._path is None or self._path[0] is not path:
            self._path = path, self._device.upload(path)
        return self._path[1]


def _bucket_of(tree: Tree) -> int:
    return context_bucket(int(tree.positions.max()) + 1)


def _paths_of(tree: Tree) -> I32Array:
    paths = np.zeros((tree.parents.size, MOST_NODES), np.int32)
    depths = tree.depths.tolist()
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            paths[node] = paths[parent]
        paths[node, depths[node]] = node
    return paths


def state_walk(tree: Tree) -> tuple[I32Array, int]:
    """The depth-first order of states through a tree, and the number of places for kept ones.

    Each step is a token, where its parent's state is (GOES_ON: it is that of the step before;
    FROM_SEQUENCE; or a place), and the place where its own is kept until the last of several tokens
    that follow it has begun, or NOWHERE. Shapes: result [W, 3].
    """
    parents = tree.parents.tolist()
    children_left = np.bincount(tree.parents + 1, minlength=tree.parents.size + 1)[1:]
    place_of: dict[int, int] = {}
    free: list[int] = []
    num_places, before = 0, -1
    walk = np.empty((tree.parents.size, 3), np.int32)
    for step, node in enumerate(tree.walk.tolist()):
        parent = parents[node]
        if parent < 0:
            source = FROM_SEQUENCE
        else:
            source = GOES_ON if parent == before else place_of[parent]
            children_left[parent] -= 1
            if parent in place_of and not children_left[parent]:
                free.append(place_of.pop(parent))
        place = NOWHERE
        if children_left[node] > 1:
            if not free:
                free.append(num_places)
                num_places += 1
            place = place_of[node] = free.pop()
        walk[step] = node, source, place
        before = node
    return walk, num_places
