"""Prices of a cache's steps, from a file of measured speeds."""

from __future__ import annotations

from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.device import parse_device
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.kv_cache import chosen_kv_type
from dflash_runtime.engine.measuring.layers import head_bytes
from dflash_runtime.placement.cache.prices import StepPrices, step_prices
from dflash_runtime.placement.cache.traces import TraceHeader
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.situation import (
    ExpertShares,
    ParentDevice,
    PlannedRequest,
    Situation,
)
from dflash_runtime.tools.doctor_measure import read_measured


def prices_of(path: Path, header: TraceHeader) -> StepPrices:
    """Of the GPU that `dflash-moe doctor --measure --json` has measured, with the model of a trace.

    Raises: SettingsError naming what is wrong with the file, or that it is of another model;
    ModelFileError, UnsupportedModel for the model that it was measured with.
    """
    measured = read_measured(path)
    gpus = [name for name in measured.box.devices if name != "cpu"]
    if not gpus:
        raise SettingsError(f"box {path}: no GPU was measured; a cache is in the memory of one")
    with GgufFile.open(measured.model) as file:
        spec, description = read_spec(file), describe(file)
        if (file.identity(), spec.moe.digest) != (header.identity, header.moe_digest):
            raise SettingsError(f"box {path}: it is of another model than the trace")
        parent = ParentDevice(parse_device(gpus[0]), 0, footprint(file, spec, Memory.GPU), ())
        situation = Situation(
            header.identity,
            spec,
            head_bytes(file, description),
            measured.box,
            (parent,),
            (),
            0,
            ExpertShares({}, {}),
        )
        kv_type, request = chosen_kv_type("auto", spec), PlannedRequest()
        middle = request.prompt + request.written // 2
        try:
            return step_prices(situation, parent, kv_type=kv_type, position=middle)
        except ValueError as error:
            raise SettingsError(f"box {path}: {error}") from None
