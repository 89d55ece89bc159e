"""Wire format of version 1: the same number of experts for every token, global ids, float32.

Version 1 has no local ids, payload types, checksums, generations, deadlines or phases. A request
is a header frame and one contiguous frame::

    input [T, H] float32 ‖ ids [T, S] int32 ‖ weights [T, S] float32

A ragged batch is sent as one request for each number of experts that its tokens have. Pairs of
weight zero are ignored. The reply is a status, with float32 sums on success; their rounding means
that the bits of a result may depend on how experts are split among owners.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflash_protocol.batch import HostSums, RoutedBatch, group_by_expert
from dflash_protocol.errors import ProtocolError, one_line
from dflash_protocol.ids import F64Array, I32Array, Phase
from dflash_protocol.payloads import are_finite
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import (
    ComputeBatch,
    ComputeStatus,
    ExpertRequest,
    Frames,
    decode_header,
    encode_header,
)
from dflash_protocol.wire.transport import LinkLimits, Reply, TransportCounters


def rectangles(batch: RoutedBatch, max_tokens: int) -> Iterator[tuple[I32Array, RoutedBatch]]:
    """Cut a batch into pieces of at most `max_tokens` rows whose tokens have equally many experts.

    Yields the row indices in `batch` and the piece. Rows without pairs are left out.
    """
    pairs = batch.pairs()
    num_experts_of_row = np.bincount(pairs.token_indices, minlength=batch.num_tokens)
    piece_row = np.empty(batch.num_tokens, dtype=np.int32)
    for num_selected in np.unique(num_experts_of_row[num_experts_of_row > 0]).tolist():
        all_rows = np.flatnonzero(num_experts_of_row == num_selected).astype(np.int32)
        for first in range(0, all_rows.size, max_tokens):
            rows = all_rows[first : first + max_tokens]
            piece_row.fill(-1)
            piece_row[rows] = np.arange(rows.size, dtype=np.int32)
            chosen = pairs.where(piece_row[pairs.token_indices] >= 0)
            in_piece = replace(chosen, token_indices=piece_row[chosen.token_indices])
            yield rows, RoutedBatch.group(batch.phase, batch.rows.chosen(rows), in_piece)


def local_ids_by_layer(
    owned: OwnedExperts, experts_per_layer: Mapping[int, int]
) -> dict[int, I32Array]:
    """By layer, the local id of each global id, -1 for experts not owned. Shapes: [E] each."""
    tables = {}
    for layer_id, global_ids in owned.by_layer.items():
        table = np.full(experts_per_layer[layer_id], -1, dtype=np.int32)
        table[global_ids] = np.arange(global_ids.size, dtype=np.int32)
        tables[layer_id] = table
    return tables


class Version1ParentCodec:
    """Version 1 at the parent's end of one link: encodes requests, decodes replies.

    `global_ids` has, by layer, the global id of each of the owner's local ids.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        global_ids: Mapping[int, I32Array],
        counters: TransportCounters,
    ) -> None:
        self._hidden_size = hidden_size
        self._global_ids = global_ids
        self._counters = counters

    def encode(
        self, batch: RoutedBatch, *, sequence: int, layer_id: int, deadline_s: float
    ) -> Frames:
        """Frames of a request. All tokens of `batch` must have the same number of experts."""
        num_tokens, num_pairs = batch.num_tokens, batch.num_pairs
        num_selected = num_pairs // num_tokens if num_tokens else 0
        pairs = batch.pairs()
        expected = np.repeat(np.arange(num_tokens, dtype=np.int32), num_selected)
        assert np.array_equal(pairs.token_indices, expected), "tokens differ in experts"
        global_ids = self._global_ids[layer_id][pairs.expert_ids]
        payload = b"".join(
            (
                batch.hidden.data,
                global_ids.astype("<i4").data,
                pairs.weights.astype("<f4").data,
            )
        )
        self._counters.bytes_sent += len(payload)
        header = ComputeBatch(sequence, layer_id, num_tokens, num_selected, len(payload))
        return [encode_header(header), payload]

    def decode(
        self, frames: Sequence[bytes], num_tokens_of: Mapping[int, int]
    ) -> tuple[int, Reply | ProtocolError] | None:
        """Same contract as requests.ParentCodec.decode."""
        if not frames:
            raise ProtocolError("the message has no header")
        header = decode_header(frames[0])
        if not isinstance(header, ComputeStatus):
            raise ProtocolError(f"the daemon sent {header.TYPE} on the data socket")
        num_tokens = num_tokens_of.get(header.sequence)
        if num_tokens is None:
            self._counters.stale += 1
            return None
        if not header.is_done:
            return header.sequence, ProtocolError(one_line(header.reason), code="internal")
        if [len(frame) for frame in frames[1:]] != [4 * num_tokens * self._hidden_size]:
            raise ProtocolError("the reply does not have the shape of its request")
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            sums = np.frombuffer(frames[1], dtype="<f4").astype(np.float64)
        self._counters.bytes_received += len(frames[1])
        # Version 1 reports no times, so the daemon's speed stays unknown.
        placed = sums.reshape(num_tokens, self._hidden_size)
        return header.sequence, Reply(HostSums(placed), math.nan, is_finite=are_finite(placed))


def decode_request(
    frames: Sequence[bytes], limits: LinkLimits
) -> tuple[ExpertRequest, RoutedBatch]:
    """Decode a request at the daemon into the equivalent one of version 2.

    Raises: ProtocolError before anything larger than the link's limits is allocated.
    """
    header = decode_header(frames[0]) if frames else None
    if not isinstance(header, ComputeBatch):
        raise ProtocolError("expected compute_batch on the data socket of a version 1 link")
    limits.note_sequence(header.sequence)
    num_tokens, num_selected = header.num_tokens, header.num_selected
    if not 1 <= num_tokens <= limits.max_tokens:
        raise ProtocolError(f"{num_tokens} tokens, allowed are 1 to {limits.max_tokens}")
    if not 1 <= num_selected <= limits.max_experts_used:
        raise ProtocolError(
            f"{num_selected} experts a token, allowed are 1 to {limits.max_experts_used}"
        )
    hidden_bytes, ids_bytes = 4 * num_tokens * limits.hidden_size, 4 * num_tokens * num_selected
    expected = hidden_bytes + 2 * ids_bytes
    sizes = [len(frame) for frame in frames[1:]]
    if header.payload_bytes != expected or sizes != [expected]:
        raise ProtocolError(
            f"frames of {sizes} bytes, header says {header.payload_bytes}, must be {expected}"
        )
    local_of_global = limits.local_ids.get(header.layer_id)
    if local_of_global is None:
        raise ProtocolError(f"no experts of layer {header.layer_id} here", code="not_owned")
    num_pairs = num_tokens * num_selected
    payload = frames[1]
    hidden = np.frombuffer(payload, dtype="<f4", count=num_tokens * limits.hidden_size)
    ids = np.frombuffer(payload, dtype="<i4", offset=hidden_bytes, count=num_pairs)
    weights = np.frombuffer(payload, dtype="<f4", offset=hidden_bytes + ids_bytes, count=num_pairs)
    if ids.min() < 0 or ids.max() >= local_of_global.size:
        raise ProtocolError(f"global expert ids must lie within 0..{local_of_global.size - 1}")
    counts = weights != 0
    token_indices = np.repeat(np.arange(num_tokens, dtype=np.int32), num_selected)[counts]
    local_ids = local_of_global[ids[counts]]
    if local_ids.size and local_ids.min() < 0:
        raise ProtocolError("an expert that is not here", code="not_owned")
    batch = group_by_expert(
        hidden.reshape(num_tokens, limits.hidden_size),
        token_indices,
        local_ids,
        weights=weights[counts],
        phase=Phase.DECODE if num_tokens == 1 else Phase.PREFILL,
    )
    no_deadline_ms = math.inf
    request = ExpertRequest(header.sequence, header.layer_id, num_tokens, "f32", no_deadline_ms)
    return request, batch


def sequence_of(frames: Sequence[bytes]) -> int:
    """The sequence field of a malformed request, 0 if it cannot be read."""
    with contextlib.suppress(ProtocolError):
        header = decode_header(frames[0]) if frames else None
        return header.sequence if isinstance(header, ComputeBatch) else 0
    return 0


def encode_reply(request: ExpertRequest, sums: F64Array) -> Frames:
    """Frames of a successful reply. Shapes: sums [T, H] float64."""
    with np.errstate(over="ignore"):
        rounded = sums.astype("<f4")
    return [encode_header(ComputeStatus(request.sequence, True, "")), rounded.data]


def encode_failure(sequence: int, error: ProtocolError) -> Frames:
    """Frames of a failure: the request was not computed."""
    return [encode_header(ComputeStatus(sequence, False, str(error)[:1000]))]
