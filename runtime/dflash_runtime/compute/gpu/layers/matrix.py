"""Weights on the device: read from the file and repacked by the device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import DeviceUnavailable, UnsupportedModel
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, Mark
from dflash_runtime.compute.gpu.launch.decode_tokens import Repack
from dflash_runtime.compute.gpu.launch.layouts import FIELDS, DeviceMatrix, is_native, row_bytes

if TYPE_CHECKING:  # daemons without numba count memory by this module
    from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, Transfer

STAGED_BYTES = 64 << 20
"""Bytes of the file on the way to their layout, which are on the device twice meanwhile."""
_NUM_STAGES = 2
_COPIES = ("copies",)
"""Of the jobs that the processor's code is compiled by."""
_LEAST_COPIED_BYTES = 1 << 20
"""Threads take longer to be told of fewer bytes than the driver takes to copy them."""

PRODUCT_COLUMNS = 32
"""Values that products of all types process at once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """Rows of a file on their way to the device."""

    rows: list[tuple[DeviceArray, DeviceArray]]
    """As in the file, on the device; and where they are laid out."""
    transfer: Transfer | None


class Uploader:
    """Uploads rows of files to the device; within `copying` by several threads, whose code is kept
    in `cache_dir` (see `settings.cache_folder`)."""

    def __init__(self, device: KernelDevice, cache_dir: str | None = None) -> None:
        self._device, self._cache_dir = device, cache_dir
        self._repacks: dict[tuple[TensorType, int], Repack] = {}
        self._stages: list[DeviceArray] = []
        """Of equal size: one is filled while the rows of the other are laid out."""
        self._copier: FileCopier | None = None

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """A context for much to be uploaded; it owns threads and locked memory, if there is any,
        and the threads' code was compiled before: that takes longer than they save."""
        from dflash_runtime.compute.cpu import compile_ahead
        from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in
        from dflash_runtime.compute.gpu.transfers import file_copier

        with keeping_in(self._cache_dir):
            is_compiled = compile_ahead.are_compiled(_COPIES)
        if self._copier is not None or not is_compiled:
            yield
            if self._copier is None:
                self.finish()
            return
        with contextlib.ExitStack() as undo:
            with contextlib.suppress(DeviceUnavailable):  # copies of the driver's are slower
                self._copier = file_copier.FileCopier(self._device)
                undo.callback(self._end_copying, self._copier)
                self.finish()  # it needs more stages
            undo.callback(self.finish)
            yield

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which a process compiles the code that `copying` needs, unless that was done
        before on this machine."""
        from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in
        from dflash_runtime.compute.cpu.compile_ahead import compile_ahead

        is_given_up = threading.Event()

        def on_progress(num_done: int, num_total: int) -> None:
            if is_given_up.is_set():
                raise InterruptedError

        def compile_copies() -> None:
            with keeping_in(self._cache_dir):
                compile_ahead(_COPIES, on_progress)

        with ThreadPoolExecutor(1, thread_name_prefix="dflash-compile") as pool:
            pool.submit(compile_copies)
            try:
                yield
            except BaseException:
                is_given_up.set()
                raise

    def _end_copying(self, copier: FileCopier) -> None:
        self._copier = None
        copier.close()

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
        self.fill(weights, file.tensor_bytes(tensor_name), tensor.tensor_type, columns=columns)
        return DeviceMatrix(rows, columns, tensor.tensor_type, weights)

    def fill(
        self, weights: DeviceArray, raw: U8Array, tensor_type: TensorType, *, columns: int
    ) -> None:
        """Write rows of a file, in their order, to the beginning of `weights`.

        Shapes: raw [rows * the file's row bytes] uint8; weights at least [rows * row_bytes].
        Raises: DeviceUnavailable.
        """
        self.fill_all([(weights, raw)], tensor_type, columns=columns)

    def fill_all(
        self,
        runs: Iterable[tuple[DeviceArray, U8Array]],
        tensor_type: TensorType,
        *,
        columns: int,
    ) -> None:
        """The same for several. Raises: DeviceUnavailable."""
        if is_native(tensor_type, columns):
            whole = [(weights[: raw.size], raw) for weights, raw in runs]
            transfer = self._begin(whole, self._device.mark())
            if transfer is not None:
                transfer.wait()
            return
        sizes = tensor_type.row_bytes(columns), row_bytes(tensor_type, columns)
        if self._copier is None:  # one after the other, with memory for the largest
            for run in runs:
                for part in _parts([run], *sizes, STAGED_BYTES):
                    self._lay_out(self._stage(part, 0), tensor_type, columns)
            return
        marks = [self._device.mark()] * _NUM_STAGES
        runs = list(runs)
        # Never more memory than the rows themselves take.
        most_bytes = min(STAGED_BYTES, sum(raw.size for _, raw in runs)) // _NUM_STAGES
        staged: _Staged | None = None
        for number, part in enumerate(_parts(runs, *sizes, most_bytes)):
            stage = number % _NUM_STAGES
            next_staged = self._stage(part, stage, after=marks[stage])
            if staged is not None:
                self._lay_out(staged, tensor_type, columns)
                marks[1 - stage] = self._device.mark()
            staged = next_staged
        if staged is not None:
            self._lay_out(staged, tensor_type, columns)

    def _stage(
        self, part: list[tuple[DeviceArray, U8Array]], stage: int, *, after: Mark | None = None
    ) -> _Staged:
        num_bytes = sum(raw.size for _, raw in part)
        if not self._stages or self._stages[0].size < num_bytes:
            num_stages = 1 if self._copier is None else _NUM_STAGES
            self._stages = [self._device.empty(num_bytes, np.uint8) for _ in range(num_stages)]
        rows, first = [], 0
        for out, raw in part:
            rows.append((self._stages[stage][first : first + raw.size], out))
            first += raw.size
        runs = [(native, raw) for (native, _), (_, raw) in zip(rows, part, strict=True)]
        return _Staged(rows, self._begin(runs, after))

    def _begin(
        self, runs: list[tuple[DeviceArray, U8Array]], after: Mark | None
    ) -> Transfer | None:
        """Copy bytes as they are, once the mark is reached. None: they are there."""
        if self._copier is not None and sum(raw.size for _, raw in runs) >= _LEAST_COPIED_BYTES:
            from dflash_runtime.compute.gpu.transfers.file_copier import FileRuns

            return self._copier.begin(FileRuns.of((raw, place) for place, raw in runs), after=after)
        for place, raw in runs:
            self._device.write(place, raw)
        return None

    def _lay_out(self, staged: _Staged, tensor_type: TensorType, columns: int) -> None:
        if staged.transfer is not None:
            staged.transfer.wait()
        for native, out in staged.rows:
            self.lay_out(native, out, tensor_type, columns=columns)

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
        self._stages = []


def _parts(
    runs: list[tuple[DeviceArray, U8Array]], native_bytes: int, device_bytes: int, most_bytes: int
) -> Iterator[list[tuple[DeviceArray, U8Array]]]:
    """The rows of all runs, in parts of up to `most_bytes`. Rows have so many bytes in the file,
    and on the device."""
    most_rows = max(1, most_bytes // native_bytes)
    part: list[tuple[DeviceArray, U8Array]] = []
    num_free = most_rows
    for weights, raw in runs:
        first, num_rows = 0, raw.size // native_bytes
        while first < num_rows:
            end = min(num_rows, first + num_free)
            out = weights[first * device_bytes : end * device_bytes]
            part.append((out, raw[first * native_bytes : end * native_bytes]))
            num_free -= end - first
            first = end
            if not num_free:
                yield part
                part, num_free = [], most_rows
    if part:
        yield part


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
