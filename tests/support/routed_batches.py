"""Routed batches for tests: random ones, and the conversion to a plain dictionary.

The dictionary {(token, expert): weight} is the naive model with which grouping, compacting, slicing
and every backend are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation, ExpertProjection, MoeLayer
from dflash_protocol.batch import HostHidden, HostSums, RoutedBatch
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.host_model import HostExperts
from dflash_runtime.compute.model import run_to_end
from dflash_runtime.experts.compute import ExpertCompute, Ticket

HIDDEN_SIZE = 3

Pairs: TypeAlias = Mapping[tuple[int, int], float]
"""Weight by (token_idx, expert_id). Weights are small multiples of 1/8, so that sums are exact."""


def numbered_rows(num_tokens: int, hidden_size: int = HIDDEN_SIZE) -> F32Array:
    """Rows that differ from each other. Shapes: result [T, H]."""
    count = num_tokens * hidden_size
    return np.arange(1, count + 1, dtype=np.float32).reshape(num_tokens, hidden_size)


@st.composite
def pair_sets(
    draw: st.DrawFn, max_tokens: int = 7, max_experts: int = 5
) -> tuple[int, dict[tuple[int, int], float]]:
    """A number of tokens and a set of pairs; both may be empty."""
    num_tokens = draw(st.integers(0, max_tokens))
    if num_tokens == 0:
        return 0, {}
    places = st.tuples(st.integers(0, num_tokens - 1), st.integers(0, max_experts - 1))
    weights = st.integers(-8, 8).map(lambda eighths: eighths / 8)
    return num_tokens, draw(st.dictionaries(places, weights, max_size=3 * num_tokens))


def batch_of(
    num_tokens: int,
    pairs: Pairs,
    *,
    hidden: F32Array | None = None,
    phase: Phase = Phase.PREFILL,
) -> RoutedBatch:
    """The batch of these pairs, made without the code under test."""
    ordered = sorted(pairs, key=lambda place: (place[1], place[0]))
    expert_ids = sorted({expert_id for _, expert_id in pairs})
    starts = [sum(expert_id < limit for _, expert_id in pairs) for limit in expert_ids]
    return RoutedBatch(
        phase=phase,
        rows=HostHidden(numbered_rows(num_tokens) if hidden is None else hidden),
        expert_ids=np.array(expert_ids, dtype=np.int32),
        group_starts=np.array([*starts, len(pairs)], dtype=np.int32),
        token_indices=np.array([token_idx for token_idx, _ in ordered], dtype=np.int32),
        weights=np.array([pairs[place] for place in ordered], dtype=np.float32),
    )


def begin(owner: ExpertCompute, batch: RoutedBatch, *, layer_id: int = 0) -> Ticket:
    """Begin the work of a batch."""
    return owner.begin(layer_id, batch.rows, batch.pairs(), phase=batch.phase)


def finish(owner: ExpertCompute, ticket: Ticket, out: F64Array) -> None:
    """Finish a ticket into an array of the host."""
    owner.finish(ticket, HostSums(out))


def routed_sums(
    runtime: RemoteExperts,
    layer_id: int,
    hidden: F32Array,
    chosen: tuple[I32Array, F32Array],
    phase: Phase,
) -> F32Array:
    """The routed experts of a layer, as a host backend's model computes them.

    Shapes: hidden, result [T, H]; chosen [T, K], ids and weights.
    """
    experts = HostExperts(runtime, phase)
    return run_to_end(experts(layer_id, hidden, *chosen))


def pairs_of(batch: RoutedBatch) -> dict[tuple[int, int], float]:
    """The pairs of a batch as a dictionary. Fails if a pair occurs twice."""
    pairs: dict[tuple[int, int], float] = {}
    for group, expert_id in enumerate(batch.expert_ids.tolist()):
        for pair in range(batch.group_starts[group], batch.group_starts[group + 1]):
            place = int(batch.token_indices[pair]), expert_id
            assert place not in pairs
            pairs[place] = float(batch.weights[pair])
    return pairs


def assert_same_batch(batch: RoutedBatch, expected: RoutedBatch) -> None:
    """Check that all arrays are equal, bit for bit, including their element types."""
    assert batch.phase is expected.phase
    for name in ("hidden", "expert_ids", "group_starts", "token_indices", "weights"):
        found: AnyArray = getattr(batch, name)
        wanted: AnyArray = getattr(expected, name)
        assert found.dtype == wanted.dtype, name
        np.testing.assert_array_equal(found, wanted, strict=True)
        assert found.tobytes() == wanted.tobytes(), name


def moe_layer(
    *, layer_id: int = 0, num_experts: int = 5, hidden_size: int = HIDDEN_SIZE
) -> MoeLayer:
    """A layer without a file; its projections have no valid positions."""
    nowhere = ExpertProjection("none", TensorType.F32, 1, hidden_size, 0, 0, 0)
    return MoeLayer(
        layer_id=layer_id,
        num_experts=num_experts,
        num_experts_used=min(2, num_experts),
        hidden_size=hidden_size,
        ffn_size=1,
        activation=Activation.SWIGLU,
        gate=nowhere,
        up=nowhere,
        down=nowhere,
    )


def expert_scale(global_expert_id: int) -> float:
    """The factor by which an expert of a `ScalingBank` multiplies a row; distinct for each."""
    return 1.0 + global_expert_id / 4


class ScalingBank:
    """Implements compute.ExpertBank: expert e multiplies a row by `expert_scale(e)`.

    With rows of whole numbers and weights of eighths every sum is exact in float64.
    """

    def __init__(self, layer: MoeLayer, global_expert_ids: list[int] | None = None) -> None:
        self.layer = layer
        self._ids = (
            list(range(layer.num_experts)) if global_expert_ids is None else global_expert_ids
        )

    @property
    def num_experts(self) -> int:
        return len(self._ids)

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        for (token_idx, local_expert_id), weight in pairs_of(batch).items():
            scale = np.float32(expert_scale(self._ids[local_expert_id]))
            out[token_idx] += np.float32(weight) * (batch.hidden[token_idx] * scale)


def naive_sums(hidden: F32Array, pairs: Pairs) -> F64Array:
    """The sums of a `ScalingBank` with all experts. Shapes: hidden and result [T, H]."""
    sums = np.zeros(hidden.shape)
    for (token_idx, global_expert_id), weight in pairs.items():
        sums[token_idx] += weight * expert_scale(global_expert_id) * hidden[token_idx].astype(float)
    return sums
