"""One attention layer on an emulated device: random rows, a filled cache, expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_adapters.rope import AttentionTemperature, RopePairing, rope_table
from dflash_adapters.spec import CAUSAL, KvLayer, Mask
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.layers.attention import DecodeAttention, PrefillAttention
from dflash_runtime.compute.gpu.layers.attention_args import NewRows, rotation_angles
from dflash_runtime.compute.gpu.layers.attention_plan import (
    AttentionShape,
    DecodePlan,
    context_bucket,
)
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.kv_cache import KvType
from support.emulated_device import EmulatedDevice
from support.float64_attention import attended, cached_numbers, fill, normalised_and_rotated

EPS = 1e-6


@dataclass(frozen=True)
class LayerCase:
    """The parameters of a layer; the defaults are usual ones."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    kv_type: KvType = KvType.F16
    use_mma: bool = False
    pairing: RopePairing = RopePairing.HALF_SPLIT
    num_rotated: int = 64
    has_norm: bool = True
    mask: Mask = CAUSAL
    temperature: AttentionTemperature | None = None
    has_sinks: bool = False
    capacity: int = 192
    lanes: int = 32
    runs_backward: bool = False
    max_shared_bytes: int = 96 * 1024

    @property
    def kv(self) -> KvLayer:
        return KvLayer(self.num_kv_heads, self.key_dim, self.value_dim, self.mask)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            self.num_heads,
            self.kv,
            self.kv_type,
            self.pairing,
            self.num_rotated,
            self.use_mma,
            is_tempered=self.temperature is not None,
            has_sinks=self.has_sinks,
        )

    def having(self, **changes: object) -> LayerCase:
        return replace(self, **changes)  # type: ignore[arg-type]


class AttentionRig:
    """Random rows of a whole context, of which any part can be computed in any way."""

    def __init__(self, case: LayerCase, *, seed: int = 1) -> None:
        self.case = case
        self.device = EmulatedDevice(
            lanes=case.lanes,
            runs_backward=case.runs_backward,
            max_shared_bytes=case.max_shared_bytes,
        )
        rng = np.random.default_rng(seed)
        widths = (
            case.num_heads * case.key_dim,
            case.num_kv_heads * case.key_dim,
            case.num_kv_heads * case.value_dim,
        )
        self.first_columns = (0, widths[0], widths[0] + widths[1])
        self.rows = rng.standard_normal((case.capacity, sum(widths))).astype(np.float32)
        self.table = rope_table(case.pairing, case.num_rotated, 1e4)
        self.scale = 1.5 / np.sqrt(case.key_dim)
        self.weights = (
            [rng.uniform(0.5, 2, case.key_dim).astype(np.float32) for _ in range(2)]
            if case.has_norm
            else [None, None]
        )
        self.angles: DeviceArray | None = None
        self.factors: DeviceArray | None = None
        self.sinks: DeviceArray | None = None
        if case.num_rotated:
            self.angles = self.device.upload(rotation_angles(self.table, case.capacity))
        if case.temperature is not None:
            factors = case.temperature.factors(np.arange(case.capacity, dtype=np.int32))
            self.factors = self.device.upload(factors)
        if case.has_sinks:
            self.sinks = self.device.upload(4 * rng.standard_normal(case.num_heads, np.float32))
        self.new_cache()

    def new_cache(self) -> None:
        """Make a new cache, filled with poison."""
        case = self.case
        self.cache = DeviceKvCache(
            self.device, [case.kv], capacity=case.capacity, kv_type=case.kv_type
        )

    def head_rows(self, kind: int, first: int, count: int) -> F32Array:
        """Queries (0), keys (1) or values (2) of some tokens. Shapes: result [T, heads, D]."""
        case = self.case
        num_heads = case.num_heads if kind == 0 else case.num_kv_heads
        dim = case.value_dim if kind == 2 else case.key_dim
        begin = self.first_columns[kind]
        part = self.rows[first : first + count, begin : begin + num_heads * dim]
        return part.reshape(count, num_heads, dim)

    def new_rows(self, first: int, count: int) -> NewRows:
        return self.rows_of(range(first, first + count))

    def rows_of(self, tokens: Sequence[int]) -> NewRows:
        """Rows of any tokens, consecutive or not."""
        rows = self.rows[list(tokens)]
        queries, keys, values = (
            self.device.upload(np.ascontiguousarray(part))
            for part in np.split(rows, self.first_columns[1:], axis=1)
        )
        query_weight, key_weight = (
            None if weight is None else self.device.upload(weight) for weight in self.weights
        )
        return NewRows(
            queries,
            keys,
            values,
            self.angles,
            float(self.scale),
            query_weight,
            key_weight,
            EPS,
            self.factors,
        )

    def rotated(self, kind: int, first: int, count: int) -> F64Array:
        return normalised_and_rotated(
            self.head_rows(kind, first, count),
            np.arange(first, first + count, dtype=np.int32),
            self.table,
            self.weights[kind],
            EPS,
        )

    def fill_cache(self, count: int) -> None:
        """Fill the cache's first `count` positions."""
        layer, kv_type = self.cache.layers[0], self.case.kv_type
        fill(layer.keys, self.rotated(1, 0, count).swapaxes(0, 1), kv_type)
        fill(layer.values, self.head_rows(2, 0, count).swapaxes(0, 1), kv_type)

    def cached(self) -> tuple[F64Array, F64Array]:
        """Keys and values as numbers. Shapes: [kv_heads, N, dim]."""
        layer = self.cache.layers[0]
        return (
            cached_numbers(layer.keys, self.case.key_dim),
            cached_numbers(layer.values, self.case.value_dim),
        )

    def expected(self, first: int, count: int) -> F64Array:
        """Results by the formula in float64, from the cache's contents."""
        positions: I32Array = np.arange(first, first + count, dtype=np.int32)
        queries = self.rotated(0, first, count) * self.scale
        if self.case.temperature is not None:
            queries *= self.case.temperature.factors(positions)[:, None, None]
        sinks = None if self.sinks is None else np.asarray(self.sinks)
        return attended(queries, *self.cached(), positions, mask=self.case.mask, sinks=sinks)

    def decode(self, first: int, count: int, *, bucket: int | None = None) -> AnyArray:
        """A step of `count` tokens."""
        bucket = bucket or context_bucket(first + count)
        out = self.device.empty((count, self.case.num_heads, self.case.value_dim), np.float32)
        self.decode_into(StepRows(values=out), first, count, bucket=bucket)
        return self.device.download(out)

    def decode_into(
        self,
        out: StepRows,
        first: int,
        count: int,
        *,
        bucket: int = 1024,
        rows: NewRows | None = None,
    ) -> None:
        """A step of `count` tokens that writes to `out`; `rows` replaces the tokens' own rows."""
        plan = DecodePlan(self.case.shape, count, bucket)
        DecodeAttention(self.device, plan).launch(
            rows or self.new_rows(first, count),
            self.cache.layers[0],
            positions=self.device.upload(np.arange(first, first + count, dtype=np.int32)),
            scratch=self.device.empty(plan.scratch_bytes, np.uint8),
            out=out,
            sinks=self.sinks,
        )

    def row_tiles(self, count: int) -> int:
        """Row tiles per warp in a chunk's blocks."""
        return PrefillAttention(self.device, self.case.shape).plan(count).row_tiles

    def prefill(self, first: int, count: int) -> AnyArray:
        """A chunk of `count` tokens."""
        attention = PrefillAttention(self.device, self.case.shape)
        out = self.device.empty((count, self.case.num_heads, self.case.value_dim), np.float32)
        attention.launch(
            self.new_rows(first, count),
            self.cache.layers[0],
            first_position=self.device.upload(np.array([first], np.int32)),
            num_tokens=count,
            scratch=self.device.empty(attention.scratch_bytes(count), np.uint8),
            out=out,
            sinks=self.sinks,
        )
        return self.device.download(out)


def relative_error(given: AnyArray, wanted: AnyArray) -> float:
    """The largest relative error of a row in the Euclidean norm; NaN if any value is NaN."""
    difference = np.linalg.norm(given - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(difference.max())
