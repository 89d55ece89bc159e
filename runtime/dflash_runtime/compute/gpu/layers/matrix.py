"""Weights on the device: read from the file and repacked by the device."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import DeviceUnavailable, UnsupportedModel
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_tokens import Repack
from dflash_runtime.compute.gpu.launch.layouts import FIELDS, DeviceMatrix, is_native, row_bytes
from dflash_runtime.compute.gpu.transfers.weight_copier import Copy, WeightCopier, cut
from dflash_runtime.interrupts import uninterrupted

_LOG = logging.getLogger(__name__)

STAGED_BYTES = 64 << 20
"""Bytes of the file that are on the device twice meanwhile, at most: less than what is computed in
afterwards (`chunk_room.scratch_of_chunk`), so that they need no memory of their own."""
_LEAST_COPIED_BYTES = 1 << 20
"""Threads take longer to be told of fewer bytes than the driver takes to copy them."""

PRODUCT_COLUMNS = 32
"""Values that products of all types process at once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """Rows on the device as they are in the file, and where they are laid out."""

    native: DeviceArray
    out: DeviceArray
    copy: Copy | None
    """None: they are there."""


class Uploader:
    """Uploads rows of files to the device; within `copying` by several threads."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._repacks: dict[tuple[TensorType, int], Repack] = {}
        self._staging: DeviceArray | None = None
        self._copier: WeightCopier | None = None
        self._may_lock = True

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """A context for much to be uploaded; it owns threads and locked memory, where memory can be
        locked, and stages. Behind it these are given back to the driver.

        One within another does nothing.
        """
        if self._copier is not None:
            yield
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_copying)
            with uninterrupted():  # what was opened is known
                self._copier = self._opened()
            yield

    def _opened(self) -> WeightCopier | None:
        """None: memory cannot be locked."""
        if not self._may_lock:
            return None
        try:
            return WeightCopier(self._device)
        except (DeviceUnavailable, OSError, RuntimeError) as error:
            self._may_lock = False
            # docs: no host memory can be locked (see `ulimit -l`), which several threads would copy
            # weights through; the driver copies them, which takes longer
            _LOG.info("weights come to %s by the driver alone: %s", self._device.name, error)
            return None

    def _end_copying(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()
        self.finish()
        with contextlib.suppress(DeviceUnavailable):  # of a device that has failed
            # Or the next array would be cut from what was a stage, and the rest of it be lost.
            self._device.trim()

    def matrix(self, file: GgufFile, tensor_name: str) -> DeviceMatrix:
        """A two-dimensional tensor, or a vector as a matrix of one row.

        Raises: UnsupportedModel if there are no kernels for its type; ValueError if it has more
        dimensions; DeviceOutOfMemory.
        """
        tensor = file.tensor(tensor_name)
        if len(tensor.shape) > 2:
            raise ValueError(f"{tensor_name} is {tensor.shape}, not a matrix")
        rows, columns = tensor.num_rows, tensor.columns
        require_kernels(file, tensor_name, tensor.tensor_type, columns=columns)
        weights = self._device.empty(rows * row_bytes(tensor.tensor_type, columns), np.uint8)
        self.fill(weights, [file.tensor_bytes(tensor_name)], tensor.tensor_type, columns=columns)
        return DeviceMatrix(rows, columns, tensor.tensor_type, weights)

    def fill(
        self,
        weights: DeviceArray,
        raws: Sequence[U8Array],
        tensor_type: TensorType,
        *,
        columns: int,
    ) -> None:
        """Write rows of files, one array after the other, to the beginning of `weights`.

        Shapes: raws each [rows * the file's row bytes] uint8; weights at least [rows of all *
        row_bytes].
        Raises: DeviceUnavailable.
        """
        num_bytes = sum(raw.size for raw in raws)
        copier = self._copier if num_bytes >= _LEAST_COPIED_BYTES else None
        if is_native(tensor_type, columns):
            copy = self._begun(copier, raws, weights[:num_bytes])
            if copy is not None:
                copy.wait()
            return
        native_bytes, device_bytes = tensor_type.row_bytes(columns), row_bytes(tensor_type, columns)
        # Threads fill one stage while the rows of the other are laid out.
        num_stages, staged_bytes = (
            (1, max(raw.size for raw in raws)) if copier is None else (2, num_bytes)
        )
        num_rows = min(staged_bytes, STAGED_BYTES) // native_bytes
        stage_rows = max(1, -(-num_rows // num_stages))
        stages = self._staged(num_stages * stage_rows * native_bytes).reshape(num_stages, -1)
        under_way: deque[_Staged] = deque()
        first = 0
        for number, parts in enumerate(cut(raws, stage_rows * native_bytes)):
            num_rows = sum(part.size for part in parts) // native_bytes
            native = stages[number % num_stages, : num_rows * native_bytes]
            out = weights[first * device_bytes : (first + num_rows) * device_bytes]
            under_way.append(_Staged(native, out, self._begun(copier, parts, native)))
            first += num_rows
            if len(under_way) == num_stages:
                self._lay_out(under_way.popleft(), tensor_type, columns)
        for staged in under_way:
            self._lay_out(staged, tensor_type, columns)

    def _staged(self, num_bytes: int) -> DeviceArray:
        """Shapes: [num_bytes] uint8."""
        if self._staging is None or self._staging.size < num_bytes:
            if self._staging is not None:
                self._staging = None
                self._device.trim()  # as in _end_copying
            self._staging = self._device.empty(num_bytes, np.uint8)
        staged: DeviceArray = self._staging[:num_bytes]
        return staged

    def _begun(
        self, copier: WeightCopier | None, raws: Sequence[U8Array], place: DeviceArray
    ) -> Copy | None:
        """Copy bytes as they are, once what was launched before has ended. None: it is done."""
        if copier is not None:
            return copier.begin(raws, place, after=self._device.mark())
        first = 0
        for raw in raws:
            self._device.write(place[first : first + raw.size], raw)
            first += raw.size
        return None

    def _lay_out(self, staged: _Staged, tensor_type: TensorType, columns: int) -> None:
        if staged.copy is not None:
            staged.copy.wait()
        self.lay_out(staged.native, staged.out, tensor_type, columns=columns)

    def lay_out(
        self, native: DeviceArray, out: DeviceArray, tensor_type: TensorType, *, columns: int
    ) -> None:
        """Repack rows of a file that are on the device already, or copy them if the layout is the
        file's.

        Shapes: native [rows * the file's row bytes], out [rows * row_bytes] uint8.
        """
        if is_native(tensor_type, columns):
            self._device.copy(out, native)
            return
        key = tensor_type, columns
        if key not in self._repacks:
            self._repacks[key] = Repack(self._device, tensor_type, columns=columns)
        self._repacks[key].launch(native, out)

    def finish(self) -> None:
        """Free memory that only uploads need."""
        self._staging = None


def require_kernels(
    file: GgufFile, tensor_name: str, tensor_type: TensorType, *, columns: int
) -> None:
    """Raises: UnsupportedModel if GPU kernels cannot read such rows."""
    reason = ""
    if tensor_type not in FIELDS:
        reason = tensor_type.name
    elif columns % PRODUCT_COLUMNS:
        reason = f"rows of {columns} values, which are no multiple of {PRODUCT_COLUMNS}"
    if reason:
        raise UnsupportedModel(
            # docs: this model's tensors have a type or a width that only CPUs compute
            f"there are no GPU kernels for {reason}; use --device cpu",
            path=file.path,
            field=tensor_name,
        )
