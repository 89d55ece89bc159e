"""Compiles a GPU's kernels for a model before they are needed, several at once.

Which ones that are is known to what launches them alone: layers of the model are launched on a
device that runs nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_protocol.errors import DflashError
from dflash_runtime.compute import BackendName, ComputeBackend, make_backend
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.topology import read_topology
from dflash_runtime.engine.measuring.devices import chunk_sizes, most_positions
from dflash_runtime.engine.measuring.kept import box_key
from dflash_runtime.engine.measuring.layers import sampled_layers
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers

_LOG = logging.getLogger(__name__)

_ANY_BYTES = 1 << 62
"""Layers that are not loaded take no memory."""
_MOST_POSITIONS = 1 << 16
"""Longer contexts have two kernels more for each fourfold length, which are compiled when needed:
angles of rotations for all their positions take a second."""


def compile_kernels(
    backend: ComputeBackend,
    file: GgufFile,
    *,
    kv_type: KvType,
    asks_host: bool,
    on_progress: Callable[[int, int], None],
) -> None:
    """Compile what steps and prompts of a model launch on a GPU; nothing on the host, nor a second
    time on this machine. A failure costs time and no more.

    `asks_host`: steps may ask this process's processor for experts, whose backend was warmed up.
    """
    if backend.is_host:
        return
    gpu: Any = backend
    chunk = backend.chunking.preferred
    what = box_key(
        file,
        device_ids=[gpu.device_name],
        classes=[backend.numeric_class, f"chunks {chunk}", f"host {asks_host}"],
        topology=read_topology(),
        kv_type=kv_type,
    )

    def launch(device: Any) -> None:
        with contextlib.closing(type(gpu)(device, max_chunk=chunk)) as noting:
            _launch_all(noting, file, kv_type=kv_type, asks_host=asks_host)

    try:
        gpu.device.compile_ahead(what, launch, on_progress)
    except (DflashError, MemoryError) as error:
        # docs: each is compiled on its first use instead
        _LOG.info("kernels of %s are not compiled ahead: %s", gpu.device.name, error)


def _launch_all(
    backend: ComputeBackend, file: GgufFile, *, kv_type: KvType, asks_host: bool
) -> None:
    """Steps, captured and not, and chunks of all sizes, with all experts there, or all but one."""
    description = describe(file)
    sampled = sampled_layers(file, description, limit_bytes=_ANY_BYTES)
    num_layers = len(sampled.description.layers)
    num_positions = max(
        most_positions(backend.chunking.preferred, description.context_length),
        min(description.context_length, _MOST_POSITIONS),
    )
    layers = LoadedLayers(backend, file, sampled, num_positions=num_positions, kv_type=kv_type)
    with contextlib.closing(layers):
        kinds = [layers.passes, layers.host_passes] if asks_host else [layers.passes]
        for passes_of in kinds:
            passes = passes_of(num_layers)
            assert passes.captured is not None
            passes.captured.prepare()
            for rows in (1, *chunk_sizes(backend.chunking)):
                replace(passes, captured=None).seconds(rows)
        if asks_host:
            with contextlib.closing(make_backend(BackendName.CPU, num_threads=1)) as processor:
                for passes in layers.mail_passes(num_layers, processor):
                    assert passes.captured is not None
                    passes.captured.prepare()
                    passes.captured.close()
