"""Opens a model within a GPU's budget: what it says and computes, and what it was to take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import Device
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.devices import VENDORS, DeviceMemory, describe_gpus
from dflash_runtime.compute.gpu.device.driver import open_driver
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.split import LOCAL_OWNER
from support.planned_gpu import install_planned_gpu
from support.undisturbed import settings_with

KV_TYPE = KvType.F16
NUM_TOKENS = 4
SETTLE_S = 0.005
"""A watching process has looked at least once."""


@dataclass(frozen=True)
class Opened:
    """How an opening went."""

    refusal: str = ""
    """The line with which it was refused."""
    num_here: int = 0
    """Experts on the GPU."""
    predicted_bytes: int = 0
    """Of the GPU, the driver's context included."""
    logits: F32Array | None = None
    """Shape: [T, vocabulary]; None if it was refused."""


def open_within(
    path: Path, device: Device, *, context: int, chunk: int, prompt: Sequence[int]
) -> Opened:
    """Open a model with whatever is free, and use it: prompts, steps, a tree, logits.

    `chunk` is the backend's where no plan chooses it.
    Raises: any error but the refusal of a plan.
    """
    settings = replace(
        settings_with(check_replies=0), device=device, context=context, kv_type=KV_TYPE.value
    )
    try:
        engine = Engine.open(path, settings=settings)
    except SettingsError as error:
        return Opened(str(error))
    with engine:
        list(engine.generate(prompt, NUM_TOKENS, ignore_eos=True))
        engine.prefill(prompt)
        engine.verify(prompt[:8], [-1, *range(7)])
        engine.accept([0])
        logits = engine.logits(prompt)
        owners = dict(zip(engine.placement.owner_names, engine.placement.owners, strict=True))
        here = (
            {layer: ids.size for layer, ids in owners[LOCAL_OWNER].by_layer.items()}
            if LOCAL_OWNER in owners
            else {}
        )
        plan = engine.plan
        copies = plan is not None and bool(plan.prompts_here)
        if plan is not None:
            chunk = plan.setup.chunk
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        found = footprint(file, spec, Memory.GPU)
    missing = {
        each.layer_id: each.num_experts - here.get(each.layer_id, 0) for each in spec.moe.layers
    }
    needs = found.needs(
        num_positions=context, kv_type=KV_TYPE, chunk=chunk,
        num_remote_layers=sum(map(bool, missing.values())),
    )  # fmt: skip
    predicted = needs.total + found.experts_bytes(here)
    if copies:
        predicted += found.offload_bytes(missing)
    return Opened("", sum(here.values()), predicted, logits)


@dataclass(frozen=True)
class Case:
    """`free_bytes` of the GPU; None: all that is free."""

    path: Path
    free_bytes: int | None


def memory_there(gpu: Device) -> DeviceMemory:
    """As plans find it."""
    return describe_gpus(gpu.kind)[0][gpu.index].memory


def run_cases(
    cases: Sequence[Case], device: Device, options: dict[str, Any], pipe: Connection
) -> None:
    """In a process of its own: for each case take the rest of a real GPU's memory, and open.

    Tells how much was taken before each case, and the result after it; waits for an answer to both.
    """
    driver = open_driver(VENDORS[device.kind])

    def tell(told: object) -> None:
        time.sleep(SETTLE_S)
        pipe.send(told)
        pipe.recv()

    try:
        for case in cases:
            driver.use(device.index)
            ballast, taken = 0, 0
            if case.free_bytes is not None:
                taken = max(0, driver.memory_info()[0] - case.free_bytes)
                ballast = driver.export_memory(taken)[0] if taken else 0
            tell(taken)
            with pytest.MonkeyPatch.context() as patch:
                install_planned_gpu(patch, [device], lambda: memory_there(device))
                found = open_within(case.path, device, **options)
            tell(found)
            driver.use(device.index)
            if ballast:
                driver.free(ballast)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def error_of(found: Opened, expected: F32Array) -> float:
    """The largest error relative to the largest logit; but for one in a hundred tokens, for which
    two experts may be so nearly alike that another arithmetic chooses the other one."""
    assert found.logits is not None
    errors = np.sort(np.abs(found.logits - expected).max(axis=1))
    return float(errors[-1 - len(errors) // 100] / np.abs(expected).max())
