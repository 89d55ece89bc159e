"""Device memory of steps and of trees of draft tokens: captured ones, and what they read.

There is room for steps of one token and of eight, and for one tree of the largest size. Trees of
other sizes take what stays free, and are not captured if nothing does (run/captured_trees.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dflash_adapters.layers import Attention, Description, Rope, parts_of
from dflash_adapters.rope import AttentionTemperature, RopePairing
from dflash_adapters.spec import KvLayer, ModelSpec
from dflash_runtime.compute.gpu.device.mapped_array import layout_bytes
from dflash_runtime.compute.gpu.launch.decode_experts import MOST_PEERS
from dflash_runtime.compute.gpu.launch.sample_tokens import rule_layout
from dflash_runtime.compute.gpu.layers.attention_plan import (
    FIRST_BUCKET,
    AttentionShape,
    DecodePlan,
    context_bucket,
)
from dflash_runtime.compute.gpu.layers.delta import DeltaPlan
from dflash_runtime.compute.gpu.layers.kv_rows import layer_bytes
from dflash_runtime.compute.gpu.transfers.locked_room import copier_bytes
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.mailbox_layout import mail_layout
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.compute.trees import MOST_NODES

_FLOAT, _DOUBLE = 4, 8
_PAGE = 4096
_STEP_SIZES = (1, MOST_TOKENS)
_TREE_PLACES = 8
"""States kept at the same time while a tree goes through a recurrent layer: log2 of its tokens, and
one."""
_SMALL_BYTES = 1 << 20
"""Tables, counters and choices, each of some KiB."""


class StepRoom:
    """Counts the memory of steps and trees for one model."""

    def __init__(self, spec: ModelSpec, description: Description, *, layer_columns: int) -> None:
        """`layer_columns`: float32 values of a token that exist at the same time in a layer."""
        self._spec = spec
        self._kv_layers = Counter(spec.kv_layers)
        ropes, temperatures = dict[int, int](), set[AttentionTemperature]()
        self._attention_shapes: set[tuple[int, KvLayer]] = set()
        for part in parts_of(description):
            match part:
                case Rope():
                    ropes[id(part)] = part.num_rotated
                case AttentionTemperature():
                    temperatures.add(part)
                case Attention():
                    self._attention_shapes.add((part.heads.num, part.kv_layer))
        self._values_of_position = sum(ropes.values()) + len(temperatures)
        # As float32, and as int8 with scales.
        self._row_bytes = 2 * (_FLOAT + 2) * (spec.hidden_size + layer_columns)

    def num_bytes(self, num_positions: int, kv_type: KvType) -> int:
        """For sequences of up to so many positions. Raises: SettingsError as DeviceKvCache."""
        return (
            _SMALL_BYTES
            + self._tables(num_positions)
            + self._steps()
            + self._attention(num_positions, kv_type)
            + self._tree(kv_type)
        )

    @property
    def mail_bytes(self) -> int:
        """A parent's share of a mailbox between devices."""
        return mail_layout(self._spec.moe).replies_nbytes

    def remote_bytes(self, num_positions: int, num_remote_layers: int) -> int:
        """What steps with remote experts have besides: tables of ids, and rows of their own for
        each capture."""
        if not num_remote_layers:
            return 0
        moe = self._spec.moe
        most_experts = max(layer.num_experts for layer in moe.layers)
        tables = num_remote_layers * (MOST_PEERS + 2) * (_FLOAT * most_experts + 512)
        captures = 2 * len(list(_buckets(num_positions))) * self._step_bytes(1)
        return tables + captures

    @property
    def daemon_bytes(self) -> int:
        """A daemon's captured steps, and its share of a mailbox."""
        moe = self._spec.moe
        return _SMALL_BYTES + mail_layout(moe).requests_nbytes + self._steps()

    def staging_bytes(self, num_positions: int, num_remote_layers: int) -> int:
        """Locked memory of the host: sampled tokens, rules for them, and what weights are loaded
        through; with remote experts each layer's rows, choice and sums, a mailbox with the
        processor, and what weights of prompts are copied through."""
        total = (
            copier_bytes()
            + _pages(_FLOAT * (num_positions + 1))
            + _pages(
                layout_bytes(
                    rule_layout(vocab_size=self._spec.vocab_size, num_positions=num_positions + 1)
                )
            )
        )
        if num_remote_layers:
            layers = self._spec.moe.layers
            box = max(
                (_FLOAT + _DOUBLE) * layer.hidden_size + _DOUBLE * layer.num_experts_used
                for layer in layers
            )
            total += num_remote_layers * _pages(box + 5 * 256) + copier_bytes()
            mail = mail_layout(self._spec.moe)
            total += mail.requests_nbytes + mail.replies_nbytes + _PAGE
        return total

    def _tables(self, num_positions: int) -> int:
        """Angles of rotations, factors of queries, and random numbers, of each position."""
        return num_positions * (_FLOAT * self._values_of_position + _DOUBLE)

    def _steps(self) -> int:
        sampled = _DOUBLE * self._spec.vocab_size
        return sampled + sum(map(self._step_bytes, _STEP_SIZES))

    def _step_bytes(self, num_tokens: int) -> int:
        """Rows of a step, what its experts pass on, and its logits."""
        of_experts = max(
            layer.num_experts_used * (_FLOAT + 2) * layer.ffn_size
            for layer in self._spec.moe.layers
        )
        return num_tokens * (self._row_bytes + of_experts + _FLOAT * self._spec.vocab_size)

    def _attention(self, num_positions: int, kv_type: KvType) -> int:
        """Partial results of each context bucket; layers of one shape share them."""
        shapes = [
            AttentionShape(heads, kv, kv_type, RopePairing.HALF_SPLIT, 0, use_mma=False)
            for heads, kv in self._attention_shapes
        ]
        sizes = {
            DecodePlan(shape, num_tokens, bucket).scratch_bytes
            for shape in shapes
            for num_tokens in _STEP_SIZES
            for bucket in _buckets(num_positions)
        }
        return sum(sizes)

    def _tree(self, kv_type: KvType) -> int:
        """Rows, keys, values and states of the largest tree, until a path is accepted."""
        spec, total = self._spec, MOST_NODES * (self._row_bytes + _FLOAT * (MOST_NODES + 16))
        total += sum(
            count * layer_bytes(kv, MOST_NODES, kv_type) for kv, count in self._kv_layers.items()
        )
        plans = [DeltaPlan(each.delta, num_taps=each.conv_kernel) for each in spec.recurrent_layers]
        total += sum(MOST_NODES * _FLOAT * (each.channels + 2 * each.num_heads) for each in plans)
        states = (
            each.delta.num_value_heads * each.delta.key_dim * each.delta.value_dim
            for each in spec.recurrent_layers
        )
        return total + _TREE_PLACES * _FLOAT * max(states, default=0)


def _buckets(num_positions: int) -> Iterator[int]:
    """The context buckets of sequences of up to so many positions."""
    bucket = FIRST_BUCKET
    yield bucket
    while bucket < num_positions:
        bucket = context_bucket(bucket + 1)
        yield bucket


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
