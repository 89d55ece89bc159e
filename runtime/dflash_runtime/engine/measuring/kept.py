"""Boxes kept on disk: one JSON file for each key, in the cache folder.

Files are read strictly: one that is damaged, or of another version, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol import __version__
from dflash_protocol import json_fields as read
from dflash_protocol.errors import SettingsError, one_line
from dflash_protocol.process.text_files import read_file, write_file
from dflash_protocol.settings import cache_folder
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.topology import Topology
from dflash_runtime.placement.box import (
    AskedSpeed,
    Box,
    CopySpeed,
    Curve,
    DeviceSpeed,
    LinkSpeed,
    OffloadSpeed,
    Together,
)

_LOG = logging.getLogger(__name__)

_FORMAT = 19
_PREFIX, _SUFFIX = "box-", ".json"
LIMIT_BYTES = 1 << 20
_NUM_KEPT = 64
_MOST = 256
"""Entries of a mapping, and points of a curve."""
_LONGEST_LINE = 200
_LARGEST = 1e18
"""Of seconds, bytes, rates and factors: no sum or product of them is infinite."""
_KEYS = (
    "format", "key", "devices", "links", "copies", "together", "host_stop", "host_asked", "offload",
    "disk", "is_second",
)  # fmt: skip
_DEVICE_CURVES = "experts", "trunk", "head", "attention"
_ASKED_TIMES = "layer_s", "step_s"
_OFFLOAD_CURVES = "copies", "after", "single", "grouped"
_RATES = "from_locked", "from_page_cache", "to_host", "kernel_reads"

T = TypeVar("T")


def box_key(
    file: GgufFile,
    *,
    device_ids: Sequence[str],
    classes: Sequence[str],
    topology: Topology,
    kv_type: KvType,
) -> str:
    """Digest of all that a box depends on. Speed depends on types and shapes, not on weights.

    `device_ids`: of all GPUs of the machine, with their drivers' versions. `classes`: numeric
    classes of the backends, which name kernels and their versions.
    """
    tensors = sorted(
        (name, each.tensor_type.name, each.shape) for name, each in file.tensors.items()
    )
    parts = (_FORMAT, __version__, sorted(device_ids), sorted(classes), topology, kv_type, tensors)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def kept_box(key: str, cache_dir: str | None) -> Box | None:
    """The box of this key; None if there is none that can be read. `cache_dir`: see
    `cache_folder`."""
    try:
        place = _place(key, cache_dir)
        if not place.is_file():
            return None
        box = box_from_json(read_file("box", place, limit_bytes=LIMIT_BYTES))
        if box.key != key:
            raise ValueError("it is of another machine or model")
    except (SettingsError, ValueError) as error:
        # docs: the file of measured speeds is damaged, or of another version; they are measured
        # again
        _LOG.warning("kept measurements are not used: %s", one_line(str(error), _LONGEST_LINE))
        return None
    return box


def keep_box(box: Box, cache_dir: str | None) -> Path | None:
    """Keep a box for the next start; returns its file, or None and a warning if it cannot be
    written."""
    try:
        place = _place(box.key, cache_dir)
        write_file("box", place, box_as_json(box))
        by_age = sorted(
            place.parent.glob(f"{_PREFIX}*{_SUFFIX}"), key=lambda each: each.stat().st_mtime
        )
        for old in by_age[:-_NUM_KEPT]:
            old.unlink(missing_ok=True)
    except (SettingsError, OSError) as error:
        # docs: the cache folder is full, or cannot be written to; each start measures again
        _LOG.warning("measurements are not kept: %s", one_line(str(error), _LONGEST_LINE))
        return None
    return place


def drop_box(key: str, cache_dir: str | None, *, is_doubted: bool = False) -> None:
    """Forget a kept box, if there is one. `is_doubted`: the next one is known to be the second."""
    if is_doubted:
        keep_box(Box(key, {}, is_second=True), cache_dir)
        return
    with suppress(SettingsError, OSError):
        _place(key, cache_dir).unlink(missing_ok=True)


def _place(key: str, cache_dir: str | None) -> Path:
    """Raises: SettingsError."""
    return cache_folder(cache_dir) / f"{_PREFIX}{key}{_SUFFIX}"


# -- JSON -----------------------------------------------------------------------------------------


def box_as_json(box: Box) -> str:
    """One line for each device, link, …; curves are lists of pairs."""
    return json.dumps(box_record(box), indent=1) + "\n"


def box_record(box: Box) -> dict[str, Any]:
    """A box as JSON's types."""

    def curves(by_rows: Mapping[int, Curve]) -> dict[str, Any]:
        return {str(rows): curve.points for rows, curve in by_rows.items()}

    return {
        "format": _FORMAT,
        "key": box.key,
        "devices": {
            name: {part: curves(getattr(each, part)) for part in _DEVICE_CURVES}
            for name, each in box.devices.items()
        },
        "links": {
            name: {
                "step": each.step.points,
                "chunk": each.chunk.points,
                "by_device": each.by_device,
            }
            for name, each in box.links.items()
        },
        "copies": {
            name: {**{rate: getattr(each, rate) for rate in _RATES}, "pcie": each.pcie}
            for name, each in box.copies.items()
        },
        "together": [
            [each.first, each.second, each.first_factor, each.second_factor]
            for each in box.together
        ],
        "host_stop": {name: curve.points for name, curve in box.host_stop.items()},
        "host_asked": {
            name: {
                "beyond": each.beyond.points,
                "computing": each.computing.points,
                **{part: getattr(each, part) for part in _ASKED_TIMES},
            }
            for name, each in box.host_asked.items()
        },
        "offload": {
            name: {
                **{part: getattr(each, part).points for part in _OFFLOAD_CURVES},
                "part_s": each.part_s,
            }
            for name, each in box.offload.items()
        },
        "disk": None if box.disk is None else box.disk.points,
        "is_second": box.is_second,
    }


def box_from_json(text: bytes) -> Box:
    """Raises: ValueError for anything that `box_as_json` does not write."""
    given = read.fields(read.parsed(text), "it", _KEYS)
    read.whole(given["format"], "format", (_FORMAT, _FORMAT))
    disk = given["disk"]
    return Box(
        read.text(given["key"], "key"),
        _by_name(given["devices"], _device),
        _by_name(given["links"], _link),
        _by_name(given["copies"], _copies),
        tuple(_together(each) for each in read.items(given["together"], "together", _MOST)),
        _by_name(given["host_stop"], _curve),
        _by_name(given["host_asked"], _asked),
        _by_name(given["offload"], _offload),
        None if disk is None else _curve("disk", disk),
        is_second=_flag(given["is_second"], "is_second"),
    )


def _flag(given: object, what: str) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"{what} is not true or false")
    return given


def _by_name(given: object, made: Callable[[str, Any], T]) -> dict[str, T]:
    if not isinstance(given, dict) or len(given) > _MOST:
        raise ValueError(f"not an object of at most {_MOST} fields")
    return {read.text(name, "a name"): made(name, each) for name, each in given.items()}


def _curve(name: str, given: object) -> Curve:
    """Raises: ValueError, also from Curve."""
    points = []
    for point in read.items(given, f"the curve of {name}", _MOST):
        pair = read.items(point, "a point", 2)
        if len(pair) != 2:
            raise ValueError("a point is not a pair")
        amount, seconds = (read.number(each, "a point's part", _LARGEST) for each in pair)
        points.append((amount, seconds))
    return Curve(tuple(points))


def _by_rows(given: object) -> dict[int, Curve]:
    curves = {}
    for name, curve in _by_name(given, _curve).items():
        if not (name.isascii() and name.isdigit()) or len(name) > 9 or int(name) < 1:
            raise ValueError(f"{name!r:.20} is not a number of rows")
        curves[int(name)] = curve
    return curves


def _device(name: str, given: object) -> DeviceSpeed:
    curves = read.fields(given, "a device", _DEVICE_CURVES)
    return DeviceSpeed(name, **{part: _by_rows(curves[part]) for part in _DEVICE_CURVES})


def _link(name: str, given: object) -> LinkSpeed:
    link = read.fields(given, "a link", ("step", "chunk", "by_device"))
    by_device = _flag(link["by_device"], "by_device")
    return LinkSpeed(name, _curve("step", link["step"]), _curve("chunk", link["chunk"]), by_device)


def _copies(name: str, given: object) -> CopySpeed:
    rates = read.fields(given, "copies", (*_RATES, "pcie"))
    return CopySpeed(
        name,
        **{rate: read.number(rates[rate], rate, _LARGEST) for rate in _RATES},
        pcie=read.text(rates["pcie"], "pcie"),
    )


def _asked(name: str, given: object) -> AskedSpeed:
    asked = read.fields(given, "asked experts", ("beyond", "computing", *_ASKED_TIMES))
    return AskedSpeed(
        _curve("asked experts", asked["beyond"]),
        _curve("computing", asked["computing"]),
        **{part: read.number(asked[part], part, _LARGEST) for part in _ASKED_TIMES},
    )


def _offload(name: str, given: object) -> OffloadSpeed:
    found = read.fields(given, "copies in prompts", (*_OFFLOAD_CURVES, "part_s"))
    copies, after, single, grouped = (_curve(part, found[part]) for part in _OFFLOAD_CURVES)
    part_s = read.number(found["part_s"], "part_s", _LARGEST)
    return OffloadSpeed(name, copies, after, single, grouped, part_s)


def _together(given: object) -> Together:
    parts = read.items(given, "together", 4)
    if len(parts) != 4:
        raise ValueError("two things and two factors were expected")
    first, second, *factors = parts
    return Together(
        read.text(first, "a thing"),
        read.text(second, "a thing"),
        *(read.number(each, "a factor", _LARGEST) for each in factors),
    )
