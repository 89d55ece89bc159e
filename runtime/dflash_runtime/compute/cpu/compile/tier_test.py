"""Tests whether a tier's instructions work on this machine, in a child process.

LLVM aborts the process on an intrinsic that it cannot translate, and a CPU may lack what it claims
to have, so the test cannot run in this process. The verdict is kept with the compiled kernels until
LLVM, the CPU or the test changes.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray
from dflash_protocol.settings import cache_folder, child_environment
from dflash_runtime.compute.cpu.simd import tiles
from dflash_runtime.compute.cpu.simd.dots import Dots, Quants
from dflash_runtime.compute.cpu.simd.emitting import Vec, load, look_up
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier
from dflash_runtime.compute.cpu.simd.types import I8, I64, lanes_of
from dflash_runtime.compute.cpu.simd.untyped import ir, llvm

_PREFIX = "cpu-tier-"
_WORKS = "works"
_TIMEOUT_S = 60.0
_NUM_STEPS = 4
_BITS = (4, 8)
_TABLE = [255 - 16 * index for index in range(16)]
_STEP = lanes_of(I8, 64)


def why_not(tier: Tier, features: str, cache_dir: str | None = None) -> str | None:
    """Why the tier cannot be used with these features, briefly; None if it can. The verdict is kept
    in `cache_dir` (see `cache_folder`)."""
    if tier is Tier.AMX and not tiles.request_permission():
        return "the operating system does not permit tiles"
    try:
        job = json.dumps(_job(tier, features))
    except (TypeError, ValueError) as error:  # llvmlite no longer builds this IR
        return f"its test cannot be built: {error}"
    place = _place(tier, job, cache_dir)
    if place is not None:
        with suppress(OSError):
            kept = place.read_text()
            if kept:
                return None if kept == _WORKS else kept
    verdict = _run(job)
    if place is not None:
        with suppress(OSError):
            place.write_text(_WORKS if verdict is None else verdict)
    return verdict


def _place(tier: Tier, job: str, cache_dir: str | None) -> Path | None:
    """The verdict's file; None if there is no folder, which is reported with the kernels."""
    of = job, llvmlite.__version__, llvm.llvm_version_info, platform.release(), sys.executable
    digest = hashlib.sha256(repr(of).encode()).hexdigest()
    try:
        return cache_folder(cache_dir) / f"{_PREFIX}{tier}-{digest[:16]}"
    except SettingsError:
        return None


def _run(job: str) -> str | None:
    child = Path(__file__).with_name("tier_test_child.py")
    try:
        done = subprocess.run(
            [sys.executable, str(child)],
            input=job,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=child_environment(()),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its test could not be run: {error}"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return last if done.returncode > 0 else f"signal {-done.returncode}: {last}"


def _job(tier: Tier, features: str) -> dict[str, Any]:
    """A program, its input and expected output, as the child reads them."""
    generator = np.random.default_rng(0)
    weights = generator.integers(0, 256, (16, 4 * _NUM_STEPS), np.uint8)
    x = generator.integers(-127, 128, (16, 32), np.int8)
    weights[0], weights[1], x[:2] = 255, 128, 127  # the extremes
    stored_x = _repacked(x)
    expected = _expected_dots(tier, weights, x[:, : 4 * _NUM_STEPS])
    if tier is Tier.AMX:
        tokens = stored_x.reshape(16, 32)[:, : 4 * _NUM_STEPS]  # the same bytes in tile order
        products = tokens.astype(np.int64) @ weights.T.astype(np.int64)
        expected = np.concatenate([expected, products.reshape(-1)])
    return {
        "program": program_of(tier),
        "cpu": llvm.get_host_cpu_name(),
        "features": features,
        "weights": _repacked(weights).tobytes().hex(),
        "x": stored_x.tobytes().hex(),
        "expected": expected.astype("<i4").tobytes().hex(),
    }


def _repacked(rows: AnyArray) -> AnyArray:
    """Shapes: rows [16, k]; result [k / 4, 16, 4]."""
    return np.ascontiguousarray(rows.reshape(16, -1, 4).swapaxes(0, 1))


def _expected_dots(tier: Tier, weights: AnyArray, x: AnyArray) -> AnyArray:
    sums = []
    for bits in _BITS:
        as_used = weights.astype(np.int64) % (1 << bits)
        if Quants(bits).is_signed(tier):
            as_used = weights.view(np.int8).astype(np.int64)
        sums.append((as_used * x).sum(axis=1))
    found = np.array(_TABLE, np.uint8)[_repacked(weights).reshape(-1)[:64] & 15]
    return np.concatenate([*sums, found.view("<i4")])


def program_of(tier: Tier) -> str:
    """``program(weights, x, out)`` as LLVM IR, with a tier's intrinsics."""
    module = ir.Module("tier_test")
    module.triple = llvm.get_process_triple()
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
    function = ir.Function(module, kind, "program")
    builder = ir.IRBuilder(function.append_basic_block())
    _emit(builder, tier, *function.args)
    builder.ret_void()
    return str(module)


def _emit(builder: Any, tier: Tier, *addresses: Any) -> None:
    weights, x, out = (Vec(builder, argument) for argument in addresses)
    for index, bits in enumerate(_BITS):
        dots = Dots(builder, tier, Quants(bits))
        for step in range(_NUM_STEPS):
            quants = load(weights + 64 * step, _STEP)
            dots.add(quants & ((1 << bits) - 1), load(x + 64 * step, _STEP))
        dots.total().store(out + 64 * index)
    look_up(load(weights, _STEP) & 15, _TABLE, tier).store(out + 64 * len(_BITS))
    if tier is Tier.AMX:
        tiles.emit_permission(builder)
        tiles.emit_begin(builder)
        tiles.emit_product(builder, 2, 0, weights, x, out + 64 * (len(_BITS) + 1))
        tiles.emit_end(builder)
