"""Launches of a Gated DeltaNet layer's own kernels for a tree's tokens, and for an accepted path.

The layer's state is only read until a path is accepted."""

from __future__ import annotations

import numpy as np

from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker, StepRows
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.delta import (
    RING,
    DeltaArrays,
    DeltaPlan,
    DeltaState,
    DeltaWeights,
    input_args,
    result_args,
    state_args,
    step_warps,
    weight_args,
)

_FILE = "delta_tree.cu"

DeltaTreeArgs = kernel_struct("delta_tree.cu", "DeltaTreeArgs")
DeltaAcceptArgs = kernel_struct("delta_tree.cu", "DeltaAcceptArgs")
DeltaKeepArgs = kernel_struct("delta_tree.cu", "DeltaKeepArgs")


class DeltaTree:
    """A tree through a layer: each token continues from its parent's state, as in a step."""

    def __init__(self, device: KernelDevice, shape: DeltaPlan) -> None:
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        warps = step_warps(device)
        self._block = warps * device.lanes
        module = device.module(_FILE, shape.step_defines(warps))
        self._tree = module.kernel("delta_tree", DeltaTreeArgs)
        self._accept = module.kernel("delta_accept", DeltaAcceptArgs)
        self._keep = module.kernel("delta_keep", DeltaKeepArgs)

    def launch(
        self,
        inputs: DeltaArrays,
        weights: DeltaWeights,
        state: DeltaState,
        *,
        branch: Branch,
        out: StepRows,
    ) -> None:
        """`state` is the one before the tree, and is only read. Arrays as for DeltaStep.launch, for
        the tree's W tokens.

        Raises: ValueError for an array that is missing, or not of this shape, type or device;
        DeviceOutOfMemory.
        """
        shape, arrays, count = self.shape, self._arrays, branch.num_tokens
        places = (branch.num_places, *shape.state_shape[1:])
        # Its memory may be reused right after the launch, in the order of the same stream.
        kept = None
        if branch.num_places:
            kept = branch.memory(
                ("states", *places), lambda: self._device.empty(places, np.float32)
            )
        args = DeltaTreeArgs(
            **input_args(arrays, shape, inputs, count=count),
            **weight_args(arrays, shape, weights),
            **state_args(arrays, shape, state),
            walk=arrays.address("walk", branch.walk, np.int32, T=count, three=3),
            ancestors=self._ancestors(branch),
            begin=arrays.address("begin", branch.begin, np.int32, one=1),
            kept=arrays.optional(
                "kept",
                kept,
                np.float32,
                **dict(zip(("places", "heads", "rows", "columns"), places, strict=True)),
            ),
            **result_args(arrays, shape, inputs, weights=weights, out=out, count=count),
            key_eps=weights.key_eps,
            norm_eps=weights.norm_eps,
            num_tokens=count,
        )
        self._device.launch(self._tree, (shape.num_heads, 1, 1), self._block, args)

    def accept(
        self,
        inputs: DeltaArrays,
        weights: DeltaWeights,
        state: DeltaState,
        *,
        branch: Branch,
        path: DeviceArray,
    ) -> None:
        """Advance the state along a path, whose inputs were given to `launch`.

        Shapes: path [L] int32, at least one.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, arrays, (length,) = self.shape, self._arrays, path.shape
        given = input_args(arrays, shape, inputs, count=branch.num_tokens)
        kept = state_args(arrays, shape, state)
        where = {
            "path": arrays.address("path", path, np.int32, L=length),
            "begin": arrays.address("begin", branch.begin, np.int32, one=1),
            "ring": kept["ring"],
            "num_tokens": length,
        }
        self._device.launch(
            self._accept,
            (shape.num_heads, 1, 1),
            self._block,
            DeltaAcceptArgs(
                **given,
                **weight_args(arrays, shape, weights),
                **where,
                ancestors=self._ancestors(branch),
                state=kept["state"],
                key_eps=weights.key_eps,
            ),
        )
        self._device.launch(
            self._keep,
            (min(length, RING), 1, 1),
            self._block,
            DeltaKeepArgs(inputs=given["inputs"], **where),
        )

    def _ancestors(self, branch: Branch) -> int:
        taps = self.shape.num_taps
        return self._arrays.address(
            "ancestors", branch.ancestors(taps), np.int32, T=branch.num_tokens, taps=taps
        )
