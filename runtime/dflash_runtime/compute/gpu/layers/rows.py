"""Rows of activations on a device, and the norm that a product may apply to them as it reads."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.step_order import MOST_TOKENS


@dataclass(slots=True, eq=False)
class Rows:
    """Float32 rows, and the same rows as int8 if the kernel that wrote them has written these too.

    Shapes: array [T, columns] float32, contiguous; quants and meta: see decode_linear.LinearInputs.
    Owns: `buffers`, which are reused once these rows are not referred to any more.
    """

    array: DeviceArray
    quants: DeviceArray | None = None
    meta: DeviceArray | None = None
    of_step: bool = False
    """Computed by a step's kernels, whatever their number: a tree's too."""
    buffers: tuple[Buffer, ...] = ()
    partials: tuple[DeviceArray, ...] = ()
    """Of a step's logits, in parts of up to MOST_TOKENS: what each block has found to be the
    largest."""

    @property
    def num_tokens(self) -> int:
        return self.array.shape[0]

    @property
    def columns(self) -> int:
        return self.array.shape[1]

    @property
    def is_step(self) -> bool:
        """Whether a step's kernels compute from them."""
        return self.of_step or self.array.shape[0] <= MOST_TOKENS

    @property
    def forms(self) -> StepRows:
        """The arrays, for kernels of steps that read or write several of them."""
        return StepRows(values=self.array, quants=self.quants, meta=self.meta)

    def __getitem__(self, tokens: slice) -> Rows:
        """Some of the rows, in place."""
        quants, meta = self.quants, self.meta
        return Rows(
            self.array[tokens],
            None if quants is None else quants[tokens],
            None if meta is None else meta[tokens],
            self.of_step,
            self.buffers,
        )

    def forget_int8(self) -> None:
        """The float32 rows are being changed in place."""
        self.quants = self.meta = None


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """``weight * x / sqrt(mean(x²) + eps)``. Shapes: weight [columns] float32."""

    weight: DeviceArray
    eps: float


@dataclass(slots=True, eq=False)
class Input:
    """Rows as products and experts read them: with a norm, normalised by the kernels that read
    them. They must not change while this is used."""

    rows: Rows
    norm: Norm | None = None
    normed: Rows | None = None
    """In a step: the rows after the norm, once a kernel has written them."""

    def __post_init__(self) -> None:
        if self.norm is None:
            self.normed = self.rows

    def __getitem__(self, tokens: slice) -> Input:
        """The same of some of the rows."""
        return Input(
            self.rows[tokens], self.norm, None if self.normed is None else self.normed[tokens]
        )
