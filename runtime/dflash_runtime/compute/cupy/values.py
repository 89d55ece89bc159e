"""What adapters hold in their hands on a GPU: rows on the device, and work that is put off.

An adapter says norm, project, route, add, one after the other; kernels do several of these at once.
So an operation whose result only the next one reads gives a value that says what is to be done, and
the next one does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dflash_adapters.ops import RoutingRule
from dflash_adapters.rope import RopeTable
from dflash_protocol.ids import Phase
from dflash_runtime.compute.cupy.buffers import Buffer
from dflash_runtime.compute.cupy.device import DeviceArray
from dflash_runtime.compute.cupy.matrix import DeviceMatrix

if TYPE_CHECKING:
    from dflash_runtime.compute.cupy.resident import ResidentLayer


@dataclass(slots=True, eq=False)
class Sides:
    """Rows as kernels of a step read them besides; what they do not read is None.

    Shapes: values [T, H] float32; quants and meta as decode_linear.LinearInputs has them.
    """

    values: Buffer | None
    quants: Buffer | None
    meta: Buffer | None


@dataclass(slots=True, eq=False)
class Rows:
    """Float32 rows. Shapes: array [T, columns], contiguous.

    Owns: `buffers`, whose memory others may take once nobody holds these rows.
    """

    array: DeviceArray
    buffers: tuple[Buffer, ...] = ()
    version: int = 0
    """How often they were written to since they were made."""
    sides: Sides | None = None
    """The same rows as int8, if what wrote them has written these too."""

    @property
    def num_tokens(self) -> int:
        return self.array.shape[0]

    @property
    def columns(self) -> int:
        return self.array.shape[1]

    def __getitem__(self, tokens: slice) -> Rows:
        """Some of the rows, in place."""
        return Rows(self.array[tokens], self.buffers)


@dataclass(slots=True, eq=False)
class Normed:
    """``rms_norm(rows)``, to be computed by whoever multiplies them."""

    rows: Rows
    weight: DeviceArray
    eps: float
    version: int = field(init=False)
    sides: Sides | None = None
    """Of a step: the same rows, once a kernel has written them."""

    def __post_init__(self) -> None:
        self.version = self.rows.version

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens

    def require_unchanged(self) -> None:
        """Raises: RuntimeError if the rows were written to after they were to be normalised."""
        if self.version != self.rows.version:
            raise RuntimeError("rows were changed before their norm was used")


@dataclass(slots=True, eq=False)
class Rotation:
    """Norm of each head, where there is a weight, and rotation, to be computed by attention."""

    table: RopeTable
    weight: DeviceArray | None
    eps: float


@dataclass(slots=True, eq=False)
class Heads:
    """Rows as heads: [T, heads, D]."""

    rows: Rows
    num_heads: int
    rotation: Rotation | None = None


@dataclass(slots=True, eq=False)
class Product:
    """``x @ matrix.T``, to be computed by whoever reads it."""

    x: Normed | Rows
    matrix: DeviceMatrix


@dataclass(slots=True, eq=False)
class Choosing:
    """Experts to be chosen from logits, by whoever needs to know first."""

    logits: Rows
    rule: RoutingRule
    is_done: bool = False


@dataclass(slots=True, eq=False)
class Chosen:
    """Ids, or weights, of the chosen experts, once `choosing` is done.

    Shapes: [T, K] int32, or float32.
    """

    buffer: Buffer
    choosing: Choosing | None = None

    @property
    def array(self) -> DeviceArray:
        return self.buffer.array


@dataclass(slots=True, eq=False)
class ExpertSums:
    """A layer's routed experts, to be computed by whoever adds them to the residual."""

    layer: ResidentLayer | None
    """None: no expert of the layer is here."""
    x: Normed
    topk_ids: Chosen
    topk_weights: Chosen
    phase: Phase
    """Which kernels compute them: the parent's, and any daemon's, must be the same."""
    parts: tuple[Buffer, ...] = ()
    """Float64 sums [T, H] of all pairs, of experts here and elsewhere, if somebody else has had a
    share: at most two."""


DeviceValue: TypeAlias = Rows | Normed | Heads | Product | Chosen | ExpertSums


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """Token ids of a step that are on the device. Shapes: array [T] int32."""

    array: DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class StepPositions:
    """Positions of a step that are on the device, so that a recorded step can be replayed.

    Shapes: array [T] int32, ascending by one; all lie below `bucket` and fit the cache.
    """

    array: DeviceArray
    bucket: int
