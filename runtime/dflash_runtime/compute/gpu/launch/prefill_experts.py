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
    FLOAT32,
    FLOAT64,
    DeviceArray,
    Grid,
    Kernel,
    KernelDevice,
    PreparedLaunch,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.layouts import ResidentExperts, ResidentMatrices, row_bytes
from dflash_runtime.compute.gpu.launch.prefill_groups import GroupedPairs
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    AS_STORED,
    IN_UNITS,
    SEGMENT,
    MatrixChoice,
    PreparedRows,
    Products,
    Tile,
    WeightScratch,
    activation_parts,
    check_type,
    half_row_bytes,
    product_row_bytes,
)

ActivationArgs = kernel_struct("activation.cuh", "ActivationArgs")
GemmGateUpArgs = kernel_struct("gemm_gate_up.cu", "GemmGateUpArgs")
LevelArgs = kernel_struct("level_activations.cu", "LevelArgs")
GemmDownArgs = kernel_struct("gemm_down.cu", "GemmDownArgs")
CombineArgs = kernel_struct("combine.cu", "CombineArgs")

_COMBINE_THREADS = _LEVEL_THREADS = 256
_TERMS_BYTES = 64 << 20
"""Memory for terms. If it is not enough, their columns are computed and added some at a time."""
_LEAST_COLUMNS = 256
"""Of terms at a time, whatever they take: those of the largest tile."""
_MOST_ROWS = 64
"""Rows of a group, on average, up to which matrices are read without conversion. With more it is
faster to convert them to halves first."""


class ExpertKernels:
    """The kernels for experts of one size, each compiled on its first use.

    For rows in so many parts (activation_parts), times matrices that products can read: of halves
    or floats, or of the type `stored`, which they convert themselves.
    """

    def __init__(
        self, device: KernelDevice, products: Products, *, hidden_size: int, ffn_size: int
    ) -> None:
        self._device = device
        self._products = products
        self._hidden_size, self._ffn_size = hidden_size, ffn_size
        self._known: dict[tuple[object, ...], Kernel] = {}

    def gate_up(
        self, hidden_parts: int, down_parts: int, stored: TensorType | None = None
    ) -> Kernel:
        product, tile = self._products.of(hidden_parts, is_stored=stored is not None)
        defines = {
            **tile.defines(product),
            "NUM_COLUMNS": self._hidden_size,
            "NUM_ROWS": self._ffn_size,
            "NUM_PARTS": max(hidden_parts, 1),
            "OUT_PARTS": down_parts,
            "SEGMENT": SEGMENT,
            **_weight_rows(self._hidden_size, hidden_parts, stored),
        }
        return self._kernel("gemm_gate_up", GemmGateUpArgs, defines)

    def level(self, down_parts: int) -> Kernel:
        defines: dict[str, int | str] = {
            "NUM_COLUMNS": self._ffn_size,
            "NUM_PARTS": max(down_parts, 1),
            "SEGMENT": SEGMENT,
            "NUM_SEGMENTS": -(-self._ffn_size // SEGMENT),
        }
        return self._kernel("level_activations", LevelArgs, defines)

    def down(self, down_parts: int, stored: TensorType | None = None) -> Kernel:
        product, tile = self._products.of(down_parts, is_stored=stored is not None)
        defines = {
            **tile.defines(product),
            "NUM_COLUMNS": self._ffn_size,
            "NUM_ROWS": self._hidden_size,
            "NUM_PARTS": max(down_parts, 1),
            **_weight_rows(self._ffn_size, down_parts, stored),
        }
        return self._kernel("gemm_down", GemmDownArgs, defines)

    def combine(self) -> Kernel:
        return self._kernel("combine", CombineArgs, {"HIDDEN": self._hidden_size})

    def _kernel(
        self, name: str, args: type[ctypes.Structure], defines: dict[str, int | str]
    ) -> Kernel:
        key = name, *defines.items()
        if key not in self._known:
            module = self._device.module(f"{name}.cu", defines)
            self._known[key] = module.kernel(name, args)
        return self._known[key]


def terms_bytes(max_pairs: int, hidden_size: int) -> int:
    """Bytes of the terms of up to `max_pairs` pairs that exist at the same time."""
    of_pairs = np.dtype(np.float32).itemsize * max_pairs
    return min(of_pairs * hidden_size, max(_TERMS_BYTES, of_pairs * _LEAST_COLUMNS))


def _weight_rows(columns: int, parts: int, stored: TensorType | None) -> dict[str, int | str]:
    if stored is None:
        return {"WEIGHT_ROW_BYTES": product_row_bytes(columns, parts)}
    return {"WEIGHT_ROW_BYTES": row_bytes(stored, columns), "STORED_TYPE": int(stored)}


@dataclass(frozen=True, slots=True, eq=False)
class _Launches:
    """Of one layer and chunks of one size."""

    key: tuple[object, ...]
    """What they depend on besides."""
    launches: list[PreparedLaunch]
    additions: list[ctypes.Structure]
    """Arguments of those that add columns of terms, which lack where to."""


@dataclass(slots=True, eq=False)
class _Buffers:
    """What kernels write for those that follow. Activations grow with the layers' types.

    Shapes: terms float32: [P, some of H]; scales [P] float32; shifts [P, segments] uint8;
    activations: bytes of [P, F] floats, or halves in parts.
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
        self._kernels = ExpertKernels(device, products, hidden_size=hidden_size, ffn_size=ffn_size)
        self._combine = self._kernels.combine()
        self._buffers = _Buffers(
            terms=device.empty(terms_bytes(max_pairs, hidden_size) // 4, np.float32),
            scales=device.empty(max_pairs, np.float32),
            shifts=device.empty((max_pairs, -(-ffn_size // SEGMENT)), np.uint8),
            activations=device.empty(0, np.uint8),
        )
        self._prepared: WeakSet[ResidentExperts] = WeakSet()
        self._launches: WeakKeyDictionary[ResidentExperts, _Launches] = WeakKeyDictionary()
        """Those of each layer's last chunk."""

    @property
    def bytes_of_group(self) -> int:
        """Bytes of scratch memory for one group's quantised matrices."""
        return max(
            2 * self.ffn_size * half_row_bytes(self.hidden_size),
            self.hidden_size * half_row_bytes(self.ffn_size),
        )

    def prepare(self, experts: ResidentExperts) -> None:
        """Compile kernels and allocate memory for such experts.

        Raises: SettingsError if there are no kernels for their types, or no scratch for one expert.
        """
        if experts not in self._prepared:
            self._prepare(experts)
            self._prepared.add(experts)

    def _prepare(self, experts: ResidentExperts) -> None:
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
        for stored in {None, self._stored_type(experts.gate, experts.up)}:
            self._kernels.gate_up(hidden_parts, down_parts, stored)
        self._kernels.level(down_parts)
        for stored in {None, self._stored_type(experts.down)}:
            self._kernels.down(down_parts, stored)

    def _stored_type(self, *projections: ResidentMatrices) -> TensorType | None:
        """The type of such matrices if products can convert them."""
        types = {each.tensor_type for each in projections}
        _, tile = self.products.of(1, is_stored=True)
        if tile.num_threads < tile.columns or len(types) > 1 or not types <= IN_UNITS:
            return None
        return projections[0].tensor_type

    def run(
        self,
        rows: PreparedRows,
        groups: GroupedPairs,
        experts: ResidentExperts,
        *,
        mean_rows: float | None = None,
        sums: DeviceArray | None = None,
        residual: DeviceArray | None = None,
        out_sums: DeviceArray | None = None,
    ) -> None:
        """Terms of all pairs of `groups`, added for each token in float64 in order of its choice.

        ``residual += float32(sums + terms)`` and ``out_sums = sums + terms``, each if given; `sums`
        are nothing if not, and may be `out_sums`. `mean_rows`: pairs of an expert that has any, on
        average, if known; it decides how matrices are read, and no bit.
        Shapes: rows [T, H]; residual [T, H] float32; sums, out_sums [T, H] float64.
        Raises: SettingsError for other shapes or too many pairs.
        """
        self._check(rows, groups, residual, (sums, out_sums))
        if mean_rows is None:
            mean_rows = groups.num_pairs / groups.max_groups
        known = self._launches_of(rows, groups, experts, converts=mean_rows > _MOST_ROWS)
        before, after = optional_address(sums), optional_address(out_sums)
        out = optional_address(residual)
        for args in known.additions:
            args.sums, args.out_sums, args.residual, args.out = before, after, out, out
        self._device.start(known.launches)

    def _launches_of(
        self,
        rows: PreparedRows,
        groups: GroupedPairs,
        experts: ResidentExperts,
        *,
        converts: bool,
    ) -> _Launches:
        """All launches; the same for chunks of one size, whatever was chosen.

        `converts`: to halves, before the products, also what products can convert themselves.
        """
        hidden_parts, down_parts = _parts_of(experts)
        hidden = rows.addresses(hidden_parts)
        key = hidden, groups.layout, converts
        known = self._launches.get(experts)
        if known is None or known.key != key:
            self.prepare(experts)
            launches = [*self._gate_up(hidden, groups, experts, converts=converts)]
            if down_parts:
                launches.append(self._level(self._kernels.level(down_parts), groups))
            additions = []
            for columns in self._columns_of(groups.num_pairs):
                launches += self._down(groups, experts, columns, converts=converts)
                # Columns are added up before the next ones take their place.
                launches.append(self._addition(groups, columns))
                additions.append(launches[-1].args)
            known = self._launches[experts] = _Launches(key, launches, additions)
        return known

    def _addition(self, groups: GroupedPairs, columns: range) -> PreparedLaunch:
        """Adds these columns of the terms to what its arguments are yet to name."""
        args = CombineArgs(
            terms=address(self._buffers.terms),
            rows_of_tokens=address(groups.rows_of_tokens),
            pairs_per_token=groups.pairs_per_token,
            first_column=columns.start,
            num_columns=len(columns),
        )
        num_threads = min(_COMBINE_THREADS, -(-len(columns) // 4 // 64) * 64)
        return PreparedLaunch(self._combine, (groups.num_tokens, 1, 1), num_threads, args)

    def _columns_of(self, num_pairs: int) -> Iterator[range]:
        """Columns of terms, as many at a time as there is room for."""
        at_once = self._buffers.terms.size // num_pairs
        if at_once < self.hidden_size:
            at_once = at_once // _LEAST_COLUMNS * _LEAST_COLUMNS
        for first in range(0, self.hidden_size, at_once):
            yield range(first, min(first + at_once, self.hidden_size))

    def _check(
        self,
        rows: PreparedRows,
        groups: GroupedPairs,
        residual: DeviceArray | None,
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
        for arrays, dtype in (((residual,), FLOAT32), (doubles, FLOAT64)):
            for array in arrays:
                if array is not None and (array.shape != shape or array.dtype != dtype):
                    raise SettingsError(
                        f"{array.dtype} of {array.shape}, {dtype} of {shape} wanted"
                    )

    def _gate_up(
        self,
        rows: tuple[int, int, int],
        groups: GroupedPairs,
        experts: ResidentExperts,
        *,
        converts: bool,
    ) -> Iterator[PreparedLaunch]:
        """`rows`: from PreparedRows.addresses."""
        gate, up = experts.gate, experts.up
        hidden_parts, down_parts = _parts_of(experts)
        hidden, hidden_scales, hidden_part_bytes = rows
        given = GemmGateUpArgs(
            counts=address(groups.counts),
            tiles=address(groups.tiles),
            token_indices=address(groups.token_indices),
            hidden=hidden,
            hidden_scales=hidden_scales,
            gate=address(gate.weights),
            up=address(up.weights),
            gate_bias=optional_address(gate.bias),
            up_bias=optional_address(up.bias),
            gate_scale=optional_address(gate.scale),
            up_scale=optional_address(up.scale),
            activations=address(self._buffers.activations),
            shifts=address(self._buffers.shifts),
            hidden_part_bytes=hidden_part_bytes,
            activation_part_bytes=self._activation_part_bytes,
            gate_stride=self.ffn_size * row_bytes(gate.tensor_type, self.hidden_size),
            up_stride=self.ffn_size * row_bytes(up.tensor_type, self.hidden_size),
            form=ActivationArgs(
                limit=experts.activation_limit,
                alpha=experts.activation_alpha,
                up_offset=experts.up_offset,
            ),
        )
        stored = None if converts else self._stored_type(gate, up)
        _, tile = self.products.of(hidden_parts, is_stored=stored is not None)
        blocks = -(-2 * self.ffn_size // tile.columns)
        converts = stored is None and not {gate.tensor_type, up.tensor_type} <= AS_STORED
        kernel = self._kernels.gate_up(hidden_parts, down_parts, stored)
        stride = self.ffn_size * half_row_bytes(self.hidden_size)
        for choice in self._passes(groups, experts, 2 * stride if converts else 0):
            args = GemmGateUpArgs.from_buffer_copy(given)
            args.choice = choice
            if converts:
                fill, num_bytes = self._fill(gate, groups, choice)
                yield fill
                args.gate, args.up = self._scratch.place(), self._scratch.place(num_bytes)
                fill, _ = self._fill(up, groups, choice, offset_bytes=num_bytes)
                yield fill
                args.gate_stride = args.up_stride = stride
            yield _product(kernel, (blocks, groups.max_tiles, 1), tile, args)

    def _level(self, kernel: Kernel, groups: GroupedPairs) -> PreparedLaunch:
        args = LevelArgs(
            counts=address(groups.counts),
            shifts=address(self._buffers.shifts),
            activations=address(self._buffers.activations),
            scales=address(self._buffers.scales),
            part_bytes=self._activation_part_bytes,
        )
        rows_of_block = _LEVEL_THREADS // self._device.lanes
        blocks = -(-groups.num_pairs // rows_of_block)
        return PreparedLaunch(kernel, (blocks, 1, 1), _LEVEL_THREADS, args)

    def _down(
        self, groups: GroupedPairs, experts: ResidentExperts, columns: range, *, converts: bool
    ) -> Iterator[PreparedLaunch]:
        """Of these columns of the terms."""
        down = experts.down
        first_byte = columns.start * row_bytes(down.tensor_type, self.ffn_size)
        _, down_parts = _parts_of(experts)
        given = GemmDownArgs(
            counts=address(groups.counts),
            tiles=address(groups.tiles),
            activations=address(self._buffers.activations),
            activation_scales=address(self._buffers.scales) if down_parts else 0,
            weights=address(groups.weights),
            down=address(down.weights, first_byte),
            bias=0 if down.bias is None else address(down.bias, 4 * columns.start),
            scale=optional_address(down.scale),
            terms=address(self._buffers.terms),
            activation_part_bytes=self._activation_part_bytes,
            stride=self.hidden_size * row_bytes(down.tensor_type, self.ffn_size),
            num_columns=len(columns),
        )
        stored = None if converts else self._stored_type(down)
        _, tile = self.products.of(down_parts, is_stored=stored is not None)
        blocks = -(-len(columns) // tile.columns)
        converts = stored is None and down.tensor_type not in AS_STORED
        kernel = self._kernels.down(down_parts, stored)
        stride = len(columns) * half_row_bytes(self.ffn_size)
        for choice in self._passes(groups, experts, stride if converts else 0):
            args = GemmDownArgs.from_buffer_copy(given)
            args.choice = choice
            if converts:
                args.down = self._scratch.place()
                fill, _ = self._fill(down, groups, choice, columns=columns)
                yield fill
                args.stride = stride
            yield _product(kernel, (blocks, groups.max_tiles, 1), tile, args)

    def _fill(
        self,
        matrices: ResidentMatrices,
        groups: GroupedPairs,
        choice: ctypes.Structure,
        *,
        columns: range | None = None,
        offset_bytes: int = 0,
    ) -> tuple[PreparedLaunch, int]:
        """WeightScratch.fill for the chosen groups' matrices: the rows of down for these `columns`
        of terms, else gate or up."""
        rows, num_columns = range(self.ffn_size), self.hidden_size
        all_rows = self.ffn_size
        if columns is not None:
            rows, num_columns, all_rows = columns, self.ffn_size, self.hidden_size
        of_row = row_bytes(matrices.tensor_type, num_columns)
        return self._scratch.fill(
            matrices.tensor_type,
            rows=len(rows),
            columns=num_columns,
            num_matrices=choice.end_group - choice.first_group,
            offset_bytes=offset_bytes,
            counts=address(groups.counts),
            expert_ids=address(groups.expert_ids),
            weights=address(matrices.weights, rows.start * of_row),
            stride=all_rows * of_row,
            choice=choice,
        )

    @property
    def _activation_part_bytes(self) -> int:
        return 2 * self.max_pairs * self.ffn_size

    def _passes(
        self, groups: GroupedPairs, experts: ResidentExperts, converted_bytes: int
    ) -> Iterator[ctypes.Structure]:
        """Groups whose matrices, of so many bytes each as halves, fit the scratch memory; all, if
        they are not converted (0)."""
        slots = address(experts.slot_of_expert)
        at_once = groups.max_groups
        if converted_bytes:
            at_once = min(at_once, self._scratch.num_bytes // converted_bytes)
        for first in range(0, groups.max_groups, at_once):
            yield MatrixChoice(
                slot_of_expert=slots,
                first_group=first,
                end_group=min(first + at_once, groups.max_groups),
                is_by_group=converted_bytes > 0,
            )


def _product(kernel: Kernel, grid: Grid, tile: Tile, args: ctypes.Structure) -> PreparedLaunch:
    return PreparedLaunch(kernel, grid, tile.num_threads, args, tile.shared_bytes)


def _parts_of(experts: ResidentExperts) -> tuple[int, int]:
    """Parts of hidden rows and of activations; see activation_parts."""
    return (
        activation_parts((experts.gate.tensor_type, experts.up.tensor_type)),
        activation_parts((experts.down.tensor_type,)),
    )
