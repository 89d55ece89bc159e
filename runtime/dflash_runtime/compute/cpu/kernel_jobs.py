"""Which kernels a file needs, by names that can be passed to another process.

A job compiles some kernels, or loads them if they are compiled already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.kernels import (
    attention_tasks,
    conv_tasks,
    delta_tasks,
    delta_tree,
    dense_tasks,
    experts_kernel,
    linear_kernel,
    recurrent_tiles,
    route_tasks,
)
from dflash_runtime.compute.cpu.kernels.attention_elements import element_functions
from dflash_runtime.compute.cpu.threads import parallel
from dflash_runtime.compute.cpu.weights.matrix import row_layout
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function
from dflash_runtime.compute.cpu.weights.rows import expand_function
from dflash_runtime.compute.kv_cache import KvType

_TYPE_JOBS: dict[str, Callable[[TensorType], object]] = {
    "rows": lambda tensor_type: row_layout(tensor_type, tensor_type.layout.block_elements),
    "expand": expand_function,
}
_CACHE_JOBS: dict[str, Callable[[KvType], object]] = {"elements": element_functions}

# The longest jobs come first, so that several processes end at about the same time.
_EXPERT_JOBS: dict[str, Callable[[], object]] = {
    "expert_tasks": experts_kernel.expert_ffn_tasks,
    "workers": lambda: (parallel.serve_kernel(), parallel.stop_kernel()),
    "expert_kernel": experts_kernel.expert_ffn_kernel,
    "quantise": quantise_function,
}
_DENSE_JOBS: dict[str, Callable[[], object]] = {
    "attend": attention_tasks.attend_task,
    "route": route_tasks.route_kernel,
    "attention": attention_tasks.attention_kernel,
    "store": attention_tasks.store_task,
    "norm": dense_tasks.norm_kernel,
    "rope": dense_tasks.rope_kernel,
    "gate": dense_tasks.gate_kernel,
    "linear_tasks": linear_kernel.linear_tasks,
    "linear_kernel": linear_kernel.linear_kernel,
    "embed": linear_kernel.embed_kernel,
}
_RECURRENT_JOBS: dict[str, Callable[[], object]] = {
    "tree": delta_tree.tree_kernel,
    "delta": delta_tasks.delta_kernel,
    "conv": conv_tasks.conv_kernel,
    "products": recurrent_tiles.products_function,
}


def jobs_for(
    tensor_types: Iterable[TensorType], kv_type: KvType | None, *, is_recurrent: bool = False
) -> list[str]:
    """Jobs for experts of these types; with a `kv_type`, for a whole model."""
    types = sorted(tensor_types)
    jobs = [*_DENSE_JOBS] if kv_type is not None else []
    jobs += _RECURRENT_JOBS if is_recurrent else ()
    jobs += [f"rows.{each.name}" for each in types]
    jobs += _EXPERT_JOBS
    if kv_type is not None:
        caches = sorted({kv_type.value, KvType.F32.value})
        jobs += [f"elements.{each}" for each in caches]
        jobs += [f"expand.{each.name}" for each in types]  # for the embedding table
    return jobs


def run_job(job: str) -> None:
    """Raises: KeyError for an unknown job."""
    kind, _, what = job.partition(".")
    if kind in _TYPE_JOBS:
        _TYPE_JOBS[kind](TensorType[what])
    elif kind in _CACHE_JOBS:
        _CACHE_JOBS[kind](KvType(what))
    else:
        (_DENSE_JOBS | _RECURRENT_JOBS | _EXPERT_JOBS)[kind]()
