"""Heat files: a model's heat in a small binary file; the older system's CSV of counts is read too.

Its parts: the line ``dflash-moe heat 2``; a line of JSON with the model, the layers, the half-lives
and the owners; the arrays of `Heat`, little-endian (totals as int64, slow and fast as float64); the
SHA-256 of all that. Version 1 is read too: one more array followed these, which is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import one_line
from dflash_protocol.hotness import MAX_COUNTS, Hotness, parse_hotness
from dflash_protocol.ids import I64Array, Phase
from dflash_protocol.json_fields import is_whole, parsed
from dflash_protocol.process.text_files import file_error, read_file
from dflash_runtime.placement.heat import HEAT_PHASES, HalfLives, Heat, HeatLayer, layers_of

HEAT_KIND = "heat file"

_NAME, _VERSION, _OLDER_VERSION = b"dflash-moe heat ", b"2", b"1"
_LIMIT_BYTES = 16 << 20
"""Room for the arrays of MAX_COUNTS experts, 12 MiB, and the header."""
_LONGEST_HEADER = 1 << 20
_MOST_LAYERS = 4096
_MOST_OWNERS = 256
_LONGEST_NAME = 200
_MOST_SELECTIONS = 1 << 40
"""Of one expert: a trillion. No sum of a layer's can overflow."""
_LONGEST_HALF_LIFE = 1e9
_IDENTITY = re.compile(r"([0-9a-f]{64})?")
_ARRAYS = (("totals", "<i8"), ("slow", "<f8"), ("fast", "<f8"))


@dataclass(frozen=True, slots=True, eq=False)
class HeatFile:
    """Heat, and the model that it is of. `identity` is GgufFile.identity, empty in files of the
    older system; `num_layers` counts layers without experts too."""

    heat: Heat
    num_layers: int
    identity: str = ""
    model_name: str = ""

    def as_bytes(self) -> bytes:
        """The content of a heat file."""
        heat = self.heat
        owners = sorted(heat.pairs_of_owner.items(), key=lambda each: -sum(each[1]))
        header = {
            "identity": self.identity,
            "model": one_line(self.model_name, _LONGEST_NAME),
            "num_layers": self.num_layers,
            "layers": [[x.layer_id, x.num_experts, x.num_experts_used] for x in heat.layers],
            "half_lives": [heat.half_lives.fast, heat.half_lives.slow],
            "owners": {
                one_line(name, _LONGEST_NAME): pairs for name, pairs in owners[:_MOST_OWNERS]
            },
        }
        parts = [_NAME + _VERSION + b"\n", json.dumps(header).encode(), b"\n"]
        parts += [getattr(heat, name).astype(kind).tobytes() for name, kind in _ARRAYS]
        content = b"".join(parts)
        return content + hashlib.sha256(content).digest()

    def as_hotness(self) -> Hotness:
        """All selections as counts of the older system; zero in layers that have no experts, or
        never reported."""
        heat = self.heat
        counts = np.zeros((self.num_layers, heat.shape[2]), np.uint64)
        for layer, row in zip(heat.layers, heat.totals.sum(axis=0), strict=True):
            counts[layer.layer_id] = row
        return Hotness(counts, max(each.num_experts_used for each in heat.layers))


def read_heat_file(path: Path, *, half_lives: HalfLives | None = None) -> HeatFile:
    """Read a heat file, or the older system's CSV, whose counts become those of decode.

    `half_lives`, if given, replace those of the file from now on.
    Raises: SettingsError naming the file and what is wrong.
    """
    content = read_file(HEAT_KIND, path, limit_bytes=_LIMIT_BYTES)
    try:
        if content.startswith(_NAME):
            return _parse(content, half_lives)
        if not re.match(rb"[\s]*[#0-9]", content):
            raise ValueError("neither a heat file nor the older system's CSV of counts")
        hotness = parse_hotness(content)
        num_used = hotness.num_experts_used
        layers = [HeatLayer(i, hotness.num_experts, num_used) for i in range(hotness.num_layers)]
        heat = _heat_of(hotness, layers, half_lives or HalfLives())
        return HeatFile(heat, hotness.num_layers)
    except ValueError as error:
        raise file_error(HEAT_KIND, path, str(error)) from None


def heat_for_model(path: Path, file: HeatFile, spec: ModelSpec, *, identity: str) -> Heat:
    """The heat of a file that was read from `path`, for this model.

    Raises: SettingsError if it is of another model.
    """
    heat, layers = file.heat, layers_of(spec.moe)
    if file.identity:
        if file.identity != identity:
            raise file_error(
                HEAT_KIND,
                path,
                f"is of another model: {file.identity[:16]} ({file.model_name}), this is "
                f"{identity[:16]} ({spec.name})",
            )
        if heat.layers != layers:
            raise file_error(HEAT_KIND, path, "its layers are not those of the model")
        return heat
    most = max(each.num_experts for each in layers)
    if (file.num_layers, heat.shape[2]) != (spec.num_layers, most):
        raise file_error(
            HEAT_KIND,
            path,
            f"{file.num_layers} layers of {heat.shape[2]} experts, the model has "
            f"{spec.num_layers} of {most}",
        )
    try:
        return _heat_of(file.as_hotness(), layers, heat.half_lives)
    except ValueError as error:
        raise file_error(HEAT_KIND, path, str(error)) from None


def _heat_of(
    hotness: Hotness, layers: list[HeatLayer] | tuple[HeatLayer, ...], half_lives: HalfLives
) -> Heat:
    """Heat of counts that say nothing of phases or times. Raises: ValueError."""
    counts = hotness.counts
    if counts.max() > _MOST_SELECTIONS:
        row = int(counts.max(axis=1).argmax())
        raise ValueError(f"layer {row}: {counts.max()} selections of one expert")
    known = np.zeros_like(counts)
    for layer in layers:
        known[layer.layer_id, : layer.num_experts] = counts[layer.layer_id, : layer.num_experts]
    if (known != counts).any():
        row, column = (int(each[0]) for each in (known != counts).nonzero())
        raise ValueError(f"layer {row}: the model has no expert {column} there")
    heat = Heat(layers, half_lives)
    selections: I64Array = np.zeros(heat.shape, np.int64)
    rows = counts[[each.layer_id for each in layers]].astype(np.int64)
    selections[HEAT_PHASES.index(Phase.DECODE)] = rows[:, : heat.shape[2]]
    heat.add(selections)
    return heat


def _parse(content: bytes, half_lives: HalfLives | None) -> HeatFile:
    """Raises: ValueError saying what is wrong."""
    first, _, rest = content.partition(b"\n")
    version = first.removeprefix(_NAME)
    if version not in (_VERSION, _OLDER_VERSION):
        raise ValueError(f"version {version[:20]!a}, this program reads versions 1 and 2")
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        raise ValueError("damaged: it is truncated, or its bytes have changed")
    text, _, body = rest[:-32].partition(b"\n")
    header = _parse_header(text)
    layers = _layers(header.get("layers"))
    num_layers = header.get("num_layers")
    if type(num_layers) is not int or not layers[-1].layer_id < num_layers <= _MOST_LAYERS:
        raise ValueError("num_layers does not fit the layers")
    identity, name = header.get("identity"), header.get("model")
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise ValueError("identity must be 64 hexadecimal digits")
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise ValueError("model must be a short text")
    heat = Heat(layers, half_lives or _half_lives(header.get("half_lives")))
    # In version 1 a float64 for each phase and layer: which decayed counts predicted better.
    num_unused = 8 * heat.totals[..., 0].size if version == _OLDER_VERSION else 0
    _fill(heat, body, num_unused)
    heat.pairs_of_owner.update(_owners(header.get("owners")))
    return HeatFile(heat, num_layers, identity, name)


def _parse_header(text: bytes) -> dict[str, Any]:
    if len(text) > _LONGEST_HEADER:
        raise ValueError("the header is too long")
    header = parsed(text)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header


def _layers(value: Any) -> list[HeatLayer]:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_LAYERS:
        raise ValueError(f"layers must be a list of 1 to {_MOST_LAYERS}")
    layers = []
    for each in value:
        if not (
            isinstance(each, list)
            and len(each) == 3
            and is_whole(each[0], 0, _MOST_LAYERS - 1)
            and is_whole(each[1], 1, MAX_COUNTS)
            and is_whole(each[2], 1, each[1])
        ):
            raise ValueError(f"layer {str(each)[:40]!a}: must be its id, experts, experts used")
        layers.append(HeatLayer(*each))
    for before, layer in pairwise(layers):
        if layer.layer_id <= before.layer_id:
            raise ValueError(f"layer {layer.layer_id} occurs twice, or is out of order")
    if len(layers) * max(each.num_experts for each in layers) > MAX_COUNTS:
        raise ValueError(f"more than {MAX_COUNTS} experts")
    return layers


def _half_lives(value: Any) -> HalfLives:
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(type(each) in (int, float) and 1 <= each <= _LONGEST_HALF_LIFE for each in value)
    ):
        raise ValueError("half_lives must be two numbers of tokens, 1 or more")
    return HalfLives(*map(float, value))


def _owners(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, dict) or len(value) > _MOST_OWNERS:
        raise ValueError(f"owners must be an object of at most {_MOST_OWNERS}")
    for name, pairs in value.items():
        if not (
            len(name) <= _LONGEST_NAME
            and isinstance(pairs, list)
            and len(pairs) == len(HEAT_PHASES)
            and all(is_whole(each, 0, 1 << 62) for each in pairs)
        ):
            raise ValueError(f"owner {name[:40]!a}: must have a count for each phase")
    return value


def _fill(heat: Heat, body: bytes, num_unused: int) -> None:
    """Set a heat's arrays; so many bytes behind them are not used. Raises: ValueError."""
    sizes = [getattr(heat, name).size * 8 for name, _ in _ARRAYS]
    if len(body) != sum(sizes) + num_unused:
        raise ValueError(f"{len(body)} bytes of counts, {sum(sizes) + num_unused} expected")
    place = 0
    for (name, kind), size in zip(_ARRAYS, sizes, strict=True):
        ours = getattr(heat, name)
        ours[...] = np.frombuffer(body, kind, ours.size, place).reshape(ours.shape)
        place += size
    for row, layer in enumerate(heat.layers):
        where = f"layer {layer.layer_id}"
        totals = heat.totals[:, row]
        if totals.min() < 0 or totals.max() > _MOST_SELECTIONS:
            raise ValueError(f"{where}: a count is not within 0 to {_MOST_SELECTIONS}")
        for decayed in (heat.slow[:, row], heat.fast[:, row]):
            # Written so that NaN fails too.
            if not ((decayed >= 0) & (decayed <= totals * (1 + 1e-6))).all():
                raise ValueError(f"{where}: a decayed count is not within 0 and the count")
        if totals[:, layer.num_experts :].any():
            raise ValueError(f"{where}: counts of experts that it does not have")
