"""An open model: the metadata, tensor table and mapped bytes of one GGUF file or of all its shards.

Weights are memory-mapped: a page is read from the disk when it is first accessed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np

from dflash_adapters.gguf.metadata import Metadata
from dflash_adapters.gguf.scanner import TensorInfo
from dflash_adapters.gguf.shards import FileChange, Shard, open_shards
from dflash_adapters.gguf.watch import FileWatch
from dflash_adapters.quant import dequantise
from dflash_protocol.errors import ModelFileError, one_line
from dflash_protocol.fingerprint import digest
from dflash_protocol.ids import F32Array, U8Array

__all__ = ["FileChange", "GgufFile", "TensorInfo", "sample_places"]

_NUM_SAMPLES = 8
_SAMPLE_BYTES = 512
_HASH_CHUNK_BYTES = 1 << 20


class GgufFile(Metadata):
    """One model's metadata, tensors and bytes; ``tensors`` is in file order, shard by shard.

    The file must not shrink while it is open: access to a mapped page that is gone raises SIGBUS.
    Owns: a descriptor a shard until closed, and the mappings until their last view is gone.
    """

    def __init__(self, path: Path, shards: tuple[Shard, ...]) -> None:
        """Take over open shards; use `GgufFile.open`."""
        super().__init__(shards[0].path, shards[0].file, shards[0].values)
        self.path = path
        self._shards = shards
        self._identity: str | None = None
        self.shard_paths = tuple(shard.path for shard in shards)
        self.size_bytes = sum(shard.size_bytes for shard in shards)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_all_tensors(shards))
        self.architecture = self.get_str("general.architecture", max_bytes=64)
        # Last, since a mapping with views cannot be closed if something above fails.
        self._data = [np.frombuffer(shard.mapping, dtype=np.uint8) for shard in shards]
        self.watch = FileWatch(shards)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a file, or all shards of a split model given any one of them.

        Raises: ModelFileError if the file is malformed or cannot be read.
        """
        path = Path(path)
        with ExitStack() as on_error:
            file = cls(path, open_shards(path, on_error))
            on_error.pop_all()
            return file

    def close(self) -> None:
        """Release descriptors and mappings. Existing views stay valid."""
        for shard in self._shards:
            shard.file.close()
        self._shards = ()
        self._data = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def tensor(self, name: str) -> TensorInfo:
        """The table row of a required tensor.

        Raises: ModelFileError if it is missing.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError("required tensor is missing", path=self.path, field=one_line(name))
        return info

    def tensor_bytes(self, name: str) -> U8Array:
        """A tensor's stored bytes, as a view. Shapes: [num_bytes] uint8, read-only."""
        info = self.tensor(name)
        return self.region(info.shard_index, info.offset_bytes, info.num_bytes)

    def floats(self, name: str) -> F32Array:
        """A tensor's values. Shapes: the tensor's, float32; a view if they are stored so."""
        info = self.tensor(name)
        return dequantise(self.tensor_bytes(name), info.tensor_type, info.shape)

    def region(self, shard_index: int, offset_bytes: int, num_bytes: int) -> U8Array:
        """Bytes of one shard, as a view. Shapes: [num_bytes] uint8, read-only."""
        self._shard(shard_index, offset_bytes, num_bytes)
        return self._data[shard_index][offset_bytes : offset_bytes + num_bytes]

    def advise_willneed(self, shard_index: int, offset_bytes: int, num_bytes: int) -> None:
        """Ask the kernel to prefetch bytes of one shard; returns at once."""
        shard = self._shard(shard_index, offset_bytes, num_bytes)
        if num_bytes > 0:
            start = offset_bytes - offset_bytes % mmap.PAGESIZE
            shard.mapping.madvise(mmap.MADV_WILLNEED, start, offset_bytes + num_bytes - start)

    def advise_dontneed(self, shard_index: int, offset_bytes: int, num_bytes: int) -> None:
        """Drop the pages wholly within these bytes from this process's memory.

        The next access reads them again, from the page cache or the disk.
        """
        shard = self._shard(shard_index, offset_bytes, num_bytes)
        start = offset_bytes + -offset_bytes % mmap.PAGESIZE
        end = offset_bytes + num_bytes
        end -= end % mmap.PAGESIZE
        if end > start:
            shard.mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def opened_directly(self, shard_index: int) -> int:
        """A descriptor of the open shard for reads past the page cache, which the caller closes.

        Raises: OSError where its file system has no such reads.
        """
        shard = self._shard(shard_index, 0, 0)
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
        return os.open(f"/proc/self/fd/{shard.file.fileno()}", flags)

    def require_unwritten(self) -> None:
        """Raises: ModelFileError if the file was written to since it was opened, so that the mapped
        bytes may differ from those of `identity`."""
        self._require_open()
        self.watch.require_unwritten()

    def identity(self) -> str:
        """SHA-256 of all metadata, the tensor table, the sizes, and samples of every tensor.

        It differs between most finetunes, and is all that peers of protocol version 1 compare. It
        does not prove that weights are equal: see `weight_check`.
        """
        if self._identity is None:
            self._require_open()
            self._identity = digest("model-identity-v1", self._identity_chunks())
        return self._identity

    def _identity_chunks(self) -> Iterator[bytes]:
        # Read rather than mapped, so that sampled pages do not stay in the resident set.
        for shard in self._shards:
            yield shard.size_bytes.to_bytes(8, "little")
            for start in range(0, shard.metadata_bytes, _HASH_CHUNK_BYTES):
                yield shard.read(start, min(_HASH_CHUNK_BYTES, shard.metadata_bytes - start))
            for info in shard.tensors:
                for place, num_bytes in sample_places(info.num_bytes):
                    yield shard.read(info.offset_bytes + place, num_bytes)

    def _shard(self, shard_index: int, offset_bytes: int, num_bytes: int) -> Shard:
        """The shard that has these bytes.

        Raises: ValueError if they are out of range, which is an error of the caller.
        """
        self._require_open()
        if not 0 <= shard_index < len(self._shards):
            raise ValueError(f"shard {shard_index} of {len(self._shards)}")
        shard = self._shards[shard_index]
        if offset_bytes < 0 or num_bytes < 0 or offset_bytes + num_bytes > shard.size_bytes:
            raise ValueError(
                f"{num_bytes} bytes at {offset_bytes} of a shard of {shard.size_bytes} bytes"
            )
        return shard

    def _require_open(self) -> None:
        if not self._shards:
            raise ValueError(f"{self.path} is closed")


def sample_places(num_bytes: int) -> list[tuple[int, int]]:
    """The (offset, length) of the samples that `identity` takes of a tensor, spread over its bytes.

    4 KiB in total, or all of a smaller tensor.
    """
    if num_bytes <= _NUM_SAMPLES * _SAMPLE_BYTES:
        return [(0, num_bytes)]
    span = num_bytes - _SAMPLE_BYTES
    return [(i * span // (_NUM_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_NUM_SAMPLES)]


def _all_tensors(shards: tuple[Shard, ...]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for info in shard.tensors:
            if info.name in tensors:
                raise ModelFileError(
                    "the tensor occurs in two shards",
                    path=shard.path,
                    field=one_line(info.name),
                    offset_bytes=info.offset_bytes,
                )
            tensors[info.name] = info
    return tensors
