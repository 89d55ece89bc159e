"""Expert FFNs of a prefill chunk: gate, up and activation, down, the sum of each token's terms.

Products of tiles of the groups that ExpertGroups computed on the device, with no wait for the host.
The bits of a pair's term depend on its hidden row, weight and expert only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Grid,
    Kernel,
    KernelDevice,
    PreparedLaunch,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.launch.prefill_expert_kernels import (
    ActivationArgs,
    CombineArgs,
    ExpertKernelCache,
    ExpertKernels,
    GemmDownArgs,
    GemmGateUpArgs,
    LevelArgs,
)
from dflash_runtime.compute.gpu.launch.prefill_groups import GroupedPairs
from dflash_runtime.compute.gpu.launch.prefill_rows import PreparedRows
from dflash_runtime.compute.gpu.launch.prefill_tiles import Products, Tile, activation_parts
from dflash_runtime.compute.gpu.launch.prefill_weights import (
    AS_STORED,
    IN_UNITS,
    MatrixChoice,
    StoredExperts,
    StoredProjection,
    WeightScratch,
    check_type,
    half_row_bytes,
)

_COMBINE_THREADS = _LEVEL_THREADS = 256
_MOST_ROWS = 64
"""Pairs of a group, on average, up to which matrices are read without conversion. With more it is
faster to convert them to halves first."""


@dataclass(slots=True, eq=False)
class _Buffers:
    """What kernels write for those that follow. Activations grow with the layers' types.

    Shapes: terms [P, H], scales [P] float32; shifts [P, segments] uint8; activations: bytes of [P,
    F] floats, or halves in parts.
    """

    terms: DeviceArray
    scales: DeviceArray
    shifts: DeviceArray
    activations: DeviceArray


class ExpertPrefill:
    """FFNs of experts ``hidden_size -> ffn_size -> hidden_size`` for up to `max_pairs` pairs.

    One object serves all layers of that shape. After `prepare` was called with each layer's types
    nothing is allocated or compiled.
    """

    def __init__(
        self,
        device: KernelDevice,
        *,
        hidden_size: int,
        ffn_size: int,
        max_pairs: int,
        products: Products,
        scratch: WeightScratch,
    ) -> None:
        for size in (hidden_size, ffn_size):
            check_type(TensorType.F32, size)
        self.hidden_size = hidden_size
        self.ffn_size = ffn_size
        self.max_pairs = max_pairs
        self.products = products
        self._device = device
        self._scratch = scratch
        self._kernels = ExpertKernelCache(
            device, products, hidden_size=hidden_size, ffn_size=ffn_size
        )
        combine = device.module("combine.cu", {"HIDDEN": hidden_size})
        self._combine = combine.kernel("combine", CombineArgs)
        segment = min(products.half_tile.segment, products.float_tile.segment)
        self._buffers = _Buffers(
            terms=device.empty((max_pairs, hidden_size), np.float32),
            scales=device.empty(max_pairs, np.float32),
            shifts=device.empty((max_pairs, -(-ffn_size // segment)), np.uint8),
            activations=device.empty(0, np.uint8),
        )
        self._prepared: WeakSet[StoredExperts] = WeakSet()
        self._launches: WeakKeyDictionary[StoredExperts, tuple[object, list[PreparedLaunch]]] = (
            WeakKeyDictionary()
        )
        """Launches of each layer's last chunk, and the values that they depend on."""

    @property
    def bytes_of_group(self) -> int:
        """Bytes of scratch memory for one group's quantised matrices."""
        return max(
            2 * self.ffn_size * half_row_bytes(self.hidden_size),
            self.hidden_size * half_row_bytes(self.ffn_size),
        )

    def prepare(self, experts: StoredExperts) -> None:
        """Compile kernels and allocate memory for such experts.

        Raises: SettingsError if there are no kernels for their types, or no scratch for one expert.
        """
        if experts not in self._prepared:
            self._prepare(experts)
            self._prepared.add(experts)

    def _prepare(self, experts: StoredExperts) -> None:
        projections = experts.gate, experts.up, experts.down
        for projection, columns in zip(
            projections, (self.hidden_size, self.hidden_size, self.ffn_size), strict=True
        ):
            check_type(projection.tensor_type, columns)
            if projection.tensor_type is not TensorType.F32:
                self._scratch.prepare(projection.tensor_type, columns)
        if self.bytes_of_group > self._scratch.num_bytes:
            raise SettingsError(
                f"one expert takes {self.bytes_of_group} bytes of scratch memory, there are "
                f"{self._scratch.num_bytes}"
            )
        hidden_parts, down_parts = _parts_of(experts)
        num_bytes = self.max_pairs * self.ffn_size * (2 * down_parts or 4)
        if self._buffers.activations.nbytes < num_bytes:
            self._buffers.activations = self._device.empty(num_bytes, np.uint8)
            self._launches.clear()  # which name those before
        self._kernels.of(hidden_parts, down_parts)
        if self._is_stored(experts.gate, experts.up):
            self._kernels.stored_gate_up(experts.gate.tensor_type, down_parts)
        if self._is_stored(experts.down):
            self._kernels.stored_down(experts.down.tensor_type)

    def _is_stored(
        self, *projections: StoredProjection, groups: GroupedPairs | None = None
    ) -> bool:
        """Whether products can read such matrices without conversion; and, with `groups`, whether
        that is faster."""
        types = {each.tensor_type for each in projections}
        tile = self.products.half_tile
        if tile.num_threads < tile.columns or len(types) > 1 or not types <= IN_UNITS:
            return False
        if groups is None:
            return True
        return groups.num_pairs <= _MOST_ROWS * groups.max_groups

    def run(
        self,
        rows: PreparedRows,
        groups: GroupedPairs,
        experts: StoredExperts,
        *,
        sums: DeviceArray | None = None,
        residual: DeviceArray | None = None,
        out: DeviceArray | None = None,
        out_sums: DeviceArray | None = None,
    ) -> None:
        """Terms of all pairs of `groups`, added for each token in float64 in order of its choice.

        ``out = residual + float32(sums + terms)`` and ``out_sums = sums + terms``, each if given;
        `sums` and `residual` are nothing if not. `out` may be `residual`, `out_sums` be `sums`.
        Shapes: rows [T, H]; residual, out [T, H] float32; sums, out_sums [T, H] float64.
        Raises: SettingsError for other shapes or too many pairs.
        """
        self._check(rows, groups, (residual, out), (sums, out_sums))
        device = self._device
        for launch in self._launches_of(rows, groups, experts):
            launch.start(device)
        args = CombineArgs(
            terms=address(self._buffers.terms),
            rows_of_tokens=address(groups.rows_of_tokens),
            sums=optional_address(sums),
            residual=optional_address(residual),
            out=optional_address(out),
            out_sums=optional_address(out_sums),
            pairs_per_token=groups.pairs_per_token,
        )
        device.launch(self._combine, (groups.num_tokens, 1, 1), _COMBINE_THREADS, args)

    def _launches_of(
        self, rows: PreparedRows, groups: GroupedPairs, experts: StoredExperts
    ) -> list[PreparedLaunch]:
        """All launches but the last; the same for chunks of one size, whatever was chosen."""
        hidden_parts, down_parts = _parts_of(experts)
        kernels = self._kernels.of(hidden_parts, down_parts)
        hidden = rows.addresses(hidden_parts)
        key = hidden, groups.layout
        known_key, launches = self._launches.get(experts, (None, []))
        if known_key != key:
            self.prepare(experts)
            launches = [*self._gate_up(kernels, hidden, groups, experts)]
            if down_parts:
                launches.append(self._level(kernels, groups))
            launches += self._down(kernels, groups, experts)
            self._launches[experts] = key, launches
        return launches

    def _check(
        self,
        rows: PreparedRows,
        groups: GroupedPairs,
        floats: tuple[DeviceArray | None, ...],
        doubles: tuple[DeviceArray | None, ...],
    ) -> None:
        shape = rows.num_rows, self.hidden_size
        if (groups.num_tokens, rows.columns) != shape:
            raise SettingsError(f"rows of {rows.columns} for {groups.num_tokens} tokens of {shape}")
        if groups.num_pairs > self.max_pairs or groups.tile_rows != self.products.tile_rows:
            raise SettingsError(
                f"{groups.num_pairs} pairs in tiles of {groups.tile_rows}, room for "
                f"{self.max_pairs} in tiles of {self.products.tile_rows}"
            )
        for arrays, dtype in ((floats, np.float32), (doubles, np.float64)):
            for array in arrays:
                if array is not None and (array.shape != shape or array.dtype != dtype):
                    raise SettingsError(
                        f"{array.dtype} of {array.shape}, {dtype} of {shape} wanted"
                    )

    def _gate_up(
        self,
        kernels: ExpertKernels,
        rows: tuple[int, int, int],
        groups: GroupedPairs,
        experts: StoredExperts,
    ) -> Iterator[PreparedLaunch]:
        """`rows`: from PreparedRows.addresses."""
        gate, up = experts.gate, experts.up
        hidden_parts, _ = _parts_of(experts)
        hidden, hidden_scales, hidden_part_bytes = rows
        given = GemmGateUpArgs(
            counts=address(groups.counts),
            tiles=address(groups.tiles),
            token_indices=address(groups.token_indices),
            hidden=hidden,
            hidden_scales=hidden_scales,
            gate=gate.weights_address,
            up=up.weights_address,
            gate_bias=optional_address(gate.bias),
            up_bias=optional_address(up.bias),
            gate_scale=optional_address(gate.scale),
            up_scale=optional_address(up.scale),
            activations=address(self._buffers.activations),
            shifts=address(self._buffers.shifts),
            hidden_part_bytes=hidden_part_bytes,
            activation_part_bytes=self._activation_part_bytes,
            gate_stride=gate.stride_bytes,
            up_stride=up.stride_bytes,
            form=ActivationArgs(
                limit=experts.activation_limit,
                alpha=experts.activation_alpha,
                up_offset=experts.activation_up_offset,
            ),
        )
        _, tile = self.products.of(hidden_parts)
        blocks = -(-2 * self.ffn_size // tile.columns)
        size = {"rows": self.ffn_size, "columns": self.hidden_size}
        is_stored = gate.tensor_type is up.tensor_type and gate.tensor_type in AS_STORED
        kernel = kernels.gate_up
        if self._is_stored(gate, up, groups=groups):
            is_stored = True
            kernel = self._kernels.stored_gate_up(gate.tensor_type, _parts_of(experts)[1])
        for choice in self._passes(groups, experts, is_stored=is_stored):
            args = GemmGateUpArgs.from_buffer_copy(given)
            args.choice = choice
            if not is_stored:
                args.gate = self._scratch.place()
                fill, num_bytes = self._scratch.fill_groups(gate, groups, choice, **size)
                yield fill
                args.up = self._scratch.place(num_bytes)
                fill, _ = self._scratch.fill_groups(
                    up, groups, choice, offset_bytes=num_bytes, **size
                )
                yield fill
                args.gate_stride = args.up_stride = self.ffn_size * half_row_bytes(self.hidden_size)
            yield _product(kernel, (blocks, groups.max_tiles, 1), tile, args)

    def _level(self, kernels: ExpertKernels, groups: GroupedPairs) -> PreparedLaunch:
        args = LevelArgs(
            counts=address(groups.counts),
            shifts=address(self._buffers.shifts),
            activations=address(self._buffers.activations),
            scales=address(self._buffers.scales),
            part_bytes=self._activation_part_bytes,
        )
        rows_of_block = _LEVEL_THREADS // self._device.lanes
        blocks = -(-groups.num_pairs // rows_of_block)
        return PreparedLaunch(kernels.level, (blocks, 1, 1), _LEVEL_THREADS, args)

    def _down(
        self, kernels: ExpertKernels, groups: GroupedPairs, experts: StoredExperts
    ) -> Iterator[PreparedLaunch]:
        down = experts.down
        _, down_parts = _parts_of(experts)
        given = GemmDownArgs(
            counts=address(groups.counts),
            tiles=address(groups.tiles),
            activations=address(self._buffers.activations),
            activation_scales=address(self._buffers.scales) if down_parts else 0,
            weights=address(groups.weights),
            down=down.weights_address,
            bias=optional_address(down.bias),
            scale=optional_address(down.scale),
            terms=address(self._buffers.terms),
            activation_part_bytes=self._activation_part_bytes,
            stride=down.stride_bytes,
        )
        _, tile = self.products.of(down_parts)
        blocks = -(-self.hidden_size // tile.columns)
        size = {"rows": self.hidden_size, "columns": self.ffn_size}
        is_stored = down.tensor_type in AS_STORED
        kernel = kernels.down
        if self._is_stored(down, groups=groups):
            is_stored, kernel = True, self._kernels.stored_down(down.tensor_type)
        for choice in self._passes(groups, experts, is_stored=is_stored):
            args = GemmDownArgs.from_buffer_copy(given)
            args.choice = choice
            if not is_stored:
                args.down = self._scratch.place()
                fill, _ = self._scratch.fill_groups(down, groups, choice, **size)
                yield fill
                args.stride = self.hidden_size * half_row_bytes(self.ffn_size)
            yield _product(kernel, (blocks, groups.max_tiles, 1), tile, args)

    @property
    def _activation_part_bytes(self) -> int:
        return 2 * self.max_pairs * self.ffn_size

    def _passes(
        self, groups: GroupedPairs, experts: StoredExperts, *, is_stored: bool
    ) -> Iterator[ctypes.Structure]:
        """Groups whose matrices fit the scratch memory; all, if these are not converted."""
        slots = optional_address(experts.slot_of_expert)
        at_once = groups.max_groups
        if not is_stored:
            at_once = min(at_once, self._scratch.num_bytes // self.bytes_of_group)
        for first in range(0, groups.max_groups, at_once):
            yield MatrixChoice(
                slot_of_expert=slots,
                first_group=first,
                end_group=min(first + at_once, groups.max_groups),
                is_by_group=not is_stored,
            )


def _product(kernel: Kernel, grid: Grid, tile: Tile, args: ctypes.Structure) -> PreparedLaunch:
    return PreparedLaunch(kernel, grid, tile.num_threads, args, tile.shared_bytes)


def _parts_of(experts: StoredExperts) -> tuple[int, int]:
    """Parts of hidden rows and of activations; see activation_parts."""
    return (
        activation_parts((experts.gate.tensor_type, experts.up.tensor_type)),
        activation_parts((experts.down.tensor_type,)),
    )
