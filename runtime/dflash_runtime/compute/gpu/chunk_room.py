"""Device memory of a chunk of a prompt: what is kept from chunk to chunk, and rows that pass.

Mirrors what ops/chunks.py and model/ allocate; tests/runtime/placement/test_footprint.py compares
it with what they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    DeltaNet,
    Description,
    Ffn,
    GateBesideQueries,
    HeadOrElementGate,
    InputScaledFfn,
    Layer,
    Linear,
    MatrixTensor,
    RoutedFfn,
    RowNormRotary,
    parts_of,
)
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_runtime.compute.gpu.device.devices import allocated
from dflash_runtime.compute.gpu.launch.layouts import UNIT, num_units
from dflash_runtime.compute.gpu.launch.prefill_experts import terms_bytes
from dflash_runtime.compute.gpu.launch.prefill_groups import CHUNK_PAIRS
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    SEGMENT,
    activation_parts,
    half_row_bytes,
)
from dflash_runtime.compute.gpu.layers.delta import DeltaPlan
from dflash_runtime.compute.room import HEAD_ROWS

MAX_CHUNK = 4096
"""Tokens of a prompt chunk. Larger ones convert matrices to halves less often."""
GROUP_TOKENS = MAX_CHUNK
"""Tokens of a prompt whose chunks go through a layer one after the other where weights of experts
are copied for that: once for all of them."""
GPU_CHUNKS = tuple(MAX_CHUNK >> halvings for halvings in range(4))
"""Sizes of prompt chunks that are chosen from, the preferred one first."""

SCRATCH_BYTES = 256 << 20
"""For matrices converted to halves in chunks of MAX_CHUNK: 42 experts of a 30B model at once. All
128 of a layer take 768 MiB, and prompts would be read 3.5 % faster."""

_LESS_SCRATCH_BYTES = 128 << 20
"""The same in smaller chunks, which are chosen where memory is scarce: 20 of these experts."""

_NOT_REUSED = 0.3
"""Of memory that is in use before experts or beside them, the part that the other one cannot have:
CuPy's pool has cut it into pieces that are too small. 0.2 in the worst case of all architectures'
real sizes and chunks (tests/runtime/placement/test_footprint.py)."""

_FLOAT, _DOUBLE = 4, 8
_SMALL_BYTES = 2 << 20
"""Tables and counters of a backend, each of some KiB."""


def scratch_of_chunk(chunk: int) -> int:
    """Bytes for matrices converted to halves, of a backend with chunks of so many tokens."""
    return SCRATCH_BYTES if chunk >= MAX_CHUNK else _LESS_SCRATCH_BYTES


def group_bytes(layer: MoeLayer) -> int:
    """Scratch memory for the halves of one expert's matrices: gate and up, or down."""
    return max(
        2 * layer.ffn_size * half_row_bytes(layer.hidden_size),
        layer.hidden_size * half_row_bytes(layer.ffn_size),
    )


class ChunkRoom:
    """Counts a chunk's memory for one model."""

    def __init__(self, file: GgufFile, spec: ModelSpec, description: Description) -> None:
        self._file, self._layers = file, spec.moe.layers
        self._hidden_size, self._vocab_size = spec.hidden_size, spec.vocab_size
        self._routed_columns = max(
            (_routed_columns(each.ffn, spec.hidden_size) for each in description.layers), default=0
        )
        self.layer_columns = max(_columns_of(each, spec.hidden_size) for each in description.layers)
        """Float32 values of a token that exist at the same time in a layer, beside its residual."""
        self.step_columns = self.layer_columns + max(
            (
                each.mixer.heads.query_size
                for each in description.layers
                if isinstance(each.mixer, Attention)
            ),
            default=0,
        )
        """The same of a step, which keeps queries beside what they find."""
        self._dense = self._dense_columns(description)
        self._normed = set(_normed_columns(description.layers))

    def kept_bytes(
        self, max_chunk: int, scratch_bytes: int, *, is_parent: bool = True, is_remote: bool = False
    ) -> int:
        """Memory for the largest chunk, taken once: weights as halves, rows as products read them,
        pairs by expert and their terms. A parent's with remote experts (`is_remote`) sends
        normalised rows."""
        scratch = max(scratch_bytes, *map(group_bytes, self._layers))
        return (
            _SMALL_BYTES
            + allocated(scratch)
            + self._rows(max_chunk, is_parent, is_remote)
            + self._experts(max_chunk)
        )

    def passing_bytes(self, num_tokens: int, *, remote_bytes: int = 0) -> int:
        """Rows of a chunk of so many tokens that exist at the same time: in its largest layer,
        beside routed experts with `remote_bytes`, and at the head; and those of the chunk before,
        which may be in use until it is replaced."""
        residual = _FLOAT * num_tokens * self._hidden_size
        in_layer = _FLOAT * num_tokens * self.layer_columns
        in_experts = _FLOAT * num_tokens * self._routed_columns + remote_bytes
        logits = _FLOAT * min(num_tokens, HEAD_ROWS) * self._vocab_size
        not_reused = int(_NOT_REUSED * min(in_layer, remote_bytes))
        return 2 * residual + max(in_layer, in_experts, logits) + not_reused

    def waiting_bytes(self, num_tokens: int) -> int:
        """Rows of other chunks of a group, so many tokens, while one is in a layer: their residual,
        what a layer has beside its experts, and sums of local ones."""
        of_token = _FLOAT * (self._hidden_size + self._routed_columns)
        return max(0, num_tokens) * (of_token + _DOUBLE * self._hidden_size)

    def remote_bytes(self, num_tokens: int, num_daemons: int) -> int:
        """What a chunk has while experts are asked for: the rows that are sent, local sums and each
        daemon's."""
        of_token = _FLOAT + _DOUBLE * (2 + num_daemons)
        return num_tokens * self._hidden_size * of_token

    def batch_bytes(self, num_tokens: int) -> int:
        """A daemon's rows and sums of two batches, as a parent that overlaps its own sends them;
        and what matrices are repacked from."""
        staged = max(each.num_bytes for layer in self._layers for each in layer.projections)
        rows = allocated(_FLOAT * num_tokens * self._hidden_size)
        sums = allocated(_DOUBLE * num_tokens * self._hidden_size)
        return 2 * (rows + sums) + allocated(staged)

    def _rows(self, max_chunk: int, is_parent: bool, is_remote: bool) -> int:
        """Rows of each length as products read them: in halves, and normalised floats."""
        parts_of_columns: dict[int, set[int]] = {}
        if is_parent:
            for columns, found in self._dense.items():
                parts_of_columns.setdefault(columns, set()).update(found)
            for columns in self._normed:
                parts_of_columns.setdefault(columns, set()).add(0)
        for layer in self._layers:
            for each in layer.projections[:2]:
                parts = activation_parts((each.tensor_type,))
                parts_of_columns.setdefault(each.columns, set()).add(parts)
        if is_remote:
            parts_of_columns.setdefault(self._hidden_size, set()).add(0)
        total = 0
        for columns, found in parts_of_columns.items():
            most = max(found)
            total += allocated(2 * most * max_chunk * columns) + _FLOAT * max_chunk
            total += allocated(_FLOAT * max_chunk * columns) if 0 in found and is_parent else 0
        return total

    def _experts(self, max_chunk: int) -> int:
        """Pairs by expert (ExpertGroups), and what experts compute of them (ExpertPrefill)."""
        groups = {(layer.num_experts, max_chunk * layer.num_experts_used) for layer in self._layers}
        total = sum(
            5 * allocated(_FLOAT * pairs)
            + allocated(_DOUBLE * pairs)
            + _FLOAT * num_experts * (-(-pairs // CHUNK_PAIRS) + 8)
            for num_experts, pairs in groups
        )
        sizes: dict[tuple[int, int, int], int] = {}
        for layer in self._layers:
            pairs = max_chunk * layer.num_experts_used
            key = layer.hidden_size, layer.ffn_size, pairs
            of_value = 2 * activation_parts((layer.down.tensor_type,)) or _FLOAT
            sizes[key] = max(sizes.get(key, 0), of_value)
        for (hidden_size, ffn_size, pairs), of_value in sizes.items():
            shifts = -(-ffn_size // SEGMENT)
            total += allocated(terms_bytes(pairs, hidden_size)) + allocated(_FLOAT * pairs)
            total += allocated(pairs * shifts) + allocated(of_value * pairs * ffn_size)
        return total

    def _dense_columns(self, description: Description) -> dict[int, set[int]]:
        """Lengths of rows that dense matrices multiply, and in how many parts."""
        found: dict[int, set[int]] = {}
        for tensor in parts_of(description):
            if isinstance(tensor, MatrixTensor):
                stored = self._file.tensor(tensor.name)
                parts = activation_parts((stored.tensor_type,))
                found.setdefault(stored.columns, set()).add(parts)
        return found


def _normed_columns(layers: Iterable[Layer]) -> Iterable[int]:
    """Lengths of rows of queries and keys that are normalised before they are split into heads."""
    for layer in layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and isinstance(mixer.positions, RowNormRotary):
            yield mixer.heads.query_size
            yield mixer.heads.kv_size


def _columns_of(layer: Layer, hidden_size: int) -> int:
    """Float32 values of a token that exist at the same time in a layer, beside its residual."""
    mixer, ffn = layer.mixer, layer.ffn
    of_mixer = (
        _attention_columns(mixer, hidden_size)
        if isinstance(mixer, Attention)
        else _delta_columns(mixer)
    )
    of_ffn = _ffn_columns(ffn, hidden_size) if isinstance(ffn, Ffn) else 0
    return max(of_mixer, of_ffn, _routed_columns(ffn, hidden_size))


def _routed_columns(ffn: Ffn | RoutedFfn | InputScaledFfn, hidden_size: int) -> int:
    """Those beside its routed experts: logits and choice, a shared expert, and the same logits and
    choice predicted for the next layer; 0 without experts."""
    match ffn:
        case Ffn():
            return 0
        case RoutedFfn(experts=experts, shared=shared):
            columns = 2 * (experts.sizes.num_experts + 2 * experts.sizes.num_experts_used)
            return columns + (0 if shared is None else _ffn_columns(shared, hidden_size))
        case InputScaledFfn(experts=experts, shared=shared):
            columns = experts.sizes.num_experts + 4 * experts.sizes.num_experts_used + hidden_size
            return columns + _ffn_columns(shared, hidden_size)


def _attention_columns(layer: Attention, hidden_size: int) -> int:
    heads, sizes = layer.heads, sum(layer.qkv.sizes)
    is_joint = len(layer.qkv.linears) == 1
    projecting = 2 * sizes if is_joint else sizes
    held = sizes  # what the queries find is in their place
    if isinstance(layer.positions, RowNormRotary):
        held += heads.query_size + heads.kv_size
    opening = 0
    match layer.gate:
        case GateBesideQueries():
            held += heads.query_size
        case HeadOrElementGate(linear=linear):
            opening = _rows_of(linear)
    queries = heads.num * UNIT * num_units(heads.dim)  # of up to four bytes each
    product = hidden_size if layer.output.scale is not None else 0
    return max(projecting, held + max(queries, opening, product))


def _delta_columns(layer: DeltaNet) -> int:
    plan = DeltaPlan(layer.state.delta, num_taps=layer.state.conv_kernel)
    return 2 * plan.channels + 2 * plan.value_channels + 4 * plan.num_heads


def _ffn_columns(ffn: Ffn, hidden_size: int) -> int:
    is_plain = ffn.share is None and ffn.down.scale is None and ffn.down.bias is None
    share = 0 if ffn.share is None else 1
    return _rows_of(ffn.gate) + _rows_of(ffn.up) + share + (0 if is_plain else hidden_size)


def _rows_of(linear: Linear) -> int:
    return prod(linear.weight.shape[:-1])
