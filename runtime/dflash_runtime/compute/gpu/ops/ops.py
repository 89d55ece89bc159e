"""The dense operations on a GPU: what adapters call, put together for steps and for chunks.

A step has 1 to 8 tokens and must be cheap to launch, a chunk of a prompt has more and must use the
arithmetic units well; each has kernels of its own. A tree of draft tokens is a step, however many
it has. Both are given values that put work off (values.py), and do what belongs together in one
kernel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.ops import Gate, KvCache, KvType, Matrix, RoutingRule
from dflash_adapters.quant.reference import dequantise
from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.backend import argmax_of
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.launch.decode_tokens import Embed, check_token_ids
from dflash_runtime.compute.gpu.launch.row_kernels import AddRows, AddSums
from dflash_runtime.compute.gpu.layers.attention_launch import AttentionLauncher
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.gpu.layers.branch import Branching
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.matrix import DeviceMatrix, Uploader
from dflash_runtime.compute.gpu.layers.values import (
    Activated,
    Chosen,
    Columns,
    DeltaHeads,
    DeviceValue,
    ExpertSums,
    F32Rows,
    GatedProduct,
    HeadRows,
    Normed,
    Product,
    Rotation,
    StepPositions,
    StepTokens,
)
from dflash_runtime.compute.gpu.ops.chunks import Chunks
from dflash_runtime.compute.gpu.ops.gated_ops import GatedOps
from dflash_runtime.compute.gpu.ops.steps import StepOps
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover

_CHUNKS_AT_ONCE = 2
"""The halves of one, which take turns layer by layer."""


class CupyOps(GatedOps):
    """Implements ops.Ops over DeviceValues; weights are plain arrays.

    `max_chunk` is the most tokens of a chunk, `scratch_bytes` are for matrices as halves.
    Owns: matrices, and buffers for results, which are taken when first needed.
    """

    def __init__(
        self,
        device: KernelDevice,
        uploader: Uploader,
        *,
        max_chunk: int,
        scratch_bytes: int,
        lock: threading.RLock,
    ) -> None:
        """`lock`: see payload.PayloadMover."""
        super().__init__(device)
        self.steps = StepOps(device)
        self.trees = Branching(device)
        self.payload = PayloadMover(device, lock)
        self.chunks = Chunks(self.payload, max_chunk=max_chunk, scratch_bytes=scratch_bytes)
        self._uploader = uploader
        self._matrices: dict[tuple[Path, str], DeviceMatrix] = {}
        self._attention = AttentionLauncher(device, self.steps.buffers)
        self._embeds: dict[int, tuple[DeviceMatrix, Embed]] = {}
        self._add_rows = AddRows(device)
        self._add_sums = AddSums(device)
        self._ones_of: dict[int, DeviceArray] = {}
        self._unscaled: dict[int, tuple[RopeTable, RopeTable]] = {}
        self._positions: deque[tuple[object, StepPositions]] = deque(maxlen=_CHUNKS_AT_ONCE)

    def load_vector(self, file: GgufFile, tensor_name: str) -> DeviceArray:
        tensor = file.tensor(tensor_name)
        values = dequantise(file.tensor_bytes(tensor_name), tensor.tensor_type, tensor.shape)
        return self.device.upload(np.array(values, np.float32))

    def load_matrix(self, file: GgufFile, tensor_name: str) -> DeviceMatrix:
        """Raises: UnsupportedModel if there are no kernels for its type; DeviceOutOfMemory."""
        self.model_path = file.path
        key = file.path, tensor_name
        if key not in self._matrices:  # a head may be the embedding table
            self._matrices[key] = matrix = self._uploader.matrix(file, tensor_name)
            self.chunks.expect(matrix.tensor_type, matrix.columns)
        return self._matrices[key]

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> DeviceKvCache:
        """Raises: SettingsError, DeviceOutOfMemory."""
        return DeviceKvCache(
            self.device,
            layers,
            capacity=capacity,
            kv_type=kv_type,
            recurrent=recurrent,
            trees=self.trees,
        )

    def embed(self, table: Matrix, token_ids: I32Array, out: Any = None) -> F32Rows:
        """`token_ids` may be StepTokens, which the kernel before this one may have written."""
        assert isinstance(table, DeviceMatrix)
        known = self._embeds.get(id(table))
        if known is None:
            embed = Embed(self.device, table.tensor_type, rows=table.rows, columns=table.columns)
            known = self._embeds[id(table)] = table, embed
        given: Any = token_ids
        if isinstance(given, StepTokens):
            ids = given.array
        else:
            check_token_ids(given, table.rows)
            ids = self.device.upload(given)
        rows = _rows(out) if out is not None else None
        if rows is None:
            is_tree = self.trees.current is not None
            rows = self._new_rows(ids.shape[0], table.columns, of_step=is_tree)
        # What advances positions must have ended before attention, which reads them early.
        known[1].launch(table.weights, ids, rows.array, overlaps_previous=False)
        return rows

    def rms_norm(self, x: Any, weight: Any, eps: float, out: Any = None) -> Any:
        if out is not None:
            raise ValueError("norms on a GPU are computed where they are used: out must be None")
        if isinstance(x, DeltaHeads) and x.norm is None:
            return replace(x, norm=(weight, eps))
        return Normed(self._rows_of(x), weight, eps)

    def linear(self, x: Any, matrix: Matrix, out: Any = None, *, add: Any = None) -> Any:
        assert isinstance(matrix, DeviceMatrix)
        value = self._factor(x)
        if add is None:
            if out is not None:
                raise ValueError("products are given out only to be added to")
            return Product(value, matrix)
        residual = _rows(add)
        if out is not add:
            raise ValueError("a product is added in place: out must be add")
        if residual.is_step:
            self.steps.add_product(value, matrix, residual)
        else:
            self.chunks.project(_of_chunk(value), (matrix,), add_to=residual)
        return residual

    def project(self, x: Any, matrices: Sequence[Matrix]) -> list[Any]:
        several = [matrix for matrix in matrices if isinstance(matrix, DeviceMatrix)]
        assert len(several) == len(matrices)
        value = self._factor(x)
        if value.is_step:
            return list(self.steps.project(value, several))
        return list(self.chunks.project(_of_chunk(value), several))

    def split_heads(self, x: Any, num_heads: int) -> HeadRows:
        return HeadRows(self._rows_of(x), num_heads)

    def merge_heads(self, x: Any) -> Any:
        if isinstance(x, DeltaHeads):
            return x  # not written yet
        assert isinstance(x, HeadRows)
        return x.rows if x.part is None else Columns(x.rows, x.num_heads, *x.part)

    def norm_and_rotate(
        self,
        q: Any,
        k: Any,
        positions: I32Array,
        table: RopeTable,
        *,
        q_weight: Any = None,
        k_weight: Any = None,
        eps: float = 0.0,
        norms_after: bool = False,
    ) -> None:
        """Put off until attention."""
        for heads, weight in ((q, q_weight), (k, k_weight)):
            assert isinstance(heads, HeadRows)
            heads.rotation = Rotation(table, weight, eps)
            if norms_after:
                heads.rotation = self._normed_first(table, weight, eps, dim=heads.dim)

    def _normed_first(
        self, table: RopeTable, weight: DeviceArray | None, eps: float, *, dim: int
    ) -> Rotation:
        """What gives the same as a norm after the rotation, which changes no length but by its
        scale."""
        if weight is not None:
            raise ValueError("a norm after the rotation has no weights")
        if table.scale == 1.0:
            return Rotation(table, self._ones(dim), eps)
        if table.num_rotated != dim:
            self.lacks("norms of heads of which a part is rotated and scaled")
        if id(table) not in self._unscaled:  # the table is kept, so that its id stays its own
            self._unscaled[id(table)] = table, replace(table, scale=1.0)
        return Rotation(self._unscaled[id(table)][1], self._ones(dim), eps / table.scale**2)

    def scale_queries(self, q: Any, positions: I32Array, temperature: AttentionTemperature) -> None:
        """Put off until attention."""
        assert isinstance(q, HeadRows)
        q.temperature = temperature

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        cache: KvCache,
        cache_layer: int,
        positions: I32Array,
        scale: float,
        out: Any = None,
        *,
        sinks: Any = None,
    ) -> HeadRows:
        assert isinstance(cache, DeviceKvCache)
        q, k, v = (self._whole(heads) for heads in (q, k, v))
        num_tokens = q.rows.num_tokens
        head_dim = cache.layers[cache_layer].kv.value_dim
        columns = q.num_heads * head_dim
        tree = self.trees.current
        options: dict[str, Any] = {"scale": scale, "sinks": sinks}
        if tree is not None:
            tree.check_size(num_tokens)
            rows = out.rows if out is not None else None
            if rows is None:
                rows = self.steps.attended_rows(num_tokens, columns, head_dim=head_dim)
            self._attention.tree((q, k, v), cache, cache_layer, tree=tree, out=rows, **options)
            return HeadRows(rows, q.num_heads)
        options["positions"] = self._positions_of(positions, cache)
        parts = [slice(0, num_tokens)]
        if not isinstance(positions, StepPositions):
            parts = list(cache.windows[cache_layer].parts(int(positions[0]), num_tokens))
        if out is None and num_tokens <= MOST_TOKENS:
            rows = self.steps.attended_rows(num_tokens, columns, head_dim=head_dim)
            self._attention.step((q, k, v), cache, cache_layer, out=rows, **options)
        else:
            rows = self.chunks.rows(num_tokens, columns) if out is None else out.rows
            self._attention.chunk((q, k, v), cache, cache_layer, out=rows, parts=parts, **options)
        return HeadRows(rows, q.num_heads)

    def route(self, logits: Any, rule: RoutingRule, *, bias: Any = None) -> tuple[Chosen, Chosen]:
        router = logits if isinstance(logits, Product) else self._rows_of(logits)
        if router.is_step:
            return self.steps.route(router, rule, bias)
        return self.chunks.route(self._rows_of(router), rule, bias)

    def add(self, x: Any, y: Any, out: Any = None) -> F32Rows:
        if isinstance(y, ExpertSums):
            if out is not x:
                raise ValueError("experts are added in place: out must be x")
            residual = _rows(x)
            if y.add_to is not None:
                y.add_to(residual)
                residual.version += 1
            elif y.parts:
                self._add_sums.launch(residual.array, *(part.array for part in y.parts))
                residual.version += 1
            else:
                self._of_phase(y.phase).add_experts(y, residual)
            return residual
        if isinstance(y, GatedProduct) and out is x:
            residual = _rows(x)
            self.steps.add_product(y.product.x, y.product.matrix, residual, gate=y.gate)
            return residual
        first, second = self._rows_of(x), self._rows_of(y)
        rows = self._rows_like(first) if out is None else _rows(out)
        self._add_rows.launch(first.array, second.array, rows.array)
        rows.version += 1
        return rows

    def local_sums(self, sums: ExpertSums) -> Buffer:
        """Sums of a layer's local experts. Shapes: result [T, H] float64."""
        return self._of_phase(sums.phase).local_sums(sums)

    def hidden_of(self, sums: ExpertSums) -> F32Array:
        """The input rows of experts, on the host. Shapes: result [T, H]."""
        rows = self._of_phase(sums.phase).normed_rows(sums.x)
        hidden: F32Array = self.device.download(rows.array)
        return hidden

    def uploaded(self, sums: F64Array) -> Buffer:
        """Remote sums, uploaded. Shapes: sums [T, H]."""
        if sums.shape[0] > MOST_TOKENS:
            return Buffer(self.device.upload(sums))
        buffer = self.steps.buffers.take(sums.shape, np.float64)
        self.device.write(buffer.array, sums)
        return buffer

    def _of_phase(self, phase: Phase) -> Chunks | StepOps:
        """What computes experts: the phase decides, so that a slice has the bits of the whole."""
        return self.chunks if phase is Phase.PREFILL else self.steps

    def to_host(self, value: Any) -> F32Array:
        """A value's rows, once everything before them is done. Shapes: result [T, columns]."""
        array: F32Array = self.device.download(self._rows_of(value).array)
        return array

    def copy_rows(self, value: Any, out: DeviceArray) -> None:
        """A value's rows into an array. Shapes: out [T, columns] float32."""
        self._elementwise.take_columns(self._columns_of(value), out)

    def argmax(self, logits: Any) -> I32Array:
        """See ComputeBackend.argmax; for a step it is computed on the device, where logits stay."""
        if isinstance(logits, Product) and logits.x.is_step:
            return self.steps.argmax(logits)
        return argmax_of(self.to_host(logits))

    def joined(self, parts: Sequence[Any]) -> F32Rows:
        """Values' rows, one after the other."""
        several = [self._rows_of(part) for part in parts]
        joined = self._new_rows(sum(each.num_tokens for each in several), several[0].columns)
        first = 0
        for each in several:
            self.device.copy(joined.array[first : first + each.num_tokens], each.array)
            first += each.num_tokens
        return joined

    def _positions_of(self, positions: Any, cache: DeviceKvCache) -> StepPositions:
        """The same on the device, brought there once for all layers."""
        if isinstance(positions, StepPositions):
            return positions
        for known, where in self._positions:
            if known is positions:
                return where
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 != positions.size:
            raise ValueError("positions must ascend by one")
        cache.check_fits(first, positions.size)
        where = StepPositions(self.device.upload(positions), context_bucket(last + 1))
        self._positions.append((positions, where))
        return where

    def _ones(self, count: int) -> DeviceArray:
        if count not in self._ones_of:
            self._ones_of[count] = self.device.upload(np.ones(count, np.float32))
        return self._ones_of[count]

    def _factor(self, x: Any) -> Normed | F32Rows | Activated:
        return x if isinstance(x, Normed | Activated) else self._rows_of(x)

    def _rows_of(self, value: DeviceValue) -> F32Rows:
        """The rows themselves; what was put off is done now."""
        if isinstance(value, F32Rows):
            return value
        if isinstance(value, HeadRows):
            if value.rotation is not None or value.temperature is not None:
                raise ValueError("heads that are to be rotated or scaled go into attention only")
            return self._whole(value).rows
        if isinstance(value, Product):
            if value.rows is None:
                value.rows = self.project(value.x, (value.matrix,))[0]
            return value.rows
        if isinstance(value, Activated):
            return self._activated(value.gate, value.up)
        if isinstance(value, GatedProduct):
            rows = self._rows_of(value.product)
            gated = self.gated(rows, value.gate, Gate.SIGMOID)
            assert isinstance(gated, F32Rows)
            return gated
        if isinstance(value, Columns):
            return self._taken(value)
        if isinstance(value, DeltaHeads):
            if value.norm is not None:
                self.lacks("a delta rule with a norm and no gate")
            return self._delta(value, None)
        if isinstance(value, Normed):
            if value.is_step:
                return self.steps.normed_rows(value)
            return self.chunks.copy_of_normed(value)
        raise ValueError(f"a {type(value).__name__} is not rows")

    def _new_rows(self, num_tokens: int, columns: int, *, of_step: bool = False) -> F32Rows:
        owner = self.steps if of_step or num_tokens <= MOST_TOKENS else self.chunks
        return owner.rows(num_tokens, columns)


def _of_chunk(value: Normed | F32Rows | Activated) -> Normed | F32Rows:
    assert not isinstance(value, Activated)  # which is a step's alone
    return value


def _rows(value: Any) -> F32Rows:
    assert isinstance(value, F32Rows)
    return value
