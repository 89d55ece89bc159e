"""Host memory of a model, counted before anything is loaded.

Weights are read where they are mapped from the file; keys and values lie in slabs of whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    DeltaNet,
    Description,
    Layer,
    Linear,
    Tensor,
    parts_of,
)
from dflash_adapters.spec import KvLayer, ModelSpec, RecurrentLayer
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import HEAD_ROWS, LayerBytes, Needs, Room
from dflash_runtime.compute.sliding_window import MOST_KEPT, num_rows

HUGE_PAGE = 2 << 20

POSITION_BLOCK = 64
"""Positions that attention reads at once."""

STATE_BLOCK = 32
"""Tokens of a block of the delta rule, of which keys and rows are kept."""

_LANES = 32

PROCESS_BYTES = 320 << 20
"""Interpreter, libraries and compiled kernels."""
LEAST_PROCESS_BYTES = 208 << 20
"""The same without pages of files. While kernels are compiled (numba 0.68.1), a process that needs
25 MiB besides is killed within 221 MiB, not within 229."""
_RECORDED_BYTES = 16 << 20
"""Captured steps and the rows that they pass on."""
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Slabs:
    """How one layer's keys and values lie in memory: slabs of successive positions, of all heads.

    A slab has as many rows as fill a huge page, or fewer, so that the last is as full as others: a
    multiple of POSITION_BLOCK, whose values are read as evenly spaced rows.
    """

    num_slabs: int
    num_rows: int
    """Positions of a slab."""
    key_block_bytes: int
    """Keys of 32 positions of a head."""
    value_row_bytes: int
    """A head's values of a position."""
    num_heads: int

    @classmethod
    def of(cls, kv: KvLayer, num_positions: int, kv_type: KvType) -> Slabs:
        """For so many positions, those of a window."""
        value_dim = _padded(kv.value_dim)
        if kv_type is KvType.Q8_0:
            key_block_bytes, row_bytes = _padded(kv.key_dim) * 34, value_dim // _LANES * 34
        else:
            size = 2 if kv_type is KvType.F16 else 4
            key_block_bytes, row_bytes = kv.key_dim * _LANES * size, value_dim * size
        of_position = kv.num_heads * (key_block_bytes // _LANES + row_bytes)
        most = max(1, HUGE_PAGE // of_position // POSITION_BLOCK) * POSITION_BLOCK
        num_slabs = -(-num_positions // most)
        rows = -(-num_positions // (num_slabs * POSITION_BLOCK)) * POSITION_BLOCK
        return cls(-(-num_positions // rows), rows, key_block_bytes, row_bytes, kv.num_heads)

    @property
    def key_bytes(self) -> int:
        """A head's keys in a slab."""
        return self.num_rows // _LANES * self.key_block_bytes

    @property
    def head_bytes(self) -> int:
        return self.key_bytes + self.num_rows * self.value_row_bytes

    @property
    def slab_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes


def _padded(dim: int) -> int:
    return -(-dim // _LANES) * _LANES


def state_values(layer: RecurrentLayer) -> dict[str, int]:
    """Float32 values of each part of a recurrent layer's state, in their order."""
    delta = layer.delta
    heads, padded = delta.num_value_heads, _padded(delta.value_dim)
    return {
        "matrices": heads * delta.key_dim * padded,
        "rows": heads * STATE_BLOCK * padded,
        "keys": delta.num_key_heads * delta.key_dim * STATE_BLOCK,
        "decays": heads * STATE_BLOCK,
        "totals": _padded(heads),
        "inputs": (layer.conv_kernel - 1) * delta.num_channels,
    }


def cache_bytes(
    kv_layers: Iterable[KvLayer],
    recurrent: Iterable[RecurrentLayer],
    *,
    num_positions: int,
    kv_type: KvType,
) -> int:
    """Keys and values, recurrent states, and the snapshots that an engine may keep of both."""
    total = 0
    for kv in kv_layers:
        rows = num_rows(kv.mask, num_positions)
        copies = 1 + MOST_KEPT if rows < num_positions else 1
        total += copies * Slabs.of(kv, rows, kv_type).num_bytes
    states = sum(_FLOAT * sum(state_values(each).values()) for each in recurrent)
    return total + (1 + MOST_KEPT) * states


class HostRoom(Room):
    """Implements room.Room for backends that compute in host memory."""

    maps_weights = True

    def __init__(self, file: GgufFile, spec: ModelSpec, description: Description) -> None:
        self._file, self._spec, self._description = file, spec, description

    @cached_property
    def layers(self) -> tuple[LayerBytes, ...]:
        moe = self._spec.moe.by_layer_id
        found = []
        for layer_id, layer in enumerate(self._description.layers):
            routed = moe.get(layer_id)
            experts = (0, 0) if routed is None else (routed.expert_bytes, routed.num_experts)
            left_out = (
                frozenset[str]()
                if routed is None
                else frozenset().union(*(each.tensor_names for each in routed.projections))
            )
            found.append(LayerBytes(layer_id, self._stored(layer, left_out), *experts))
        return tuple(found)

    @cached_property
    def ends(self) -> int:
        return self._stored(self._description.ends)

    def layer_experts_bytes(self, layer_id: int, num_experts: int) -> int:
        return num_experts * self._spec.moe.by_layer_id[layer_id].expert_bytes

    def offload_bytes(self, num_missing: Mapping[int, int]) -> int:
        return 0

    def needs(
        self,
        *,
        num_positions: int,
        kv_type: KvType,
        chunk: int,
        is_parent: bool = True,
        num_remote_layers: int = 0,
        num_daemons: int = 0,
    ) -> Needs:
        spec = self._spec
        if not is_parent:
            return Needs(work=chunk * self._bytes_of_pairs, driver=PROCESS_BYTES)
        num_tokens = min(chunk, num_positions)
        rows = num_tokens * (self._bytes_of_token + self._bytes_of_pairs)
        logits = _FLOAT * min(num_tokens, HEAD_ROWS) * spec.vocab_size
        return Needs(
            weights=self.ends + sum(layer.trunk for layer in self.layers),
            cache=cache_bytes(
                spec.kv_layers,
                spec.recurrent_layers,
                num_positions=num_positions,
                kv_type=kv_type,
            ),
            work=rows + logits,
            recorded=_RECORDED_BYTES,
            driver=PROCESS_BYTES,
            counts_staging=True,
        )

    @cached_property
    def _bytes_of_token(self) -> int:
        """Rows of a token in the largest layer, twice: results, and as products read them."""
        return 2 * _FLOAT * (self._spec.hidden_size + max(map(_columns, self._description.layers)))

    def waiting_bytes(self, num_tokens: int) -> int:
        """Rows of other chunks of a group, so many tokens, while one is in a layer: their residual,
        and what experts are given."""
        return max(0, num_tokens) * (2 * _FLOAT * self._spec.hidden_size)

    def seldom_bytes(self, chunk: int) -> int:
        """Of `needs`, what memory is seldom used for: an embedding of which steps read single rows,
        and logits of all tokens of a chunk, for which pages of weights can be given up."""
        ends = self._description.ends
        logits = _FLOAT * (min(chunk, HEAD_ROWS) - 1) * self._spec.vocab_size
        is_head = ends.head.weight.name == ends.embedding.name
        embedding = 0 if is_head else self._file.tensor(ends.embedding.name).num_bytes
        return logits + embedding

    @property
    def _bytes_of_pairs(self) -> int:
        """What a token's experts pass on, with the sums in float64."""
        layers = self._spec.moe.layers
        return max(
            _FLOAT * each.num_experts_used * each.ffn_size + 3 * _FLOAT * each.hidden_size
            for each in layers
        )

    def _stored(self, part: object, left_out: frozenset[str] = frozenset()) -> int:
        names = {each.name for each in parts_of(part) if isinstance(each, Tensor)} - left_out
        found = (self._file.tensors[name] for name in names if name in self._file.tensors)
        return sum(tensor.num_bytes for tensor in found)


def _columns(layer: Layer) -> int:
    """Float32 values of a token's projections, the largest mixer's or FFN's."""
    match layer.mixer:
        case Attention() as attention:
            of_mixer = 2 * sum(attention.qkv.sizes)
        case DeltaNet() as delta_net:
            of_mixer = 2 * sum(prod(each.weight.shape[:-1]) for each in delta_net.inputs)
    dense = (each for each in parts_of(layer.ffn) if isinstance(each, Linear))
    return max(of_mixer, sum(prod(each.weight.shape[:-1]) for each in dense))
