"""A step whose arrays are on a device, as the layers of a GPU's model compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_tokens import check_token_ids
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.model import Step
from dflash_runtime.compute.step_order import MOST_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStep(Step):
    """Token ids and positions lie on the device, where the kernel before a step may write them.

    All positions lie below the bucket of `context`, and fit the cache.
    """

    token_ids: Any
    """A DeviceArray, as `positions`. Shapes: those of Step."""
    positions: Any
    first_position: int | None = None
    """By which the host books what the cache keeps. None in a captured step, which the cache's
    `begin_step` and `count_step` book, and in a tree, whose tokens are not kept yet."""
    branch: Branch | None = None
    """The arrays of `tree`."""

    @property
    def cache(self) -> DeviceKvCache:
        (cache,) = self.caches
        assert isinstance(cache, DeviceKvCache)
        return cache

    @property
    def num_tokens(self) -> int:
        num_tokens: int = self.positions.shape[0]
        return num_tokens

    @property
    def is_chunk(self) -> bool:
        """Whether a chunk's kernels compute it, instead of a step's."""
        return self.branch is None and self.num_tokens > MOST_TOKENS

    @property
    def bucket(self) -> int:
        """The context bucket, which decides attention's kernels."""
        return context_bucket(self.context)


def place(step: Step, device: KernelDevice, *, vocab_size: int) -> PlacedStep:
    """Bring a step's arrays to the device.

    Raises: ContextExceeded if its rows do not fit the cache; ValueError for ids outside the
    vocabulary, or positions with gaps.
    """
    check_token_ids(step.token_ids, vocab_size)
    (cache,) = step.caches
    assert isinstance(cache, DeviceKvCache)  # another backend's are never given to this one
    token_ids, first, branch = device.upload(step.token_ids), None, None
    if step.tree is not None:
        branch = Branch(device, step.tree)
        positions = branch.positions
    else:
        first, last = int(step.positions[0]), int(step.positions[-1])
        if last - first + 1 != step.positions.size:
            raise ValueError("positions must ascend by one")
        cache.check_fits(first, step.positions.size)
        positions = device.upload(step.positions)
    return PlacedStep(
        token_ids,
        positions,
        (cache,),
        step.phase,
        step.context,
        tree=step.tree,
        first_position=first,
        branch=branch,
    )
