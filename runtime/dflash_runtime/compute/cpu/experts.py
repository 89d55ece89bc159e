"""The experts of one layer on the CPU, read from the mapped file."""

from __future__ import annotations

from copy import copy

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ExpertProjection, ExpertVector, MoeLayer
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, Phase, U8Array
from dflash_runtime.compute.backend import ExpertStage
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels import step_tasks as steps
from dflash_runtime.compute.cpu.kernels.products import TOTALS_BYTES, product_scratch_bytes
from dflash_runtime.compute.cpu.kernels.words import Call, address, words_kernel
from dflash_runtime.compute.cpu.threads.parallel import FEW_ROWS
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import NUM_FIELDS, row_layout, step_fields
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function
from dflash_runtime.compute.cpu.weights.repacked.step_kernels import STEP_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.step_quantising import quantise_step_function
from dflash_runtime.compute.cpu.weights.rows import UNPACK
from dflash_runtime.compute.step_order import expert_sum_lanes

_BLOCK_BYTES = max(Q8_BLOCK_BYTES, STEP_BLOCK_BYTES)

_OUT_OF_RANGE = "the batch has expert ids, tokens or pairs out of range"


class CpuExpertBank:
    """Implements backend.ExpertBank.

    Owns the views of the mapping, and the arrays, that the addresses in its words point into.
    """

    def __init__(
        self,
        file: GgufFile,
        layer: MoeLayer,
        global_expert_ids: I32Array,
        workers: Workers,
        scratch: Scratch,
    ) -> None:
        ids = global_expert_ids.astype(np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < layer.num_experts):
            raise ValueError(f"expert ids must lie within 0..{layer.num_experts - 1}")
        self.layer = layer
        self.num_experts = int(ids.size)
        """Fewer than it was made with, if it is to be resized."""
        self.global_expert_ids = ids
        """Of the experts that it was made with. Shapes: [experts]."""
        self.selections = np.zeros(layer.num_experts, np.int64)
        """How often each expert was routed to in calls of `routed_call`, by global id."""
        self.workers = workers
        self._scratch = scratch
        k.run_batch()  # compiled now rather than in the first step
        self._data: dict[int, U8Array] = {}
        """By shard, a view that keeps the mapping."""
        addresses = np.zeros((self.num_experts, 3), np.int64)
        layouts = np.zeros((3, NUM_FIELDS), np.int64)
        for index, projection in enumerate(layer.projections):
            addresses[:, index] = self._in_place(file, projection, ids)
            layouts[index] = row_layout(projection.tensor_type, projection.columns)
        scales, biases = _scales(file, layer, ids), self._bias_addresses(file, ids)
        activation = np.array(
            [layer.activation_limit, layer.activation_alpha, layer.activation.up_offset], np.float32
        )
        wants_q8 = layouts[:, UNPACK] != 0
        self._hidden_q8_bytes = self._ffn_q8_bytes = 0
        if wants_q8[:2].any():
            self._hidden_q8_bytes = _BLOCK_BYTES * (layer.hidden_size // 32)
        if wants_q8[2]:
            self._ffn_q8_bytes = _BLOCK_BYTES * (layer.ffn_size // 32)
        words = np.zeros(k.NUM_LAYER_WORDS, np.int64)
        words[k.NUM_EXPERTS], words[k.FFN_SIZE] = self.num_experts, layer.ffn_size
        words[k.ADDRESSES], words[k.LAYOUTS] = addresses.ctypes.data, layouts.ctypes.data
        words[k.SCALES] = scales.ctypes.data if scales.size else 0
        words[k.BIASES] = biases.ctypes.data if biases.size else 0
        words[k.ACTIVATION] = activation.ctypes.data
        words[k.HIDDEN_Q8_BYTES] = self._hidden_q8_bytes
        words[k.FFN_Q8_BYTES] = self._ffn_q8_bytes
        words[k.SCRATCH_BYTES] = 2 * TOTALS_BYTES + product_scratch_bytes(layouts)
        words[k.NUM_THREADS] = workers.num_threads
        functions = quantise_function(), *k.expert_functions()
        words[k.QUANTISE :] = [function.address for function in functions]
        self.words: I64Array = words
        """The layer's words of experts_kernel. Shapes: [NUM_LAYER_WORDS]."""
        self._arrays = addresses, layouts, scales, biases, activation
        self._arena: object = None

    def come_from(self, arena_words: int, functions: tuple[int, int], *, keeps: object) -> None:
        """Have experts brought into memory when they are used (host_arena). Addresses change from
        now on. Call it before steps are captured. `keeps`: what the words belong to."""
        self._arena = keeps
        self.words[[k.ARENA, k.ENTER_ARENA, k.LEAVE_ARENA]] = arena_words, *functions

    def places(self) -> list[list[tuple[int, int, int]]]:
        """Shard, offset and bytes of gate, up and down of each expert."""
        return [
            [
                (*projection.place_of(expert), projection.num_bytes)
                for projection in self.layer.projections
            ]
            for expert in self.global_expert_ids.tolist()
        ]

    @property
    def has_all_experts(self) -> bool:
        """Whether it was made with all experts of the layer, under their global ids."""
        return np.array_equal(self.global_expert_ids, np.arange(self.layer.num_experts))

    @property
    def addresses(self) -> I64Array:
        """Where the file's matrices of gate, up and down lie. Shapes: [experts, 3]."""
        return self._arrays[0]

    def mappings(self) -> list[U8Array]:
        """The mapped shards in which they lie, as a whole."""
        found = []
        for view in self._data.values():
            while isinstance(view.base, np.ndarray):
                view = view.base
            found.append(view)
        return found

    def in_step_order(self) -> CpuExpertBank:
        """The same experts, with decode steps in step order (see step_order).

        What is replaced in one of both is replaced in the other.
        """
        if self.words[k.QUANTISE_STEP]:
            return self
        bank, layer = copy(self), self.layer
        addresses, layouts, scales, biases, activation = self._arrays
        layouts, bank.words = layouts.copy(), self.words.copy()
        gate_up_lanes, down_lanes = expert_sum_lanes(
            *(projection.tensor_type for projection in layer.projections),
            hidden_size=layer.hidden_size,
            ffn_size=layer.ffn_size,
        )
        for layout, projection, num_lanes in zip(
            layouts, layer.projections, (gate_up_lanes, gate_up_lanes, down_lanes), strict=True
        ):
            for field, value in step_fields(projection.tensor_type, num_lanes).items():
                layout[field] = value
        bank.words[k.LAYOUTS] = layouts.ctypes.data
        bank.words[k.QUANTISE_STEP] = quantise_step_function().address
        bank._arrays = addresses, layouts, scales, biases, activation
        return bank

    def replace(
        self,
        file: GgufFile,
        local_expert_ids: I32Array,
        global_expert_ids: I32Array,
        *,
        stage: ExpertStage | None = None,
    ) -> None:
        """Only addresses and scales change, in place. Not of a bank whose experts are brought from
        the disk."""
        if self.words[k.ARENA]:
            raise ValueError("experts that come from the disk are not replaced")
        addresses, _, scales, biases, _ = self._arrays
        ids = global_expert_ids.astype(np.int64)
        for index, projection in enumerate(self.layer.projections):
            addresses[local_expert_ids, index] = self._in_place(file, projection, ids)
        if scales.size:
            scales[local_expert_ids] = _scales(file, self.layer, ids)
        if biases.size:
            biases[local_expert_ids] = self._bias_addresses(file, ids)

    @property
    def most_experts(self) -> int:
        return len(self.addresses)

    def held_bytes(self, num_experts: int) -> int:
        """None: they lie in the mapped file."""
        return 0

    def resize(self, file: GgufFile, global_expert_ids: I32Array) -> None:
        """What is recorded has places for `most_experts`: those beyond the given ones hold
        others."""
        most = self.most_experts
        if global_expert_ids.size > most:
            raise ValueError(f"there is room for {most} experts, not {global_expert_ids.size}")
        every = with_others(global_expert_ids, self.layer.num_experts)[:most]
        self.replace(file, np.arange(most, dtype=np.int32), every)
        self.num_experts = int(global_expert_ids.size)

    def routed_call(
        self,
        hidden: F32Array,
        routing: tuple[I32Array, F32Array],
        local_ids: I32Array,
        out: F32Array,
    ) -> tuple[Call, tuple[object, ...]]:
        """A call that computes routed experts, all of which are here, and counts them in
        `selections`; and the owners of the memory that it uses besides the arguments'.

        Shapes: hidden, out [T, H]; routing [T, K] global ids and weights; local_ids [E].
        """
        num_tokens, num_pairs = hidden.shape[0], routing[0].size
        sums, indices = np.empty(hidden.shape), np.empty((3, num_pairs + 1), np.int32)
        weights = np.empty(num_pairs, np.float32)
        words = [*self.words.tolist(), *[0] * (steps.NUM_ROUTED_WORDS - k.NUM_LAYER_WORDS)]
        selections = self.selections
        steps.set_routing(
            words, hidden, routing, local_ids=local_ids, selections=selections, sums=sums, out=out
        )
        places = [address(each, np.int32) for each in indices]
        words[k.EXPERT_IDS], words[k.GROUP_STARTS], words[k.TOKEN_INDICES] = places
        words[k.WEIGHTS], words[k.IS_STEP] = address(weights), 1
        scratch = self.scratch_words(num_tokens, num_pairs)
        call = Call(steps.run_routed().address, words, (k.NUM_TOKENS,), scratch=scratch)
        return call, (self, sums, indices, weights)

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        hidden = batch.hidden
        if hidden.shape != out.shape or hidden.shape[1:] != (self.layer.hidden_size,):
            expected = f"[T, {self.layer.hidden_size}]"
            raise ValueError(f"hidden {hidden.shape}, out {out.shape}, expected {expected}")
        # Of a prompt few rows may be routed here: its pass goes on with as many threads as before.
        if batch.phase is not Phase.PREFILL or batch.num_tokens > FEW_ROWS:
            self.workers.begin(batch.num_tokens)
        words = self._batch_words(batch, hidden, out)
        sizes = self.scratch_bytes(batch.num_tokens, batch.num_pairs)
        buffer, memory = self._scratch.take(sizes)
        try:
            for part, place, size in zip(k.SCRATCH_PARTS, memory, sizes, strict=False):
                words[part] = place if size else 0
            words_kernel()(k.run_batch().address, words, self.workers.address)
        finally:
            self._scratch.give_back(buffer)
        if not words[k.NUM_GROUPS]:
            raise ValueError(_OUT_OF_RANGE)

    def _batch_words(self, batch: RoutedBatch, hidden: F32Array, out: F64Array) -> I64Array:
        """But for scratch memory. Raises: ValueError if arrays are longer or shorter than others
        say, or `out` cannot be written."""
        starts, num_groups, num_pairs = batch.group_starts, batch.num_groups, batch.num_pairs
        is_whole = batch.token_indices.size == batch.weights.size == num_pairs
        if starts.size != num_groups + 1 or starts[-1] != num_pairs or not is_whole:
            raise ValueError(_OUT_OF_RANGE)
        if not out.flags.writeable:
            raise ValueError("the sums cannot be written")
        words = np.zeros(k.NUM_ARGUMENTS, np.int64)
        words[: k.NUM_LAYER_WORDS] = self.words
        words[k.HIDDEN], words[k.OUT] = address(hidden), address(out, np.float64)
        words[k.NUM_TOKENS], words[k.HIDDEN_SIZE] = hidden.shape
        words[k.IS_STEP] = batch.phase is not Phase.PREFILL
        words[k.NUM_GROUPS] = num_groups
        words[k.EXPERT_IDS] = address(batch.expert_ids, np.int32)
        words[k.GROUP_STARTS] = address(starts, np.int32)
        words[k.TOKEN_INDICES] = address(batch.token_indices, np.int32)
        words[k.WEIGHTS] = address(batch.weights)
        return words

    def scratch_bytes(self, num_tokens: int, num_pairs: int) -> tuple[int, ...]:
        """What such a batch needs of each of experts_kernel.SCRATCH_PARTS; enough for smaller ones,
        too."""
        ffn_q8_bytes = num_pairs * self._ffn_q8_bytes
        if self._ffn_q8_bytes:
            ffn_q8_bytes += 8 * min(num_pairs, k.FEW_PAIRS) * (self.layer.ffn_size // 32)
        return (
            num_tokens * self._hidden_q8_bytes,
            (num_pairs if num_tokens > 1 else 0) * self._hidden_q8_bytes,
            num_pairs * 4 * self.layer.ffn_size,
            ffn_q8_bytes,
            self.workers.num_threads * int(self.words[k.SCRATCH_BYTES]),
        )

    def scratch_words(self, num_tokens: int, num_pairs: int) -> tuple[tuple[int, int], ...]:
        """The same by word, as in Call; an address of 0 says that there are no q8 blocks."""
        sizes = self.scratch_bytes(num_tokens, num_pairs)
        return tuple(part for part in zip(k.SCRATCH_PARTS, sizes, strict=True) if part[1])

    def _bias_addresses(self, file: GgufFile, global_expert_ids: I64Array) -> I64Array:
        """Address of each expert's gate, up and down bias, 0 where there is none.

        Shapes: result [E, 3], or [0, 3] if the layer has none.
        """
        biases = [projection.bias for projection in self.layer.projections]
        if not any(biases):
            return np.empty((0, 3), np.int64)
        addresses = np.zeros((global_expert_ids.size, 3), np.int64)
        for index, bias in enumerate(biases):
            if bias is not None:
                addresses[:, index] = self._in_place(file, bias, global_expert_ids)
        return addresses

    def _in_place(
        self, file: GgufFile, part: ExpertProjection | ExpertVector, global_expert_ids: I64Array
    ) -> I64Array:
        """Address of each expert in the mapping. Shapes: result [E]."""
        addresses = np.empty(global_expert_ids.size, np.int64)
        bases: dict[int, int] = {}
        for local_expert_id, global_expert_id in enumerate(global_expert_ids.tolist()):
            shard_index, offset_bytes = part.place_of(global_expert_id)
            data = file.region(shard_index, offset_bytes, part.num_bytes)
            if shard_index not in bases:  # `.ctypes` costs more than the rest of the loop
                bases[shard_index] = data.ctypes.data - offset_bytes
                self._data[shard_index] = data
            addresses[local_expert_id] = bases[shard_index] + offset_bytes
        return addresses


def with_others(global_expert_ids: I32Array, num_experts: int) -> I32Array:
    """These, and then the layer's other experts. Shapes: result [E]."""
    others = np.setdiff1d(np.arange(num_experts, dtype=np.int32), global_expert_ids)
    return np.concatenate((global_expert_ids, others)).astype(np.int32)


def _scales(file: GgufFile, layer: MoeLayer, global_expert_ids: I64Array) -> F32Array:
    """Factors of each expert's gate, up and down products.

    Shapes: result [E, 3], or [0, 3] if the layer has none.
    """
    scales = [projection.scale for projection in layer.projections]
    if not any(scales):
        return np.empty((0, 3), np.float32)
    values = np.ones((global_expert_ids.size, 3), np.float32)
    for index, scale in enumerate(scales):
        if scale is not None:
            for local_expert_id, global_expert_id in enumerate(global_expert_ids.tolist()):
                stored = file.region(*scale.place_of(global_expert_id), scale.num_bytes)
                values[local_expert_id, index] = stored.view("<f4")[0]
    return values
