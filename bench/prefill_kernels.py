"""Kernels of a prefill chunk one by one, in the shape of a layer of Qwen3-30B-A3B Q4_K_M.

Each launch of the layer is recorded, then repeated in a graph of its own, with every choice of
tiles that the device has room for. The output of two tokens is compared with float64 first.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench.expert_reference import relative_error
from bench.options import bench_parser
from gguf import GGMLQuantizationType

from bench import random_moe
from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.device import parse_device
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, U8Array
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import DeviceArray, Grid, KernelDevice
from dflash_runtime.compute.gpu.launch.layouts import (
    DeviceMatrix,
    ResidentExperts,
    ResidentMatrices,
    row_bytes,
)
from dflash_runtime.compute.gpu.launch.prefill_dense import DensePrefill, DenseProduct
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertPrefill
from dflash_runtime.compute.gpu.launch.prefill_groups import ExpertGroups
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    TENSOR_PRODUCTS,
    ProductKind,
    Products,
    RowPreparer,
    Tile,
    WeightScratch,
    products_of,
)
from dflash_runtime.compute.gpu.layers.matrix import Uploader

EXAMPLES = """examples:
  python -m bench.prefill_kernels --device cuda:0
  python -m bench.prefill_kernels --tokens 512
"""

CANDIDATES = (
    *(each.half_tile for each in TENSOR_PRODUCTS),
    Tile(rows=128, columns=256, warps_m=2, warps_n=4, stages=3),
    Tile(rows=128, columns=256, warps_m=2, warps_n=4, stages=4),
    Tile(rows=128, columns=128, warps_m=2, warps_n=2, stages=3, blocks_per_sm=2),
    Tile(rows=128, columns=128, warps_m=2, warps_n=4, stages=3, blocks_per_sm=2),
    Tile(rows=64, columns=256, warps_m=1, warps_n=4, stages=4),
    Tile(rows=64, columns=256, warps_m=1, warps_n=4, stages=2, blocks_per_sm=2),
    Tile(rows=64, columns=128, warps_m=2, warps_n=2, stages=4, blocks_per_sm=2),
)
"""Tile sizes never change bits, so any can be chosen."""

_REPEATS = 10


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer; `more` is the type that Q4_K_M gives its sensitive matrices."""

    num_tokens: int = 4096
    hidden_size: int = 2048
    ffn_size: int = 768
    num_experts: int = 128
    num_used: int = 8
    qkv_rows: tuple[int, int, int] = (4096, 512, 512)
    base: TensorType = TensorType.Q4_K
    more: TensorType = TensorType.Q6_K


def skewed_choice(rng: np.random.Generator, shape: LayerShape) -> I32Array:
    """Routing as skewed as real routers. Shapes: result [T, K]."""
    bias = rng.standard_normal(shape.num_experts) * 0.5
    logits = rng.standard_normal((shape.num_tokens, shape.num_experts)) + bias
    return np.argsort(-logits, axis=1)[:, : shape.num_used].astype(np.int32)


@dataclass(frozen=True)
class Launch:
    """One launch of the layer, which can be repeated."""

    name: str
    repeat: Callable[[], None]


class Recorder:
    """A KernelDevice that records launches on another one."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(
        self, kernel: Any, grid: Grid, block: int, args: ctypes.Structure, **options: Any
    ) -> None:
        copy = type(args).from_buffer_copy(args)

        def repeat() -> None:
            self._device.launch(kernel, grid, block, copy, **options)

        self.launches.append(Launch(f"{kernel.name} {grid[0]}x{grid[1]}", repeat))
        repeat()


_SORTING = frozenset({"count_pairs", "lay_out_groups", "place_pairs"})


@dataclass(frozen=True)
class HostLayer:
    """A layer's stored experts, by projection, and its inputs on the host.

    Shapes: x [T, H]; ids, weights [T, K].
    """

    shape: LayerShape
    raw: dict[str, U8Array]
    x: F32Array
    ids: I32Array
    weights: F32Array

    def expected(self, token: int) -> F64Array:
        """The experts' output for one token in float64. Shapes: result [H]."""

        def matrix(name: str, kind: TensorType, expert: int, rows: int, columns: int) -> F64Array:
            size = rows * kind.row_bytes(columns)
            raw = self.raw[name][expert * size : (expert + 1) * size]
            return dequantise(raw, kind, (rows, columns)).astype(np.float64)

        shape, x = self.shape, self.x[token].astype(np.float64)
        total = np.zeros(shape.hidden_size)
        for expert, weight in zip(self.ids[token], self.weights[token], strict=True):
            gate, up = (
                matrix(name, shape.base, expert, shape.ffn_size, shape.hidden_size) @ x
                for name in ("gate", "up")
            )
            inner = gate / (1 + np.exp(-gate)) * up
            down = matrix("down", shape.more, expert, shape.hidden_size, shape.ffn_size)
            total += weight * (down @ inner)
        return total


class Layer:
    """A layer's weights, inputs and buffers on a device, and what is there on the host."""

    def __init__(self, device: KernelDevice, shape: LayerShape) -> None:
        rng = np.random.default_rng(0)
        self.recorder = Recorder(device)
        self._device: Any = self.recorder
        hidden, ffn, experts = shape.hidden_size, shape.ffn_size, shape.num_experts
        raw: dict[str, U8Array] = {}
        uploader = Uploader(device)

        def stored(name: str, kind: TensorType, rows: int, columns: int) -> DeviceArray:
            raw[name] = random_moe.blocks(rng, GGMLQuantizationType(int(kind)), (rows, columns))
            weights = device.empty(rows * row_bytes(kind, columns), np.uint8)
            uploader.fill(weights, [raw[name]], kind, columns=columns)
            return weights

        def projection(name: str, kind: TensorType, rows: int, columns: int) -> ResidentMatrices:
            return ResidentMatrices(kind, stored(name, kind, experts * rows, columns))

        self.experts = ResidentExperts(
            gate=projection("gate", shape.base, ffn, hidden),
            up=projection("up", shape.base, ffn, hidden),
            down=projection("down", shape.more, hidden, ffn),
            slot_of_expert=device.upload(np.arange(experts, dtype=np.int32)),
        )
        x = rng.standard_normal((shape.num_tokens, hidden), dtype=np.float32)
        ids = skewed_choice(rng, shape)
        self.host = HostLayer(shape, raw, x, ids, rng.random(ids.shape, dtype=np.float32))
        self._inputs = [device.upload(each) for each in (x, ids, self.host.weights)]
        self.out = device.empty(x.shape, np.float64)
        kinds = (shape.base, shape.base, shape.more)
        self._dense = [
            DenseProduct(
                DeviceMatrix(
                    rows, hidden, kind, stored(f"dense {rows} {index}", kind, rows, hidden)
                ),
                device.empty((shape.num_tokens, rows), np.float32),
            )
            for index, (kind, rows) in enumerate(zip(kinds, shape.qkv_rows, strict=True))
        ]
        router = device.upload(rng.standard_normal((experts, hidden), dtype=np.float32))
        self._router = DenseProduct(
            DeviceMatrix(experts, hidden, TensorType.F32, router),
            device.empty((shape.num_tokens, experts), np.float32),
        )
        # Float16 gate and up of all experts; 16-byte chunks of rows are whole units of 64 here.
        self._scratch = WeightScratch(self._device, experts * 2 * ffn * hidden * 2)
        self._norm = device.upload(np.ones(hidden, np.float32))

    def run(self, products: Products) -> None:
        """q, k, v and the router of normalised rows, and the experts of the rows themselves."""
        shape, x, ids, weights = self.host.shape, *self._inputs
        device, num_pairs = self._device, shape.num_tokens * shape.num_used
        preparer = RowPreparer(
            device, columns=shape.hidden_size, max_rows=shape.num_tokens, parts=1
        )
        dense = DensePrefill(device, products=products, scratch=self._scratch)
        groups = ExpertGroups(
            device,
            num_experts=shape.num_experts,
            max_pairs=num_pairs,
            tile_rows=products.tile_rows,
        )
        prefill = ExpertPrefill(
            device,
            hidden_size=shape.hidden_size,
            ffn_size=shape.ffn_size,
            max_pairs=num_pairs,
            products=products,
            scratch=self._scratch,
        )
        prefill.prepare(self.experts)
        self.recorder.launches.clear()
        dense.run(preparer.prepare(x, norm=self._norm, eps=1e-6), self._dense)
        rows = preparer.prepare(x)
        dense.run(rows, [self._router])
        prefill.run(rows, groups.group_chosen(ids, weights), self.experts, out_sums=self.out)
        self._buffers = preparer, dense, groups, prefill  # used by repeated launches


def seconds_of(device: KernelDevice, launch: Callable[[], None]) -> float:
    """Seconds of one of many consecutive launches, the best of five."""

    def record() -> None:
        for _ in range(_REPEATS):
            launch()

    graph = device.capture(record)
    best = np.inf
    for _ in range(6):  # the first warms up
        device.synchronize()
        begin = time.perf_counter()
        graph.replay()
        device.synchronize()
        best = min(best, time.perf_counter() - begin)
    graph.close()
    return float(best) / _REPEATS


def with_sorting_as_one(launches: list[Launch]) -> list[Launch]:
    """The kernels that sort pairs as one launch: they modify their input in place."""
    sorting = [each for each in launches if each.name.split()[0] in _SORTING]

    def repeat() -> None:
        for each in sorting:
            each.repeat()

    return [Launch("group_experts", repeat), *(each for each in launches if each not in sorting)]


def choices(device: KernelDevice) -> Iterator[Products]:
    """Tile sizes that can be compared on a device."""
    usual = products_of(device)
    yield usual
    if usual.half is not ProductKind.TENSOR:
        return
    for tile in CANDIDATES:
        if tile.shared_bytes * tile.blocks_per_sm <= device.max_shared_bytes:
            yield Products(ProductKind.TENSOR, tile, float_tile=_float_tile(tile.rows))


def _float_tile(rows: int) -> Tile:
    return Tile(rows=rows, columns=64, warps_m=4, warps_n=2, stages=2)


def measure(device: KernelDevice, shape: LayerShape) -> None:
    """Print one table for each choice of tiles."""
    layer = Layer(device, shape)
    tokens = [0, shape.num_tokens - 1]
    wanted = np.array([layer.host.expected(token) for token in tokens])
    first: AnyArray | None = None
    for products in choices(device):
        layer.run(products)
        found = device.download(layer.out)
        first = found if first is None else first
        error = relative_error(found[tokens], wanted)
        is_same = "same bits" if np.array_equal(found, first) else "OTHER BITS"
        print(f"\n{products.half_tile}: relative error {error:.1e}, {is_same}")
        launches = with_sorting_as_one(layer.recorder.launches)
        times = [(each.name, seconds_of(device, each.repeat)) for each in launches]
        for name, seconds in times:
            print(f"  {seconds * 1e6:9.1f} us  {name}")
        total = sum(seconds for _, seconds in times)
        print(f"  {total * 1e6:9.1f} us  all")


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    measure(CupyDevice(parse_device(options.device)), LayerShape(num_tokens=options.tokens))


if __name__ == "__main__":
    main()
