"""A tree of guessed tokens on a device, as kernels read it: brought there once for all layers.

Knows nothing of what layers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.cupy.attention_plan import context_bucket
from dflash_runtime.compute.cupy.device import DeviceArray, KernelDevice
from dflash_runtime.compute.cupy.values import StepPositions
from dflash_runtime.compute.trees import MOST_NODES, OnAccept, Tree

GOES_ON, FROM_SEQUENCE, NOWHERE = -2, -1, -1
"""As delta_tree.cu has them."""


class Branch:
    """One tree, of at least one token. Owns: its arrays on the device."""

    def __init__(self, device: KernelDevice, tree: Tree) -> None:
        # What layers want kept refers to this object: it must not refer to who has that.
        self.tree = Tree(tree.parents, tree.position)
        self._keep: Callable[[OnAccept], None] | None = tree.keep
        self._device = device
        self._ancestors: dict[int, DeviceArray] = {}
        self._path: tuple[I32Array, DeviceArray] | None = None

    @property
    def num_tokens(self) -> int:
        return self.tree.parents.size

    @property
    def position(self) -> int:
        """The first one of the tree."""
        return self.tree.position

    def check_size(self, num_tokens: int) -> None:
        """As Tree.check_size."""
        self.tree.check_size(num_tokens)

    def keep(self, on_accept: OnAccept) -> None:
        """As Tree.keep, while the tree is computed."""
        assert self._keep is not None
        self._keep(on_accept)

    def end(self) -> None:
        """The tree was computed."""
        self._keep = None

    @cached_property
    def positions(self) -> StepPositions:
        """Where each token stands. Shapes: array [W]."""
        positions = self.tree.positions
        bucket = context_bucket(int(positions.max()) + 1)
        return StepPositions(self._device.upload(positions), bucket)

    @cached_property
    def begin(self) -> DeviceArray:
        """The tree's first position. Shapes: [1] int32."""
        return self._device.upload(np.array([self.tree.position], np.int32))

    @cached_property
    def paths(self) -> DeviceArray:
        """Tokens from the tree's first position up to each token's own; nothing after that.

        Shapes: [W, MOST_NODES] int32.
        """
        paths = np.zeros((self.num_tokens, MOST_NODES), np.int32)
        depths = self.tree.depths.tolist()
        for node, parent in enumerate(self.tree.parents.tolist()):
            if parent >= 0:
                paths[node] = paths[parent]
            paths[node, depths[node]] = node
        return self._device.upload(paths)

    def ancestors(self, count: int) -> DeviceArray:
        """As Tree.ancestors. Shapes: [W, count] int32."""
        if count not in self._ancestors:
            self._ancestors[count] = self._device.upload(self.tree.ancestors(count))
        return self._ancestors[count]

    @cached_property
    def _walk(self) -> tuple[I32Array, int]:
        return state_walk(self.tree)

    @cached_property
    def walk(self) -> DeviceArray:
        """As `state_walk`. Shapes: [W, 3] int32."""
        return self._device.upload(self._walk[0])

    @property
    def num_places(self) -> int:
        """Of states that are kept at the same time."""
        return self._walk[1]

    def path_on_device(self, path: I32Array) -> DeviceArray:
        """A path that is accepted, brought there once for all layers. Shapes: path, result [L]."""
        if self._path is None or self._path[0] is not path:
            self._path = path, self._device.upload(path)
        return self._path[1]


class Branching:
    """Which tree is being computed, if any: what a model's operations and its cache both know."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self.current: Branch | None = None

    @contextmanager
    def over(self, tree: Tree) -> Iterator[None]:
        """Within it operations are given this tree's tokens."""
        self.current = branch = Branch(self._device, tree)
        try:
            yield
        finally:
            branch.end()
            self.current = None


def state_walk(tree: Tree) -> tuple[I32Array, int]:
    """How states go through a tree, depth first, and how many places it takes to keep some.

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
