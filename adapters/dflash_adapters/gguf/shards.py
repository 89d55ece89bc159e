"""Opens the file, or all shards, of a model, and checks that they are consistent.

A split model is ``<stem>-00001-of-000NN.gguf`` and its siblings; the keys ``split.*`` describe the
split, and only the first shard has the model's metadata.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dflash_adapters.gguf.metadata import Metadata
from dflash_adapters.gguf.scanner import MetadataValue, TensorInfo, scan_gguf
from dflash_adapters.gguf.shard_names import MAX_SHARDS, SHARD_NAME
from dflash_protocol.errors import ModelFileError, one_line

# Over all shards, so that many small ones do not add up to a large table. Published: < 1500.
MAX_MODEL_TENSORS = 16384


class FileChange(StrEnum):
    """How a file has changed since it was opened."""

    REPLACED = "replaced"
    """Its path is another file or missing; the open file is unchanged."""
    WRITTEN = "written"
    """It was written to, truncated or extended: the mapped bytes have changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """An open file of a model; ``stamp`` is its stat when it was opened."""

    path: Path
    file: io.FileIO
    size_bytes: int
    values: dict[str, MetadataValue]
    tensors: list[TensorInfo]
    metadata_bytes: int
    mapping: mmap.mmap
    stamp: os.stat_result

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        """Read bytes through the descriptor.

        Raises: ModelFileError if the file no longer has them.
        """
        try:
            data = os.pread(self.file.fileno(), num_bytes, offset_bytes)
        except OSError as error:
            raise ModelFileError(
                f"cannot be read: {error.strerror}", path=self.path, offset_bytes=offset_bytes
            ) from error
        if len(data) != num_bytes:
            raise ModelFileError(
                "the file became shorter while it was read",
                path=self.path,
                offset_bytes=offset_bytes,
            )
        return data


def open_shards(path: Path, on_error: ExitStack) -> tuple[Shard, ...]:
    """Open a file and, if it is one of several shards, all its siblings, in order.

    `on_error` closes what was opened. Raises: ModelFileError if a file is missing, malformed, or
    inconsistent with the others.
    """
    given = _open_shard(path, 0, on_error)
    count = _metadata(given).get_uint("split.count", 1, maximum=2**16 - 1)
    if count <= 1:
        return (given,)
    names = _shard_names(path, count)
    # Unless the given one is the first, it is opened again later: its index was not known.
    if path.name != names[0]:
        given.file.close()
        given = _open_shard(path.with_name(names[0]), 0, on_error)
    _check_shard(given, given, 0, count)
    shards = [given]
    num_tensors = len(given.tensors)
    for index in range(1, count):
        shard = _open_shard(path.with_name(names[index]), index, on_error)
        _check_shard(shard, given, index, count)
        # A later shard's metadata is not needed again.
        shard.values.clear()
        shards.append(shard)
        num_tensors += len(shard.tensors)
        if num_tensors > MAX_MODEL_TENSORS:
            raise ModelFileError(
                f"the shards up to this one hold {num_tensors} tensors; "
                f"at most {MAX_MODEL_TENSORS} are read",
                path=shard.path,
            )
    claimed = _metadata(given).get_uint("split.tensors.count", num_tensors)
    if claimed != num_tensors:
        raise ModelFileError(
            f"claims {claimed} tensors, the shards hold {num_tensors}",
            path=given.path,
            field="split.tensors.count",
        )
    return tuple(shards)


def _shard_names(path: Path, count: int) -> list[str]:
    """File names of all shards, given the path of one."""
    if count > MAX_SHARDS:
        raise ModelFileError(
            f"claims {count} shards; at most {MAX_SHARDS} are read", path=path, field="split.count"
        )
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        raise ModelFileError(
            f"is one of {count} shards but is not named …-00001-of-{count:05d}.gguf", path=path
        )
    number, named_count = int(match["number"]), int(match["count"])
    if named_count != count or not 1 <= number <= count:
        raise ModelFileError(
            f"says {count} shards, its name says {number} of {named_count}",
            path=path,
            field="split.count",
        )
    return [f"{match['stem']}-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]


def _check_shard(shard: Shard, first: Shard, index: int, count: int) -> None:
    own = _metadata(shard)
    for key, expected in (("split.no", index), ("split.count", count)):
        if (found := own.get_uint(key)) != expected:
            raise ModelFileError(f"is {found}, expected {expected}", path=shard.path, field=key)
    # A later shard need not have the key; if it does it must agree.
    key = "general.architecture"
    expected_name = _metadata(first).get_str(key, max_bytes=64)
    found_name = own.get_str(key, expected_name, max_bytes=64)
    if found_name != expected_name:
        raise ModelFileError(
            f"is {one_line(found_name)}, the first shard's is {one_line(expected_name)}",
            path=shard.path,
            field=key,
        )


def _metadata(shard: Shard) -> Metadata:
    return Metadata(shard.path, shard.file, shard.values)


def _open_shard(path: Path, shard_index: int, on_error: ExitStack) -> Shard:
    try:
        file = on_error.enter_context(io.FileIO(path, opener=_open_without_waiting))
        opened = os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL in it.
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelFileError(f"cannot be opened: {reason}", path=path) from error
    if not stat.S_ISREG(opened.st_mode):
        raise ModelFileError("not a regular file", path=path)
    scan = scan_gguf(file.fileno(), path, opened.st_size, shard_index=shard_index)
    try:
        mapping = on_error.enter_context(
            mmap.mmap(file.fileno(), opened.st_size, access=mmap.ACCESS_READ)
        )
    except (OSError, ValueError) as error:
        # ValueError: the file became shorter since it was scanned.
        raise ModelFileError(f"cannot be mapped: {error}", path=path) from error
    return Shard(
        path=path,
        file=file,
        size_bytes=opened.st_size,
        values=scan.values,
        tensors=scan.tensors,
        metadata_bytes=scan.metadata_bytes,
        mapping=mapping,
        stamp=opened,
    )


def _open_without_waiting(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a FIFO would otherwise block until it is written to.
    return os.open(path, flags | os.O_NONBLOCK)
