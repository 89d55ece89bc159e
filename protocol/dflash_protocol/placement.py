"""Placement: which owner has which expert of each layer; its wire form and its file.

An owner's local id of an expert is the expert's position in the owner's list, which need not be
sorted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_protocol.errors import ProtocolError
from dflash_protocol.fingerprint import digest
from dflash_protocol.ids import I32Array
from dflash_protocol.json_fields import is_whole, parsed, shown, whole
from dflash_protocol.process.text_files import file_error, read_file, write_file

MAX_LAYERS = 4096
"""Maximum number of layers in a placement file; published models have up to 126."""
MOST_LISTS = MAX_LAYERS + 64
"""In a placement file: one for each layer, and some in keys that are not known."""

MAX_IDS = 1 << 18
"""Maximum number of expert ids in a placement file; published models have below 1 << 17."""

_KIND = "placement file"
_JSON_LIMIT_BYTES = 4 << 20  # MAX_IDS numbers, each on an indented line, as some writers do


@dataclass(frozen=True, eq=False)
class OwnedExperts:
    """One owner's experts: for each layer, global ids in the order of the owner's local ids.

    Layers without experts of this owner are absent. On the wire: little-endian int32
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
        """From lists of global ids by layer; layers with an empty list are left out."""
        arrays = {layer: np.array(list(ids), dtype=np.int32) for layer, ids in by_layer.items()}
        return cls({layer: ids for layer, ids in sorted(arrays.items()) if ids.size})

    @classmethod
    def from_bytes(
        cls, frame: bytes | memoryview, experts_per_layer: Mapping[int, int]
    ) -> OwnedExperts:
        """Decode the wire form and check it against the model.

        Raises: ProtocolError if it is truncated, not in order of layers, or names a layer or expert
        that does not exist.
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
            if (low := ids.min()) < 0 or (high := ids.max()) >= num_experts:
                raise ProtocolError(
                    f"placement: layer {layer_id} has expert id {low if low < 0 else high}, "
                    f"outside 0..{num_experts - 1}"
                )
            different, counts = np.unique(ids, return_counts=True)
            if different.size != ids.size:
                twice = different[counts.argmax()]
                raise ProtocolError(f"placement: layer {layer_id} names expert {twice} twice")


@dataclass(frozen=True, slots=True, eq=False)
class LayerRouting:
    """One layer's lookup tables, by global expert id. Shapes: both [E] int32."""

    owner_index: I32Array
    local_expert_id: I32Array
    sole_owner: int | None
    """Index of the owner that answers for all experts; None if there are several."""
    is_identity: bool
    """Whether the sole owner's local ids equal the global ones."""
    shared: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Experts with an entry in `Placement.answering` and several owners of one numeric class, with
    these, ascending: any of them may answer for a chunk's pairs."""


@dataclass(frozen=True, eq=False)
class Placement:
    """All owners of a model's experts. An expert may have several: replicas.

    The first owner that has an expert answers for it, unless `answering` names another one of the
    same numeric class, which computes the same bits. Owners of other classes are asked only after
    those of the first one's class are lost.
    """

    experts_per_layer: Mapping[int, int]
    owner_names: tuple[str, ...]
    owners: tuple[OwnedExperts, ...]
    answering: Mapping[int, I32Array] = field(default_factory=dict)
    """By layer id, the index of the owner that answers for each expert; -1, and in layers that are
    not named: the first one that has it. Shapes: each [E]."""
    numeric_classes: Mapping[str, str] = field(default_factory=dict)
    """By owner name; one that is empty or missing is not known, and equals no other."""

    def __post_init__(self) -> None:
        """Raises: ProtocolError if an owner's list is wrong, two owners have one name, an expert
        has no owner, or one is to answer for experts that it does not have."""
        if len(self.owner_names) != len(self.owners):
            raise ProtocolError("placement: owner names and lists differ in number")
        if len(set(self.owner_names)) != len(self.owner_names):
            raise ProtocolError("placement: two owners have one name")
        for owned in self.owners:
            owned.check(self.experts_per_layer)
        self._check_answering()
        for layer_id, routing in self.routing.items():
            unowned = np.flatnonzero(routing.owner_index < 0)
            if unowned.size:
                raise ProtocolError(f"placement: layer {layer_id} expert {unowned[0]} has no owner")

    def _check_answering(self) -> None:
        for layer_id, answering in self.answering.items():
            num_experts = self.experts_per_layer.get(layer_id)
            if num_experts is None or answering.shape != (num_experts,):
                raise ProtocolError(
                    f"placement: layer {layer_id} has not as many experts to answer"
                )
            named = np.flatnonzero(answering != -1)
            indices = answering[named]
            if ((indices < 0) | (indices >= len(self.owners))).any():
                raise ProtocolError(f"placement: layer {layer_id} names an owner that is not there")
            without = named[self.local_ids(layer_id)[indices, named] < 0]
            if without.size:
                raise ProtocolError(
                    f"placement: layer {layer_id} expert {without[0]} is not its owner's"
                )

    @property
    def routing(self) -> dict[int, LayerRouting]:
        """Lookup tables of every layer."""
        return self.routing_without(frozenset())

    def local_ids_of(self, owner_index: int) -> dict[int, I32Array]:
        """By layer in which the owner has experts, its local id of each expert that it answers for.

        Shapes: each [E] int32, -1 for the other experts.
        """
        owned = self.owners[owner_index].by_layer
        return {
            layer_id: np.where(
                routing.owner_index == owner_index, routing.local_expert_id, np.int32(-1)
            ).astype(np.int32)
            for layer_id, routing in self.routing.items()
            if len(owned.get(layer_id, ()))
        }

    def routing_without(self, lost: frozenset[int]) -> dict[int, LayerRouting]:
        """Lookup tables of every layer without the owners of these indices.

        An expert that no other owner has gets owner -1 and local id -1.
        """
        tables = self._tables.get(lost)
        if tables is None:
            tables = self._tables[lost] = self._make_tables(lost)
        return tables

    @cached_property
    def _tables(self) -> dict[frozenset[int], dict[int, LayerRouting]]:
        return {}

    def local_ids(self, layer_id: int) -> I32Array:
        """Each owner's local id of each expert, -1 where it does not have it; read-only.

        Shapes: result [owners, E].
        """
        found = self._local_ids.get(layer_id)
        if found is None:
            found = np.full((len(self.owners), self.experts_per_layer[layer_id]), -1, np.int32)
            for index, owned in enumerate(self.owners):
                ids = owned.by_layer.get(layer_id)
                if ids is not None:
                    found[index, ids] = np.arange(ids.size, dtype=np.int32)
            found.flags.writeable = False
            self._local_ids[layer_id] = found
        return found

    @cached_property
    def _local_ids(self) -> dict[int, I32Array]:
        return {}

    def equal_holders(self, layer_id: int) -> npt.NDArray[np.bool_]:
        """Which owners have an expert and the numeric class of the first that has it: any of them
        computes the same bits. Shapes: result [owners, E].
        """
        holds = self.local_ids(layer_id) >= 0
        first = holds.argmax(axis=0)
        classes = [self.numeric_classes.get(name, "") for name in self.owner_names]
        # An owner of an unknown class is equal to itself alone.
        number = [classes.index(name) if name else index for index, name in enumerate(classes)]
        of_owner = np.array(number)
        return np.asarray(holds & (of_owner[:, None] == of_owner[first]))

    def _make_tables(self, lost: frozenset[int]) -> dict[int, LayerRouting]:
        tables = {}
        is_left = np.array([index not in lost for index in range(len(self.owners))], np.bool_)
        for layer_id, num_experts in self.experts_per_layer.items():
            local_ids = self.local_ids(layer_id)
            is_held, places = (local_ids >= 0) & is_left[:, None], np.arange(num_experts)
            if not is_left.any():
                missing = np.full(num_experts, -1, np.int32)
                tables[layer_id] = LayerRouting(missing, missing, None, is_identity=False)
                continue
            equal = self.equal_holders(layer_id)
            # The least is asked: the one named, then the first of its class, then the first.
            order = np.where(equal, 0, len(self.owners)) + np.arange(len(self.owners))[:, None]
            shared: list[tuple[int, tuple[int, ...]]] = []
            answering = self.answering.get(layer_id)
            if answering is not None:
                named = np.flatnonzero((answering >= 0) & equal[answering, places])
                order[answering[named], named] = -1
                for expert in named[(equal & is_held)[:, named].sum(axis=0) > 1].tolist():
                    able = np.flatnonzero(equal[:, expert] & is_held[:, expert])
                    shared.append((expert, tuple(able.tolist())))
            order[~is_held] = 2 * len(self.owners)
            chosen = order.argmin(axis=0).astype(np.int32)
            owner_index = np.where(is_held.any(axis=0), chosen, np.int32(-1)).astype(np.int32)
            local_id = np.where(owner_index >= 0, local_ids[chosen, places], np.int32(-1))
            sole_owner, is_identity = _sole_owner(owner_index, local_id)
            tables[layer_id] = LayerRouting(
                owner_index, local_id, sole_owner, is_identity, tuple(shared)
            )
        return tables


def _sole_owner(owner_index: I32Array, local_id: I32Array) -> tuple[int | None, bool]:
    """Index of the owner of all experts, or None, and whether its local ids are the global ones.

    Shapes: both [E].
    """
    first = int(owner_index[0]) if owner_index.size else -1
    if first < 0 or (owner_index != first).any():
        return None, False
    return first, bool((local_id == np.arange(local_id.size)).all())


@dataclass(frozen=True, slots=True, eq=False)
class PlacementFile:
    """The content of a placement file, not yet checked against a model.

    ``num_experts`` and ``num_experts_used`` are 0 if missing; files written by us or by the older
    system have them. ``owned`` is ``hot_expert_ids`` in the file: one process's experts, in local
    order.
    """

    num_layers: int
    num_experts: int
    num_experts_used: int
    owned: OwnedExperts


def read_owned_experts(path: Path, experts_per_layer: Mapping[int, int]) -> OwnedExperts:
    """Read one owner's experts from a placement file and check them against the model.

    Raises: SettingsError naming the file and what is wrong.
    """
    file = read_placement_file(path)
    num_experts = max(experts_per_layer.values(), default=0)
    if file.num_layers and file.num_experts != num_experts:
        said = file.num_experts or "missing"
        raise file_error(_KIND, path, f"n_expert is {said}, the model says {num_experts}")
    try:
        file.owned.check(experts_per_layer)
    except ProtocolError as error:
        raise file_error(_KIND, path, str(error)) from error
    return file.owned


def read_placement_file(path: Path) -> PlacementFile:
    """Read a placement file (JSON, version 1; see docs/files.md), ours or the older system's.

    ``version``, ``n_layer`` and ``hot_expert_ids`` are required; the other keys are optional and
    must agree with these. Unknown keys are ignored.
    Raises: SettingsError naming the file, the layer and what is wrong.
    """
    content = read_file(_KIND, path, limit_bytes=_JSON_LIMIT_BYTES)
    try:
        return _parse_placement(parsed(content, most_lists=MOST_LISTS, most_values=MAX_IDS))
    except ValueError as error:
        raise file_error(_KIND, path, str(error)) from None


def write_owned_experts(
    path: Path, owned: OwnedExperts, *, num_layers: int, num_experts: int, num_experts_used: int
) -> None:
    """Write one owner's experts atomically as a placement file, which the older system reads too.

    Raises: SettingsError if it cannot be written, or would not be valid.
    """
    layers: list[list[int]] = [[] for _ in range(min(num_layers, MAX_LAYERS))]
    for layer_id, ids in owned.by_layer.items():
        if not 0 <= layer_id < len(layers):
            raise file_error(_KIND, path, f"layer {layer_id} of {num_layers} layers")
        layers[layer_id] = ids.tolist()
    document = {
        "arch": "moe_hybrid",
        "version": 1,
        "n_layer": num_layers,
        "n_expert": num_experts,
        "n_expert_used": num_experts_used,
        "total_hot": owned.num_experts,
        "hot_counts": [len(ids) for ids in layers],
        "hot_expert_ids": layers,
    }
    try:
        if min(num_layers, num_experts, num_experts_used) < 1:
            raise ValueError("n_layer, n_expert and n_expert_used must be 1 or more")
        _parse_placement(document)
    except ValueError as error:
        raise file_error(_KIND, path, str(error)) from None
    write_file(_KIND, path, json.dumps(document, indent=1) + "\n")


def _parse_placement(document: Any) -> PlacementFile:
    """Raises: ValueError saying what is wrong."""
    if not isinstance(document, dict) or not is_whole(document.get("version"), 1, 1):
        raise ValueError("version must be 1")
    layers = document.get("hot_expert_ids")
    if not isinstance(layers, list) or not is_whole(
        document.get("n_layer"), len(layers), len(layers)
    ):
        raise ValueError("hot_expert_ids must be a list of n_layer lists")
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"{len(layers)} layers; at most {MAX_LAYERS} are read")
    num_experts = _optional(document, "n_expert", 1, MAX_IDS)
    num_experts_used = _optional(document, "n_expert_used", 1, num_experts or MAX_IDS)
    for layer_id, ids in enumerate(layers):
        _check_ids(layer_id, ids, num_experts or MAX_IDS)
    owned = OwnedExperts.from_lists(dict(enumerate(layers)))
    counts = document.get("hot_counts", [len(ids) for ids in layers])
    if not isinstance(counts, list) or len(counts) != len(layers):
        raise ValueError("hot_counts must be a list of n_layer numbers")
    for layer_id, (count, ids) in enumerate(zip(counts, layers, strict=True)):
        if not is_whole(count, len(ids), len(ids)):
            raise ValueError(
                f"layer {layer_id}: hot_counts says {shown(count)}, "
                f"hot_expert_ids has {len(ids)} ids"
            )
    total = document.get("total_hot", owned.num_experts)
    if not is_whole(total, owned.num_experts, owned.num_experts):
        raise ValueError(f"total_hot is {shown(total)}, the layers have {owned.num_experts} ids")
    return PlacementFile(len(layers), num_experts, num_experts_used, owned)


def _check_ids(layer_id: int, ids: Any, num_experts: int) -> None:
    """Raises: ValueError if this is not a list of distinct ids below `num_experts`."""
    if not isinstance(ids, list):
        raise ValueError(f"layer {layer_id} is not a list of expert ids")
    seen = set()
    for global_expert_id in ids:
        if not is_whole(global_expert_id, 0, num_experts - 1):
            raise ValueError(
                f"layer {layer_id}: {shown(global_expert_id)} is not an expert id "
                f"in 0..{num_experts - 1}"
            )
        if global_expert_id in seen:
            raise ValueError(f"layer {layer_id} names expert {global_expert_id} twice")
        seen.add(global_expert_id)


def _optional(document: Mapping[str, Any], key: str, smallest: int, largest: int) -> int:
    """The integer at `key`, 0 if missing. Raises: ValueError if it is out of bounds or another
    type."""
    if key not in document:
        return 0
    return whole(document[key], key, (smallest, largest))
