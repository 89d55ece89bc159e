"""Launches of sample.cu: the next token of a step, sampled on the device as the host would.

`ChooseTokens` picks between sampling and argmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_protocol.ids import F64Array, U8Array
from dflash_runtime.compute.backend import DeviceSampling, LogitChanges
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.device.mapped_array import Layout
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker
from dflash_runtime.compute.gpu.launch.decode_tokens import ArgmaxLogits

UNDECIDED = -2
"""In a history: the host must sample this token from the logits."""

MOST_VOCABULARY = 1 << 27
NUM_OPTIONS = 5

_NUM_BINS = 12 * 256
_BIN_CAPACITY = 2048
"""Tokens of one bin, which are sorted. Of 152,000 normally distributed logits, whatever their
deviation, at most some 1,000 fall into one bin."""
_THREADS = 256
_MORE_CHANGES = 1024
"""Tokens with a bias."""

SampleArgs = kernel_struct("sample.cuh", "SampleArgs")


@dataclass(frozen=True, slots=True, eq=False)
class SampleInputs:
    """Sampling parameters, random numbers and rules: the host writes them, every step reads them.

    Shapes: options [NUM_OPTIONS] float64, from `option_values`; numbers [N] float64 in [0, 1), by
    the position of the token sampled with it.
    """

    options: DeviceArray
    numbers: DeviceArray
    rules: StepRules


@dataclass(frozen=True, slots=True, eq=False)
class StepRules:
    """Which tokens a ruled step may sample, and how their logits change before; `rule_layout` has
    the arrays, on the host or as kernels read them.

    Shapes: mask [W] uint32, a bit for each token that may be sampled, the lowest first; num_changes
    [1] int32; token_ids [N] int32, divisors, offsets [N] float32, of which the first `num_changes`
    are used, as in LogitChanges.
    """

    mask: Any
    num_changes: Any
    token_ids: Any
    divisors: Any
    offsets: Any


def rule_layout(*, vocab_size: int, num_positions: int) -> Layout:
    """The arrays of StepRules, with room for changes of each token of a sequence, and some more."""
    num_changes = min(vocab_size, num_positions + _MORE_CHANGES)
    return [
        ((-(-vocab_size // 32),), np.uint32),
        ((1,), np.int32),
        ((num_changes,), np.int32),
        ((num_changes,), np.float32),
        ((num_changes,), np.float32),
    ]


def write_rules(rules: StepRules, mask: U8Array | None, changes: LogitChanges | None) -> None:
    """Write the rules of the next step; see CapturedStep.rule. `rules`: the host's arrays."""
    if mask is None:
        rules.mask[:] = 0xFFFFFFFF
    else:
        rules.mask.view(np.uint8)[: mask.size] = mask
        rules.mask.view(np.uint8)[mask.size :] = 0
    size = rules.num_changes[0] = 0 if changes is None else changes.token_ids.size
    if changes is not None:
        rules.token_ids[:size] = changes.token_ids
        rules.divisors[:size] = changes.divisors
        rules.offsets[:size] = changes.offsets


def option_values(
    options: DeviceSampling | None, *, vocab_size: int, is_ruled: bool = False
) -> F64Array:
    """The options as the kernels read them; None: argmax. Shapes: result [NUM_OPTIONS]."""
    if options is None:
        return np.array([0.0] * (NUM_OPTIONS - 1) + [is_ruled])
    return np.array(
        [
            # Infinite: too cold for float64 here, left to the host.
            1.0 / options.temperature if options.temperature > 1e-300 else math.inf,
            min(options.top_k or vocab_size, vocab_size),
            options.top_p,
            abs(math.log(options.min_p)) if options.min_p > 0.0 else math.inf,
            is_ruled,
        ]
    )


class SampleTokens:
    """Samples the next token from one row of logits.

    Owns: device memory that its kernels pass on to each other.
    """

    def __init__(
        self, device: KernelDevice, *, vocab_size: int, bin_capacity: int = _BIN_CAPACITY
    ) -> None:
        """Raises: ValueError for a vocabulary without tokens, or with more than MOST_VOCABULARY."""
        if not 1 <= vocab_size <= MOST_VOCABULARY:
            raise ValueError(f"{vocab_size} tokens, 1 to {MOST_VOCABULARY} can be sampled from")
        self._device, self._arrays = device, ArrayChecker(device)
        self._vocab_size = vocab_size
        warps = _THREADS // device.lanes
        defines = {"VOCAB": vocab_size, "BIN_CAPACITY": bin_capacity, "WARPS": warps}
        module = device.module("sample.cu", defines)
        self._kernels = tuple(
            module.kernel(f"sample_{name}", SampleArgs)
            for name in ("change", "mask", "weigh", "place", "token")
        )
        self._num_blocks = min(-(-vocab_size // (4 * _THREADS)), 4 * device.num_multiprocessors)
        self._counts, self._placed = (device.zeros(_NUM_BINS, np.uint32) for _ in range(2))
        self._weights = device.zeros((_NUM_BINS, 2), np.uint32)
        self._keys = device.empty(vocab_size, np.uint64)

    def launch(
        self,
        logits: DeviceArray,
        partials: DeviceArray,
        inputs: SampleInputs,
        *,
        token_ids: DeviceArray,
        positions: DeviceArray,
        history: DeviceArray,
    ) -> None:
        """Advance `positions` by one; write the sampled token to `token_ids` and, at the new
        position, to `history`.

        Where rounding could decide, `history` gets UNDECIDED and `token_ids` the most likely token.
        If a logit is not finite, `history` gets NOT_FINITE. In a ruled step logits and `partials`
        are overwritten.
        Shapes: logits [1, V] float32; partials [blocks, 1] uint64 of the head; token_ids,
        positions [1] int32; history [N] int32, as long as the numbers of `inputs`.
        Raises: ValueError for an array that is not of this shape, type or device.
        """
        address, rules = self._arrays.address, inputs.rules
        num_partials, capacity = partials.shape[0], history.size
        most_changes = rules.token_ids.size
        args = SampleArgs(
            logits=address("logits", logits, np.float32, T=1, V=self._vocab_size),
            partials=address("partials", partials, np.uint64, blocks=num_partials, T=1),
            mask=address("mask", rules.mask, np.uint32, words=-(-self._vocab_size // 32)),
            num_changes=address("num_changes", rules.num_changes, np.int32, one=1),
            changed_ids=address("token_ids", rules.token_ids, np.int32, N=most_changes),
            divisors=address("divisors", rules.divisors, np.float32, N=most_changes),
            offsets=address("offsets", rules.offsets, np.float32, N=most_changes),
            options=address("options", inputs.options, np.float64, options=NUM_OPTIONS),
            numbers=address("numbers", inputs.numbers, np.float64, N=capacity),
            counts=address("counts", self._counts, np.uint32, bins=_NUM_BINS),
            placed=address("placed", self._placed, np.uint32, bins=_NUM_BINS),
            weights=address("weights", self._weights, np.uint32, bins=_NUM_BINS, words=2),
            keys=address("keys", self._keys, np.uint64, V=self._vocab_size),
            token_ids=address("token_ids", token_ids, np.int32, T=1),
            positions=address("positions", positions, np.int32, T=1),
            history=address("history", history, np.int32, N=capacity),
            num_partials=num_partials,
            capacity=capacity,
            most_changes=most_changes,
        )
        block = _THREADS // self._device.lanes * self._device.lanes
        masking = min(self._num_blocks, num_partials)
        num_blocks = (1, masking, self._num_blocks, self._num_blocks, 1)
        for kernel, blocks in zip(self._kernels, num_blocks, strict=True):
            self._device.launch(kernel, (blocks, 1, 1), block, args)


class ChooseTokens:
    """Argmax or sampling for any shape; compiles each when it is first needed."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._argmax: dict[int, ArgmaxLogits] = {}
        self._sampled: dict[int, SampleTokens] = {}

    def launch(
        self,
        logits: DeviceArray,
        partials: DeviceArray,
        inputs: SampleInputs | None,
        *,
        token_ids: DeviceArray,
        positions: DeviceArray,
        history: DeviceArray,
    ) -> None:
        """Without `inputs` ArgmaxLogits.launch for any number of rows, else SampleTokens.launch."""
        num_tokens, vocab_size = logits.shape
        if inputs is None:
            if num_tokens not in self._argmax:
                argmax = ArgmaxLogits(self._device, num_tokens=num_tokens, advances=True)
                self._argmax[num_tokens] = argmax
            self._argmax[num_tokens].launch(partials, token_ids, positions, history=history)
            return
        if vocab_size not in self._sampled:
            self._sampled[vocab_size] = SampleTokens(self._device, vocab_size=vocab_size)
        self._sampled[vocab_size].launch(
            logits, partials, inputs, token_ids=token_ids, positions=positions, history=history
        )
