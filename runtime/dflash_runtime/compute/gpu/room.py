"""Device memory of a model, or of some of its experts, counted before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import KvLayer, MoeLayer
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from dflash_runtime.compute.gpu.launch.layouts import FLOAT_TYPES, row_bytes
from dflash_runtime.compute.gpu.layers.kv_rows import bytes_with_snapshots
from dflash_runtime.compute.gpu.layers.matrix import PRODUCT_COLUMNS, require_kernels
from dflash_runtime.compute.kv_cache import KvType


def require_room(device: str, memory: DeviceMemory, needed: Mapping[str, int]) -> None:
    """`needed`: bytes by purpose.

    Raises: DeviceOutOfMemory with the amounts if so much is not free.
    """
    num_bytes = sum(needed.values())
    if num_bytes <= memory.free_bytes:
        return
    named = (f"{size / 2**30:.2f} GiB {what}" for what, size in needed.items() if size)
    raise DeviceOutOfMemory(
        device,
        num_bytes=num_bytes,
        free_bytes=memory.free_bytes,
        total_bytes=memory.total_bytes,
        what=", ".join(named),
    )


def experts_bytes(file: GgufFile, experts: Iterable[tuple[MoeLayer, int]]) -> int:
    """Bytes of so many experts of each of these layers in the device's layout.

    Raises: UnsupportedModel.
    """
    total = 0
    for layer, num in experts:
        for each in layer.projections:
            require_kernels(file, each.tensor_name, each.tensor_type, columns=each.columns)
            total += num * each.rows * row_bytes(each.tensor_type, each.columns)
    return total


def weights_bytes(file: GgufFile, layers: Iterable[MoeLayer]) -> int:
    """Bytes of all tensors of a file but the experts of these layers. Raises: UnsupportedModel."""
    left_out = {
        name
        for layer in layers
        for projection in layer.projections
        for name in projection.tensor_names
    }
    total = 0
    for name, tensor in file.tensors.items():
        if name in left_out or tensor.tensor_type.is_integer:
            continue
        # Floats in rows that products cannot read, as a convolution's taps, are loaded as vectors.
        is_vector = tensor.tensor_type in FLOAT_TYPES and tensor.columns % PRODUCT_COLUMNS
        if len(tensor.shape) == 2 and not is_vector:
            require_kernels(file, name, tensor.tensor_type, columns=tensor.columns)
            total += tensor.shape[0] * row_bytes(tensor.tensor_type, tensor.shape[1])
        else:
            total += 4 * prod(tensor.shape)
    return total


def logits_bytes(file: GgufFile, num_rows: int) -> int:
    """Bytes of so many rows of logits, bounded by the tensor with the most rows (the head)."""
    tables = [each.shape[0] for each in file.tensors.values() if len(each.shape) == 2]
    return 4 * num_rows * max(tables, default=0)


def cache_bytes(kv_layers: Iterable[KvLayer], num_positions: int, kv_type: KvType) -> int:
    """Bytes of the KV cache, and of windows' snapshots. Raises: SettingsError as DeviceKvCache."""
    return sum(bytes_with_snapshots(kv, num_positions, kv_type) for kv in kv_layers)


def work_bytes(layers: Iterable[MoeLayer], *, max_chunk: int, scratch_bytes: int) -> int:
    """Bytes of intermediate results while a chunk is computed, roughly."""
    of_token = max(
        (
            # Each pair's terms, activations in two halves, and a few rows of everything else.
            layer.num_experts_used * (4 * layer.hidden_size + 4 * layer.ffn_size)
            + 24 * 4 * layer.hidden_size
            for layer in layers
        ),
        default=0,
    )
    return scratch_bytes + max_chunk * of_token
