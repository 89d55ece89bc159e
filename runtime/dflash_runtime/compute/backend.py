"""What a compute backend offers: Ops for the parent's dense work, and expert FFNs.

Knows nothing of placement or processes: a bank holds the experts it was told to hold, numbered by
local id, and computes the pairs it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Protocol

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import MoeLayer
from dflash_adapters.ops import KvType, Ops
from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray, F64Array, I32Array
from dflash_protocol.routed_batch import RoutedBatch


class ExpertBank(Protocol):
    """The experts of one layer that one owner holds, by local id."""

    @property
    def layer(self) -> MoeLayer: ...

    @property
    def num_experts(self) -> int: ...

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        """Add ``weight * FFN(hidden)`` of every pair to the row of its token.

        The float32 bits of one pair's term depend only on its hidden row, its weight, the expert
        and the backend's numeric class, never on what else is in the batch; terms are added in
        float64. Expert ids of the batch are local ids.
        Shapes: batch.hidden [T, H] float32; out [T, H] float64, added to in place.
        """


class ComputeBackend(Protocol):
    """One device's way to compute: dense Ops and expert banks of the same numeric class."""

    @property
    def name(self) -> str:
        """``reference``, ``cpu``, …"""

    @property
    def numeric_class(self) -> str:
        """Names everything that decides the bits of a result: kernels, their version, the CPU."""

    @property
    def ops(self) -> Ops[AnyArray]: ...

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ExpertBank:
        """Make the given experts ready; local id = position in `global_expert_ids`. [E_local]

        Banks share what they have made of the same expert of the same file.
        """

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Give back the memory of what was made of these experts; no bank of them is used again.

        The file's own bytes are the caller's business.
        """

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Have every kernel ready that experts of these types need; with `kv_type` a whole model.

        `on_progress` is called with the number of steps that are done, and of all.
        """

    def rest(self) -> None:
        """Nothing will be asked of this backend for a while: others may have the cores."""

    def close(self) -> None:
        """End worker threads. The backend must not be used afterwards."""


class BackendName(StrEnum):
    """Backends that can be asked for by name; ``auto`` picks the fastest that works here."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
