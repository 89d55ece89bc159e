"""Steps whose remote experts the host asks for: nothing of a step gets into the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.ops import Gating, RoutingRule
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.layers.rows import Input
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice, RoutedRows
from dflash_runtime.compute.gpu.run.host_routes import HostRoutes
from support.emulated_gpu import TINY
from support.random_models import write_qwen3moe


class LosesOwners:
    """The part of backend.RemoteExperts that routes use; its owners are lost one after another."""

    def begin(self, layer_id: int, hidden: Any, *choice: Any, phase: Any) -> str:
        return "a ticket"

    def finish(self, ticket: str, out: F64Array) -> None:
        out.fill(7.0)  # of an owner that was not lost
        raise DaemonUnavailable("the other one was lost")

    def count_selections(self, layer_id: int, topk_ids: I32Array) -> None:
        pass

    def count_local(self, *args: Any, **counts: int) -> None:
        pass


def test_sums_of_a_step_that_failed_are_not_added_in_the_next(
    any_device: KernelDevice, tmp_path: Path
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    backend = CupyBackend(any_device, max_chunk=64, scratch_bytes=16 << 20)
    with GgufFile.open(path) as file:
        moe, ops = read_spec(file).moe, backend.ops
        is_here = np.arange(TINY.num_experts) < TINY.num_experts - 1
        resident: dict[int, Any] = {}
        for layer in moe.layers:
            bank = backend.load_experts(file, layer, np.arange(TINY.num_experts, dtype=np.int32))
            resident[layer.layer_id] = bank.by_global.only(any_device, is_here)
        remote: Any = LosesOwners()
        routes = HostRoutes(ops, moe, resident, remote=remote)

        def added(*expert_ids: int) -> F32Array:
            rows, residual = (ops.steps.rows(1, TINY.hidden_size) for _ in range(2))
            any_device.write(rows.array, np.ones((1, TINY.hidden_size), np.float32))
            any_device.write(residual.array, np.zeros((1, TINY.hidden_size), np.float32))
            choice = ExpertChoice(
                any_device.upload(np.array([expert_ids], np.int32)),
                any_device.upload(np.full((1, len(expert_ids)), 0.5, np.float32)),
                RoutingRule(len(expert_ids), Gating.SOFTMAX, normalise=True),
            )
            for host_work in routes.block(0, RoutedRows(Input(rows), choice), residual):
                assert host_work is not None
                host_work()
            found: F32Array = any_device.download(residual.array)
            return found

        expected = added(0, 1)
        with pytest.raises(DaemonUnavailable):
            added(0, TINY.num_experts - 1)
        routes.abandon()
        routes.reset()
        np.testing.assert_array_equal(added(0, 1), expected)
        any_device.synchronize()
        routes.close()
    backend.close()
