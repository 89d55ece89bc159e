"""Placement: who owns which expert, explicit for every layer, and its canonical bytes.

Nothing is implied by sort order: an owner's local id of an expert is its position in the list the
owner was given. Knows nothing of how a placement is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dflash_protocol.errors import ProtocolError, SettingsError
from dflash_protocol.fingerprint import digest
from dflash_protocol.ids import I32Array

_JSON_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class OwnedExperts:
    """One owner's experts: for each layer, global ids in the order of the owner's local ids.

    Layers without an expert here are absent. On the wire: little-endian int32
    ``layer_id, count, global ids …`` repeated, layers ascending.
    """

    by_layer: Mapping[int, I32Array]

    @property
    def num_experts(self) -> int:
        return sum(int(ids.size) for ids in self.by_layer.values())

    @cached_property
    def canonical_bytes(self) -> bytes:
        parts = []
        for layer_id in sorted(self.by_layer):
            ids = self.by_layer[layer_id]
            parts.append(np.array([layer_id, ids.size], dtype="<i4").tobytes())
            parts.append(ids.astype("<i4").tobytes())
        return b"".join(parts)

    @cached_property
    def fingerprint(self) -> str:
        return digest("owned-experts-v1", [self.canonical_bytes])

    @classmethod
    def from_lists(cls, by_layer: Mapping[int, Iterable[int]]) -> OwnedExperts:
        """From plain lists; empty ones are left out."""
        arrays = {layer: np.array(list(ids), dtype=np.int32) for layer, ids in by_layer.items()}
        return cls({layer: ids for layer, ids in sorted(arrays.items()) if ids.size})

    @classmethod
    def from_bytes(
        cls, frame: bytes | memoryview, experts_per_layer: Mapping[int, int]
    ) -> OwnedExperts:
        """Read the wire form, checking it against the model's layers.

        Raises: ProtocolError if it is cut short, out of order, or names a layer or expert that does
        not exist.
        """
        if len(frame) % 4:
            raise ProtocolError("placement: not a whole number of int32")
        values = np.frombuffer(frame, dtype="<i4").astype(np.int32)
        by_layer: dict[int, I32Array] = {}
        position, last_layer_id = 0, -1
        while position < values.size:
            if position + 2 > values.size:
                raise ProtocolError("placement: cut short")
            layer_id, count = int(values[position]), int(values[position + 1])
            ids = values[position + 2 : position + 2 + count]
            if count < 1 or ids.size != count:
                raise ProtocolError(f"placement: layer {layer_id} is empty or cut short")
            if layer_id <= last_layer_id:
                raise ProtocolError(f"placement: layer {layer_id} after layer {last_layer_id}")
            by_layer[layer_id] = ids
            last_layer_id = layer_id
            position += 2 + count
        owned = cls(by_layer)
        owned.check(experts_per_layer)
        return owned

    def check(self, experts_per_layer: Mapping[int, int]) -> None:
        """Raises: ProtocolError if a layer or id does not exist or an id occurs twice."""
        for layer_id, ids in self.by_layer.items():
            num_experts = experts_per_layer.get(layer_id)
            if num_experts is None:
                raise ProtocolError(f"placement: layer {layer_id} has no experts")
            if ids.min() < 0 or ids.max() >= num_experts:
                raise ProtocolError(
                    f"placement: layer {layer_id} has expert ids outside 0..{num_experts - 1}"
                )
            if np.unique(ids).size != ids.size:
                raise ProtocolError(f"placement: layer {layer_id} names an expert twice")


@dataclass(frozen=True, slots=True, eq=False)
class LayerRouting:
    """One layer's lookup tables, by global expert id. Shapes: both [E] int32."""

    owner_index: I32Array
    local_expert_id: I32Array


@dataclass(frozen=True, eq=False)
class Placement:
    """All owners of a model's experts. The first owner that holds an expert answers for it."""

    experts_per_layer: Mapping[int, int]
    owner_names: tuple[str, ...]
    owners: tuple[OwnedExperts, ...]

    def __post_init__(self) -> None:
        """Raises: ProtocolError if an owner's list is wrong or an expert has no owner."""
        if len(self.owner_names) != len(self.owners):
            raise ProtocolError("placement: owner names and lists differ in number")
        for owned in self.owners:
            owned.check(self.experts_per_layer)
        for layer_id, routing in self.routing.items():
            homeless = np.flatnonzero(routing.owner_index < 0)
            if homeless.size:
                raise ProtocolError(
                    f"placement: layer {layer_id} expert {homeless[0]} has no owner"
                )

    @property
    def routing(self) -> dict[int, LayerRouting]:
        """Lookup tables of every layer."""
        return self.routing_without(frozenset())

    def routing_without(self, lost: frozenset[int]) -> dict[int, LayerRouting]:
        """Lookup tables of every layer if these owners, by index, hold nothing.

        An expert that nobody else holds has owner -1 and local id -1.
        """
        tables = self._tables.get(lost)
        if tables is None:
            tables = self._tables[lost] = self._make_tables(lost)
        return tables

    @cached_property
    def _tables(self) -> dict[frozenset[int], dict[int, LayerRouting]]:
        return {}

    def _make_tables(self, lost: frozenset[int]) -> dict[int, LayerRouting]:
        tables = {}
        for layer_id, num_experts in self.experts_per_layer.items():
            owner_index = np.full(num_experts, -1, dtype=np.int32)
            local_id = np.full(num_experts, -1, dtype=np.int32)
            # Later owners first, so that the first one to hold an expert has the last word.
            for index in reversed(range(len(self.owners))):
                if index in lost:
                    continue
                ids = self.owners[index].by_layer.get(layer_id)
                if ids is not None:
                    owner_index[ids] = index
                    local_id[ids] = np.arange(ids.size, dtype=np.int32)
            tables[layer_id] = LayerRouting(owner_index, local_id)
        return tables

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every owner's canonical bytes, in order. Names do not count."""
        return digest("placement-v1", [owned.canonical_bytes for owned in self.owners])


def read_owned_experts(path: Path, experts_per_layer: Mapping[int, int]) -> OwnedExperts:
    """Read one owner's experts from a placement file (JSON, version 1).

    The file holds ``version``, ``n_layer``, ``n_expert`` and ``hot_expert_ids``: for each layer the
    list of global ids this owner holds, in local order.
    Raises: SettingsError naming the file and what is wrong.
    """

    def wrong(reason: str) -> SettingsError:
        return SettingsError(f"placement file {path}: {reason}")

    try:
        with path.open("rb") as file:
            content = file.read(_JSON_LIMIT_BYTES + 1)  # its size may be unknown: a pipe, a device
        if len(content) > _JSON_LIMIT_BYTES:
            raise wrong("larger than 64 MiB")
        document: Any = json.loads(content)
    except OSError as error:
        raise wrong(str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise wrong("not JSON") from error
    if not isinstance(document, dict) or document.get("version") != 1:
        raise wrong("version must be 1")
    layers = document.get("hot_expert_ids")
    if not isinstance(layers, list) or document.get("n_layer") != len(layers):
        raise wrong("hot_expert_ids must be a list of n_layer lists")
    for layer_id, ids in enumerate(layers):
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise wrong(f"layer {layer_id} is not a list of expert ids")
    if layers and document.get("n_expert") != max(experts_per_layer.values(), default=0):
        raise wrong(f"n_expert is {document.get('n_expert')}, the model says otherwise")
    owned = OwnedExperts.from_lists(dict(enumerate(layers)))
    try:
        owned.check(experts_per_layer)
    except ProtocolError as error:
        raise wrong(str(error)) from error
    return owned


def write_owned_experts(
    path: Path, owned: OwnedExperts, *, num_layers: int, num_experts: int, num_experts_used: int
) -> None:
    """Write one owner's experts as a placement file (JSON, version 1)."""
    layers: list[Sequence[int]] = [
        owned.by_layer[i].tolist() if i in owned.by_layer else [] for i in range(num_layers)
    ]
    document = {
        "version": 1,
        "n_layer": num_layers,
        "n_expert": num_experts,
        "n_expert_used": num_experts_used,
        "total_hot": owned.num_experts,
        "hot_counts": [len(ids) for ids in layers],
        "hot_expert_ids": layers,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
