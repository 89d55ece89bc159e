"""A plan as a JSON object, and back: bound to its model, its box, and the owners there are."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash_protocol import json_fields as read
from dflash_protocol.device import parse_device
from dflash_protocol.errors import ProtocolError, SettingsError
from dflash_protocol.ids import I32Array
from dflash_protocol.placement import MAX_IDS, MAX_LAYERS, OwnedExperts, Placement
from dflash_protocol.settings.kinds import MOST_DAEMONS
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.plan import (
    Alternative,
    DeviceBudget,
    ExpertRoom,
    Forecast,
    Origin,
    Plan,
    RoomStatus,
    Setup,
)
from dflash_runtime.placement.wishes import MoeMode

PLAN_VERSION = 4
"""Of the record's form, and of what its predictions mean."""

OTHER_BOX = "it was made for another machine, driver or version"

_MOST_POSITIONS = 1 << 30
_MOST_SLOTS = 31
_MOST_BYTES = 1 << 60
_FASTEST = 1e12
_MOST_ALTERNATIVES = 1024
_BUDGET_BYTES = (
    "free_bytes", "trunk_bytes", "cache_bytes", "work_bytes", "expert_bytes", "disk_bytes",
)  # fmt: skip
_KEYS = (
    "version", "model", "box", "heat_tokens", "asked", "setup", "owners", "answering",
    "prompts_here", "mode", "name", "forecast", "share_here", "budgets", "room", "alternatives",
    "reason",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordOf:
    """What a record has to be of."""

    model_identity: str
    experts_per_layer: Mapping[int, int]
    owner_names: Collection[str]
    """Owners that there are."""
    box_key: str | None = None
    """None: of any box."""


def as_record(plan: Plan) -> dict[str, Any]:
    """The JSON object of a plan: its summary, and the experts of each owner."""
    owners = [
        {
            "name": name,
            "experts": {str(layer_id): ids.tolist() for layer_id, ids in owned.by_layer.items()},
        }
        for name, owned in zip(plan.placement.owner_names, plan.placement.owners, strict=True)
    ]
    answering = {
        str(layer_id): indices.tolist() for layer_id, indices in plan.placement.answering.items()
    }
    return {**summary_of(plan), "owners": owners, "answering": answering}


def summary_of(plan: Plan) -> dict[str, Any]:
    """The JSON object of a plan without its experts' ids, as `/status` shows it."""
    return {
        "version": PLAN_VERSION,
        "model": plan.origin.model_identity,
        "box": plan.origin.box_key,
        "heat_tokens": plan.origin.heat_tokens,
        "asked": plan.origin.asked,
        "setup": {
            "device": str(plan.setup.device),
            "context": plan.setup.context,
            "kv_type": str(plan.setup.kv_type),
            "chunk": plan.setup.chunk,
            "cache_slots": plan.setup.cache_slots,
        },
        "prompts_here": list(plan.prompts_here),
        "mode": str(plan.mode),
        "name": plan.name,
        "forecast": asdict(plan.forecast),
        "share_here": plan.share_here,
        "budgets": [asdict(each) for each in plan.budgets],
        "room": {**asdict(plan.room), "status": str(plan.room.status)},
        "alternatives": [asdict(each) for each in plan.alternatives],
        "reason": plan.reason,
    }


def as_json(plan: Plan) -> str:
    """The text of a plan's file."""
    return json.dumps(as_record(plan)) + "\n"


def from_json(content: bytes, of: RecordOf) -> Plan:
    """Raises: SettingsError as `from_record`, or if it is not JSON or too large."""
    try:
        record = read.parsed(content)
    except ValueError as error:
        raise SettingsError(f"plan: {error}") from None
    return from_record(record, of)


def from_record(record: object, of: RecordOf) -> Plan:
    """Raises: SettingsError saying in a line what is wrong: another version, model or box, an owner
    that there is not, a number out of bounds, experts that are missing, doubled or unknown."""
    try:
        return _read(record, of)
    except (ValueError, ProtocolError) as error:
        raise SettingsError(f"plan: {error}") from None


def _read(record: object, of: RecordOf) -> Plan:
    if isinstance(record, dict) and record.get("version") != PLAN_VERSION:
        raise ValueError(f"its version is not {PLAN_VERSION}")
    found = read.fields(record, "it", _KEYS)
    if read.text(found["model"], "model") != of.model_identity:
        raise ValueError("it was made for another model")
    if read.text(found["box"], "box") != of.box_key and of.box_key is not None:
        raise ValueError(OTHER_BOX)
    layer_ids = read.items(found["prompts_here"], "prompts_here", MAX_LAYERS)
    for layer_id in layer_ids:
        if type(layer_id) is not int or layer_id not in of.experts_per_layer:
            raise ValueError("prompts_here names a layer without experts")
    if layer_ids != sorted(set(layer_ids)):
        raise ValueError("prompts_here is not in order")
    return Plan(
        Origin(
            found["model"],
            found["box"],
            read.whole(found["heat_tokens"], "heat_tokens", (0, _MOST_BYTES)),
            read.text(found["asked"], "asked"),
        ),
        _setup(found["setup"]),
        _placement(found["owners"], found["answering"], of),
        tuple(layer_ids),
        MoeMode(read.one_of(found["mode"], "mode", list(MoeMode))),
        read.text(found["name"], "name"),
        _forecast(found["forecast"]),
        read.number(found["share_here"], "share_here", 1.0 + 1e-9),
        tuple(_budget(each) for each in read.items(found["budgets"], "budgets", MOST_DAEMONS + 2)),
        _room(found["room"]),
        tuple(
            _alternative(each)
            for each in read.items(found["alternatives"], "alternatives", _MOST_ALTERNATIVES)
        ),
        read.text(found["reason"], "reason"),
    )


def _setup(value: Any) -> Setup:
    found = read.fields(value, "setup", ("device", "context", "kv_type", "chunk", "cache_slots"))
    try:
        device = parse_device(read.text(found["device"], "device"))
    except ValueError as error:
        raise ValueError(f"setup: device {error}") from None
    return Setup(
        device,
        read.whole(found["context"], "context", (1, _MOST_POSITIONS)),
        KvType(read.one_of(found["kv_type"], "kv_type", list(KvType))),
        read.whole(found["chunk"], "chunk", (1, _MOST_POSITIONS)),
        read.whole(found["cache_slots"], "cache_slots", (0, _MOST_SLOTS)),
    )


def _placement(value: Any, answering: Any, of: RecordOf) -> Placement:
    names, owners, total = [], [], 0
    for each in read.items(value, "owners", MOST_DAEMONS + 2):
        found = read.fields(each, "an owner", ("name", "experts"))
        name = read.text(found["name"], "an owner's name")
        if name not in of.owner_names:
            raise ValueError(f"there is no owner {name!a}")
        if not isinstance(found["experts"], dict):
            raise ValueError(f"the experts of {name!a} are not an object")
        by_layer = {}
        for key, ids in found["experts"].items():
            layer_id = _layer_id(key, of, f"{name!a} has experts of")
            most = of.experts_per_layer[layer_id]
            for each_id in read.items(ids, f"layer {layer_id} of {name!a}", most):
                read.whole(each_id, f"an expert id of layer {layer_id}", (0, most - 1))
            by_layer[layer_id] = ids
            total += len(ids)
        if total > MAX_IDS:
            raise ValueError(f"more than {MAX_IDS} expert ids")
        names.append(name)
        owners.append(OwnedExperts.from_lists(by_layer))
    return Placement(
        dict(of.experts_per_layer),
        tuple(names),
        tuple(owners),
        _answering(answering, len(owners), of),
    )


def _answering(value: Any, num_owners: int, of: RecordOf) -> dict[int, I32Array]:
    if not isinstance(value, dict):
        raise ValueError("answering is not an object")
    by_layer = {}
    for key, indices in value.items():
        layer_id = _layer_id(key, of, "answering names")
        what = f"answering of layer {layer_id}"
        for each in read.items(indices, what, of.experts_per_layer[layer_id]):
            read.whole(each, what, (-1, num_owners - 1))
        by_layer[layer_id] = np.array(indices, np.int32)
    return by_layer


def _layer_id(key: str, of: RecordOf, what: str) -> int:
    layer_id = int(key) if key.isascii() and key.isdigit() and len(key) < 6 else -1
    if layer_id not in of.experts_per_layer or str(layer_id) != key:
        raise ValueError(f"{what} {key[:20]!a}, which is not a layer")
    return layer_id


def _forecast(value: Any) -> Forecast:
    names = ("decode", "prompt_512", "prompt_4096")
    found = read.fields(value, "forecast", names)
    speeds = [read.number(found[name], name, _FASTEST) for name in names]
    if not all(speeds):
        raise ValueError("a speed of the forecast is 0")
    return Forecast(*speeds)


def _budget(value: Any) -> DeviceBudget:
    keys = ("name", "num_experts", "num_replicas", "limit_bytes", *_BUDGET_BYTES)
    found = read.fields(value, "a budget", keys)
    limit = found["limit_bytes"]
    return DeviceBudget(
        name=read.text(found["name"], "a budget's name"),
        num_experts=read.whole(found["num_experts"], "num_experts", (0, MAX_IDS)),
        num_replicas=read.whole(found["num_replicas"], "num_replicas", (0, MAX_IDS)),
        limit_bytes=None if limit is None else read.whole(limit, "limit_bytes", (0, _MOST_BYTES)),
        **{each: read.whole(found[each], each, (0, _MOST_BYTES)) for each in _BUDGET_BYTES},
    )


def _room(value: Any) -> ExpertRoom:
    counts = ("had", "asked", "recommended")
    found = read.fields(value, "room", ("status", *counts))
    status = RoomStatus(read.one_of(found["status"], "status", list(RoomStatus)))
    return ExpertRoom(status, *(read.whole(found[each], each, (0, MAX_IDS)) for each in counts))


def _alternative(value: Any) -> Alternative:
    found = read.fields(value, "an alternative", ("name", "device", "forecast", "why_not"))
    return Alternative(
        read.text(found["name"], "an alternative's name"),
        read.text(found["device"], "an alternative's device"),
        None if found["forecast"] is None else _forecast(found["forecast"]),
        read.text(found["why_not"], "why_not"),
    )
