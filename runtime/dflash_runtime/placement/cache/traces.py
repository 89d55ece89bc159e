"""Expert traces: files that say which experts each token chose, in the order of computation.

Their parts: the line ``dflash-moe trace 1``; a line of JSON with the model and its layers; blocks.
A block is its number of tokens and the CRC-32 of what follows (both uint32), then for each token
its phase (uint8, index of `PHASES`), then for each token the global expert ids of all layers
(uint16), the highest score first. All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_adapters.spec import ModelSpec, MoeSpec
from dflash_protocol.errors import one_line
from dflash_protocol.ids import I32Array, Phase, U8Array
from dflash_protocol.json_fields import fields, items, parsed
from dflash_protocol.process.text_files import file_error, read_file

_LOG = logging.getLogger(__name__)

TRACE_KIND = "expert trace"

PHASES = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY)
"""Numbered by their place."""

MOST_TRACE_BYTES = 1 << 30

_NAME = b"dflash-moe trace "
_FIRST_LINE = _NAME + b"1\n"
_LONGEST_HEADER = 1 << 20
_BLOCK = struct.Struct("<II")
_MOST_TOKENS_A_BLOCK = 1 << 16
_BLOCK_BYTES = 1 << 16
"""Of a block that is written while there is more to come."""
_MOST_LAYERS, _MOST_EXPERTS, _MOST_USED, _MOST_EXPERT_BYTES = 4096, 1 << 16, 256, 1 << 40
_LONGEST_NAME = 200
_DIGEST = re.compile(r"[0-9a-f]{64}")

U16Array = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class TraceLayer:
    """The sizes of one layer's experts; `expert_bytes` are an expert's in the model's file."""

    layer_id: int
    num_experts: int
    num_experts_used: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The model that a trace is of: GgufFile.identity, MoeSpec.digest, its layers with experts."""

    identity: str
    model_name: str
    moe_digest: str
    layers: tuple[TraceLayer, ...]

    @classmethod
    def of(cls, spec: ModelSpec, identity: str) -> TraceHeader:
        return cls(
            identity, one_line(spec.name, _LONGEST_NAME), spec.moe.digest, _layers_of(spec.moe)
        )

    @property
    def num_ids(self) -> int:
        """Expert ids of a token, all layers together."""
        return sum(layer.num_experts_used for layer in self.layers)

    def as_bytes(self) -> bytes:
        """What a trace begins with."""
        record = {
            "identity": self.identity,
            "model": self.model_name,
            "moe_digest": self.moe_digest,
            "layers": [
                [x.layer_id, x.num_experts, x.num_experts_used, x.expert_bytes] for x in self.layers
            ],
        }
        return _FIRST_LINE + json.dumps(record).encode() + b"\n"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTrace:
    """What a file has. Shapes: phases [N] uint8; ids [N, num_ids] uint16."""

    header: TraceHeader
    phases: U8Array
    ids: U16Array

    @property
    def num_tokens(self) -> int:
        return int(self.phases.size)

    def by_layer(self) -> Iterator[tuple[TraceLayer, I32Array]]:
        """Each layer's ids. Shapes: [N, K]."""
        first = 0
        for layer in self.header.layers:
            end = first + layer.num_experts_used
            yield layer, self.ids[:, first:end].astype(np.int32)
            first = end


def read_trace(path: Path) -> ExpertTrace:
    """Raises: SettingsError naming the file and what is wrong."""
    content = read_file(TRACE_KIND, path, limit_bytes=MOST_TRACE_BYTES)
    try:
        return _parse(content)
    except ValueError as error:
        raise file_error(TRACE_KIND, path, str(error)) from None


class TraceWriter:
    """Writes a trace, block by block, up to a number of bytes; then it drops what comes, and says
    so once. The file is its owner's alone (mode 0600). To be closed.

    An error of the disk ends the trace with a warning: nothing else waits for it.
    """

    def __init__(self, path: Path, header: TraceHeader, *, most_bytes: int) -> None:
        """Replaces an older trace. Raises: SettingsError if the file cannot be written, or is there
        and no trace."""
        self._path = path
        self._num_ids = header.num_ids
        self._waiting: list[tuple[int, U16Array]] = []
        self._num_waiting = 0
        self._left_bytes = most_bytes - len(header.as_bytes())
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise file_error(TRACE_KIND, path, reason) from error
        try:
            start = os.read(self._fd, len(_NAME))
            if start not in (b"", _NAME):
                raise file_error(TRACE_KIND, path, "is there, and no trace: it is not replaced")
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.fchmod(self._fd, 0o600)
            _write(self._fd, header.as_bytes())
        except OSError as error:
            os.close(self._fd)
            raise file_error(TRACE_KIND, path, error.strerror or str(error)) from error
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def is_open(self) -> bool:
        """Whether more is written."""
        return self._fd >= 0

    def add(self, phase: Phase, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Add tokens. Shapes: ids [T, num_ids], copied."""
        if self._fd < 0:
            return
        if ids.ndim != 2 or ids.shape[1] != self._num_ids:
            raise ValueError(f"ids {ids.shape}, expected [T, {self._num_ids}]")
        for first in range(0, ids.shape[0], _MOST_TOKENS_A_BLOCK):
            part = ids[first : first + _MOST_TOKENS_A_BLOCK].astype("<u2")
            self._waiting.append((PHASES.index(phase), part))
            self._num_waiting += part.shape[0]
            if self._num_waiting * (1 + 2 * self._num_ids) >= _BLOCK_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what waits. Idempotent."""
        if self._fd >= 0:
            self._flush()
        self._end()

    def _flush(self) -> None:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        while waiting and self._fd >= 0:
            ends = np.cumsum([ids.shape[0] for _, ids in waiting])
            count = int(np.searchsorted(ends, _MOST_TOKENS_A_BLOCK, side="right"))
            some, waiting = waiting[:count], waiting[count:]
            phases = np.concatenate([np.full(ids.shape[0], each, np.uint8) for each, ids in some])
            data = phases.tobytes() + np.concatenate([ids for _, ids in some]).tobytes()
            block = _BLOCK.pack(phases.size, zlib.crc32(data)) + data
            if len(block) > self._left_bytes:
                # docs: `--expert-trace-mb` is reached: what was written is a whole trace, and
                # serving goes on without
                _LOG.info("expert trace %s: full", self._path)
                self._end()
                return
            self._left_bytes -= len(block)
            try:
                _write(self._fd, block)
            except OSError as error:
                # docs: its disk is full, or failed: serving goes on without the trace
                _LOG.warning("expert trace %s: not written on: %s", self._path, error.strerror)
                self._end()

    def _end(self) -> None:
        fd, self._fd = self._fd, -1
        self._waiting = []
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _write(fd: int, data: bytes) -> None:
    """Raises: OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _layers_of(moe: MoeSpec) -> tuple[TraceLayer, ...]:
    return tuple(
        TraceLayer(each.layer_id, each.num_experts, each.num_experts_used, each.expert_bytes)
        for each in moe.layers
    )


def _parse(content: bytes) -> ExpertTrace:
    """Raises: ValueError saying what is wrong."""
    if not content.startswith(_FIRST_LINE):
        shown = content[: len(_FIRST_LINE)].splitlines()[:1] or [b""]
        raise ValueError(f"begins with {shown[0]!a}: no trace that this version reads")
    end = content.find(b"\n", len(_FIRST_LINE), len(_FIRST_LINE) + _LONGEST_HEADER)
    if end < 0:
        raise ValueError("the header is cut short or too long")
    header = _parse_header(content[len(_FIRST_LINE) : end])
    token_bytes = 1 + 2 * header.num_ids
    phases: list[U8Array] = []
    ids: list[U16Array] = []
    at = end + 1
    while at < len(content):
        if at + _BLOCK.size > len(content):
            raise ValueError(f"cut short at byte {at}")
        count, checksum = _BLOCK.unpack_from(content, at)
        first = at + _BLOCK.size
        if not 0 < count <= _MOST_TOKENS_A_BLOCK:
            raise ValueError(f"a block of {count} tokens at byte {at}")
        if first + count * token_bytes > len(content):
            num_whole = sum(each.size for each in phases)
            raise ValueError(f"cut short at byte {at}, after {num_whole} tokens")
        data = memoryview(content)[first : first + count * token_bytes]
        if zlib.crc32(data) != checksum:
            raise ValueError(f"damaged: the block at byte {at} has another checksum")
        phases.append(np.frombuffer(data, np.uint8, count))
        ids.append(np.frombuffer(data, "<u2", count * header.num_ids, count).reshape(count, -1))
        at = first + count * token_bytes
    empty = np.empty((0, header.num_ids), np.uint16)
    trace = ExpertTrace(
        header,
        np.concatenate([np.empty(0, np.uint8), *phases]),
        np.concatenate([empty, *ids]).astype(np.uint16),
    )
    if (trace.phases >= len(PHASES)).any():
        raise ValueError(f"a token of phase {trace.phases.max()}")
    for layer, chosen in trace.by_layer():
        if chosen.size and chosen.max() >= layer.num_experts:
            raise ValueError(
                f"layer {layer.layer_id} has {layer.num_experts} experts, a token chose "
                f"{chosen.max()}"
            )
    return trace


def _parse_header(text: bytes) -> TraceHeader:
    """Raises: ValueError."""
    record = fields(parsed(text), "header", ("identity", "model", "moe_digest", "layers"))
    layers = []
    for each in items(record["layers"], "layers", _MOST_LAYERS):
        bounds = _MOST_LAYERS, _MOST_EXPERTS, _MOST_USED, _MOST_EXPERT_BYTES
        sizes = items(each, "a layer", len(bounds))
        if len(sizes) != len(bounds) or not all(
            type(size) is int and 0 <= size <= most
            for size, most in zip(sizes, bounds, strict=True)
        ):
            raise ValueError("a layer is not four sizes")
        layer = TraceLayer(*sizes)
        if not 0 < layer.num_experts_used <= layer.num_experts:
            raise ValueError(f"layer {layer.layer_id}: sizes that cannot be")
        layers.append(layer)
    if not layers or any(b.layer_id <= a.layer_id for a, b in pairwise(layers)):
        raise ValueError("layers must ascend, and there must be some")
    for name in ("identity", "moe_digest"):
        if not isinstance(record[name], str) or not _DIGEST.fullmatch(record[name]):
            raise ValueError(f"{name} must be 64 hexadecimal digits")
    if not isinstance(record["model"], str) or len(record["model"]) > _LONGEST_NAME:
        raise ValueError("model must be a short text")
    return TraceHeader(record["identity"], record["model"], record["moe_digest"], tuple(layers))
