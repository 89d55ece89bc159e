"""Launch record of draw.cu: the next token of a step, drawn on the device as on the host.

Beside it what chooses between that and the most likely token.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import F64Array
from dflash_runtime.compute.backend import DeviceSampling
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_variants import KernelVariant
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker
from dflash_runtime.compute.gpu.launch.decode_tokens import Sample

UNDECIDED = -2
"""In a history: the token that the host is to draw from the logits."""

MOST_VOCABULARY = 1 << 27
NUM_OPTIONS = 4

_NUM_BINS = 12 * 256
_BIN_CAPACITY = 2048
"""Of tokens that must be sorted to tell who comes first, as their logits are so much alike: some
1,000 at most of 152,000 that are normally distributed, however widely."""
_THREADS = 256


class DrawArgs(ctypes.Structure):
    """Mirrors draw.cuh."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("placed", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("num_partials", ctypes.c_int),
        ("capacity", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DrawInputs:
    """How tokens are drawn: what the host writes, and every step reads.

    Shapes: options [NUM_OPTIONS] float64, as `option_values` says; numbers [N] float64, from 0 to
    below 1, by the position of the token that is drawn with it.
    """

    options: DeviceArray
    numbers: DeviceArray


def option_values(options: DeviceSampling | None, *, vocab_size: int) -> F64Array:
    """What kernels are given; None: argmax. Shapes: result [NUM_OPTIONS]."""
    if options is None:
        return np.zeros(NUM_OPTIONS)
    return np.array(
        [
            # What is too cold for these numbers is left to the host, as infinite.
            1.0 / options.temperature if options.temperature > 1e-300 else math.inf,
            min(options.top_k or vocab_size, vocab_size),
            options.top_p,
            abs(math.log(options.min_p)) if options.min_p > 0.0 else math.inf,
        ]
    )


class DrawTokens:
    """The next token of one row of logits.

    Owns: what its kernels leave for each other, on the device.
    """

    def __init__(
        self, device: KernelDevice, *, vocab_size: int, bin_capacity: int = _BIN_CAPACITY
    ) -> None:
        """Raises: ValueError for a vocabulary without tokens, or with more than MOST_VOCABULARY."""
        if not 1 <= vocab_size <= MOST_VOCABULARY:
            raise ValueError(f"{vocab_size} tokens, 1 to {MOST_VOCABULARY} can be drawn from")
        self._device, self._arrays = device, ArrayChecker(device)
        self._vocab_size = vocab_size
        warps = _THREADS // device.lanes
        defines = _defines(vocab_size=vocab_size, bin_capacity=bin_capacity, warps=warps)
        module = device.module("draw.cu", defines)
        self._weigh, self._place, self._token = (
            module.kernel(f"draw_{name}", DrawArgs) for name in ("weigh", "place", "token")
        )
        self._num_blocks = min(-(-vocab_size // (4 * _THREADS)), 4 * device.num_multiprocessors)
        self._counts, self._placed = (device.zeros(_NUM_BINS, np.uint32) for _ in range(2))
        self._weights = device.zeros((_NUM_BINS, 2), np.uint32)
        self._keys = device.empty(vocab_size, np.uint64)

    def launch(
        self,
        logits: DeviceArray,
        partials: DeviceArray,
        inputs: DrawInputs,
        *,
        token_ids: DeviceArray,
        positions: DeviceArray,
        history: DeviceArray,
    ) -> None:
        """The drawn token into `token_ids`, and into `history` at its position, which is one
        further and is that of `positions` afterwards.

        What the device cannot be sure of is UNDECIDED in `history`, and the most likely token in
        `token_ids`. Logits that are not finite are NOT_FINITE in `history`.
        Shapes: logits [1, V] float32; partials [blocks, 1] uint64 of the head; token_ids,
        positions [1] int32; history [N] int32, as long as the numbers of `inputs`.
        Raises: ValueError for an array that is not of this shape, type or device.
        """
        address = self._arrays.address
        num_partials, capacity = partials.shape[0], history.size
        args = DrawArgs(
            logits=address("logits", logits, np.float32, T=1, V=self._vocab_size),
            partials=address("partials", partials, np.uint64, blocks=num_partials, T=1),
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
        )
        block = _THREADS // self._device.lanes * self._device.lanes
        for kernel in (self._weigh, self._place):
            self._device.launch(kernel, (self._num_blocks, 1, 1), block, args)
        self._device.launch(self._token, (1, 1, 1), block, args)


class ChooseTokens:
    """The most likely tokens, or drawn ones, for any shape, each compiled when it is first met."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._samples: dict[int, Sample] = {}
        self._draws: dict[int, DrawTokens] = {}

    def launch(
        self,
        logits: DeviceArray,
        partials: DeviceArray,
        inputs: DrawInputs | None,
        *,
        token_ids: DeviceArray,
        positions: DeviceArray,
        history: DeviceArray,
    ) -> None:
        """Without `inputs` as Sample.launch, of any number of rows; else as DrawTokens.launch."""
        num_tokens, vocab_size = logits.shape
        if inputs is None:
            if num_tokens not in self._samples:
                sample = Sample(self._device, num_tokens=num_tokens, advances=True)
                self._samples[num_tokens] = sample
            self._samples[num_tokens].launch(partials, token_ids, positions, history=history)
            return
        if vocab_size not in self._draws:
            self._draws[vocab_size] = DrawTokens(self._device, vocab_size=vocab_size)
        self._draws[vocab_size].launch(
            logits, partials, inputs, token_ids=token_ids, positions=positions, history=history
        )


def _defines(*, vocab_size: int, bin_capacity: int, warps: int) -> dict[str, int | str]:
    return {"VOCAB": vocab_size, "BIN_CAPACITY": bin_capacity, "WARPS": warps}


KERNEL_VARIANTS = (
    KernelVariant("draw.cu", _defines(vocab_size=1003, bin_capacity=_BIN_CAPACITY, warps=4)),
)
