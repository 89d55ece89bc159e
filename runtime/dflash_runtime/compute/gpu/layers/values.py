"""Values that adapters pass between operations on a GPU: rows on the device, and deferred work.

An adapter calls norm, project, route and add one after the other; a kernel does several of these at
once. So an operation whose result only the next one reads returns a description of the work, and
the next operation does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dflash_adapters.ops import RoutingRule
from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_adapters.spec import DeltaShape
from dflash_protocol.ids import Phase
from dflash_runtime.compute.gpu.device.buffers import Buffer, array_of
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.launch.decode_experts import StepRows
from dflash_runtime.compute.gpu.layers.kept_rows import KeptRows
from dflash_runtime.compute.gpu.layers.matrix import DeviceMatrix

if TYPE_CHECKING:
    from dflash_runtime.compute.gpu.layers.resident import ResidentLayer


@dataclass(slots=True, eq=False)
class Sides:
    """Further forms of rows for a step's kernels; those that no kernel reads are None.

    Shapes: values [T, H] float32; quants and meta: see decode_linear.LinearInputs.
    """

    values: Buffer | None
    quants: Buffer | None
    meta: Buffer | None

    def __getitem__(self, tokens: slice) -> Sides:
        """The forms of some of the rows, in place."""

        def some(buffer: Buffer | None) -> Buffer | None:
            return None if buffer is None else Buffer(buffer.array[tokens])

        return Sides(some(self.values), some(self.quants), some(self.meta))


@dataclass(slots=True, eq=False)
class F32Rows:
    """Float32 rows. Shapes: array [T, columns], contiguous.

    Owns: `buffers`, which are reused once these rows are not referred to any more.
    """

    array: DeviceArray
    buffers: tuple[Buffer, ...] = ()
    version: int = 0
    """Number of writes since they were made."""
    sides: Sides | None = None
    """The same rows as int8, if the kernel that wrote the rows has written them."""
    of_step: bool = False
    """Computed by a step's kernels, whatever their number: a tree's too."""

    @property
    def num_tokens(self) -> int:
        return self.array.shape[0]

    @property
    def is_step(self) -> bool:
        """Whether a step's kernels compute from them."""
        return self.of_step or self.num_tokens <= MOST_TOKENS

    @property
    def columns(self) -> int:
        return self.array.shape[1]

    @property
    def to_fill(self) -> StepRows:
        """The rows, and the sides that their kernel must write too."""
        sides = self.sides
        return StepRows(
            values=self.array,
            quants=None if sides is None else array_of(sides.quants),
            meta=None if sides is None else array_of(sides.meta),
        )

    def __getitem__(self, tokens: slice) -> F32Rows:
        """Some of the rows, in place."""
        sides = None if self.sides is None else self.sides[tokens]
        return F32Rows(self.array[tokens], self.buffers, sides=sides, of_step=self.of_step)


@dataclass(slots=True, eq=False)
class Normed:
    """``rms_norm(rows)``, computed by the product that reads it."""

    rows: F32Rows
    weight: DeviceArray
    eps: float
    version: int = field(init=False)
    sides: Sides | None = None
    """In a step: the normalised rows, once a kernel has written them."""

    def __post_init__(self) -> None:
        self.version = self.rows.version

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens

    @property
    def is_step(self) -> bool:
        """See F32Rows.is_step."""
        return self.rows.is_step

    def __getitem__(self, tokens: slice) -> Normed:
        """The same of some of the rows, which are unchanged."""
        some = Normed(self.rows[tokens], self.weight, self.eps)
        some.sides = None if self.sides is None else self.sides[tokens]
        return some

    def require_unchanged(self) -> None:
        """Raises: RuntimeError if the rows were changed since."""
        if self.version != self.rows.version:
            raise RuntimeError("rows were changed before their norm was used")


@dataclass(slots=True, eq=False)
class Rotation:
    """Norm of each head, if there is a weight, and rotation, computed by attention."""

    table: RopeTable
    weight: DeviceArray | None
    eps: float


@dataclass(slots=True, eq=False)
class HeadRows:
    """Rows as heads: [T, heads, D], or `part` of each: from its first column to its last."""

    rows: F32Rows
    num_heads: int
    rotation: Rotation | None = None
    part: tuple[int, int] | None = None
    temperature: AttentionTemperature | None = None
    """Temperature of queries, applied by attention."""

    @property
    def dim(self) -> int:
        """Columns of a head."""
        if self.part is None:
            return self.rows.columns // self.num_heads
        return self.part[1] - self.part[0]


@dataclass(frozen=True, slots=True, eq=False)
class Activated:
    """``silu(gate) * up`` of a step, computed by the product that reads it."""

    gate: F32Rows
    up: F32Rows
    sides: None = None

    @property
    def num_tokens(self) -> int:
        return self.gate.num_tokens

    @property
    def is_step(self) -> bool:
        """See F32Rows.is_step."""
        return self.gate.is_step

    def __getitem__(self, tokens: slice) -> Activated:
        """The same of some of the rows."""
        return Activated(self.gate[tokens], self.up[tokens])


@dataclass(slots=True, eq=False)
class Product:
    """``x @ matrix.T``, computed by the first operation that reads it."""

    x: Normed | F32Rows | Activated
    matrix: DeviceMatrix
    rows: F32Rows | None = None
    """The product, once it is computed."""

    @property
    def is_step(self) -> bool:
        """See F32Rows.is_step."""
        return self.x.is_step


@dataclass(frozen=True, slots=True, eq=False)
class GatedProduct:
    """A product of a step times ``sigmoid(gate)``, computed by the operation that adds it.

    Shapes: gate [T, 1].
    """

    product: Product
    gate: F32Rows


@dataclass(slots=True, eq=False)
class Choosing:
    """Experts to be chosen from logits, by the first kernel that needs the choice."""

    logits: F32Rows
    rule: RoutingRule
    ids: Buffer
    weights: Buffer
    """Destinations. Shapes: both [T, K]."""
    bias: DeviceArray | None = None
    """Bias of experts, used for the choice only."""
    is_done: bool = False


@dataclass(slots=True, eq=False)
class Chosen:
    """Ids, or weights, of the chosen experts, once `choosing` is done.

    Shapes: [T, K] int32, or float32.
    """

    buffer: Buffer
    choosing: Choosing | None = None
    both: DeviceArray | None = None
    """Ids and then weights, as int32, if they lie one after the other. Shapes: [2, T, K]."""

    @property
    def array(self) -> DeviceArray:
        return self.buffer.array


ExpertInputs: TypeAlias = Normed | F32Rows
"""Input of experts: rows to be normalised, or rows as they are, which do not change any more."""


@dataclass(slots=True, eq=False)
class ExpertSums:
    """A layer's routed experts, computed by the operation that adds them to the residual."""

    layer: ResidentLayer | None
    """None: no expert of the layer is on this device."""
    x: ExpertInputs
    topk_ids: Chosen
    topk_weights: Chosen
    phase: Phase
    """Decides the kernels: the parent and the daemons must use the same."""
    parts: tuple[Buffer, ...] = ()
    """Float64 sums [T, H] of local and of remote experts, if some are remote: at most two."""
    add_to: Callable[[F32Rows], None] | None = None
    """Launches the kernel that adds all sums to a residual, if a MoE block has deferred that."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[T, H]."""
        return (self.x if isinstance(self.x, F32Rows) else self.x.rows).array.shape


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns `first` to `last` of rows, or of each of their heads, where they lie.

    Shapes: rows [T, heads * D]; what is meant: [T, heads * (last - first)].
    """

    rows: F32Rows
    num_heads: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Convolved:
    """A causal convolution, computed by the delta rule that reads it.

    Shapes: rows [T, channels]; weight [channels, taps].
    """

    rows: F32Rows
    weight: DeviceArray
    cache: KeptRows
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class DeltaHeads:
    """A gated delta rule, computed when norm and gate are known, or by the first that reads it.

    Shapes: alpha, beta [T, heads]; a, dt_bias [heads].
    """

    mixed: Convolved
    alpha: F32Rows
    beta: F32Rows
    shape: DeltaShape
    a: DeviceArray
    dt_bias: DeviceArray
    eps: float
    positions: StepPositions
    norm: tuple[DeviceArray, float] | None = None
    """Weight and eps of each head's norm."""


DeviceValue: TypeAlias = (
    F32Rows
    | Normed
    | Activated
    | HeadRows
    | Product
    | GatedProduct
    | Chosen
    | ExpertSums
    | Columns
    | Convolved
    | DeltaHeads
)


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """Token ids of a step, on the device. Shapes: array [T] int32."""

    array: DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class StepPositions:
    """Positions of a step, on the device, so that a captured step can be replayed.

    Shapes: array [T] int32, ascending by one; all lie below `bucket` and fit the cache.
    """

    array: DeviceArray
    bucket: int
