"""Steps whose remote experts the host asks for: nothing of a step gets into the next one, and no
memory stays mapped for a step that cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.routing import Gating, RoutingRule
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, Phase
from dflash_protocol.placement import LayerRouting
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import HostMapping, KernelDevice
from dflash_runtime.compute.gpu.layers.rows import Input
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice, RoutedRows
from dflash_runtime.compute.gpu.run.host_path import HostPath
from dflash_runtime.compute.gpu.run.step_path import capture_pieces
from dflash_runtime.compute.kv_cache import KvType
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY
from support.gpu_models import GpuModel
from support.random_models import write_qwen3moe

IS_HERE = np.arange(TINY.num_experts) < TINY.num_experts - 1


class LosesOwners:
    """The part of backend.MailedExperts that routes use; its owners are lost one after another, and
    compiled code cannot ask them."""

    num_owners, own_index, device_index, own_banks = 2, -1, 0, dict[int, Any]()
    asks_daemons = True

    def routing(self, layer_id: int) -> LayerRouting:
        ids = np.arange(TINY.num_experts, dtype=np.int32)
        owner_index = np.where(IS_HERE, 0, 1).astype(np.int32)
        return LayerRouting(owner_index, ids, sole_owner=None, is_identity=False)

    def ask_routes(self) -> None:
        """Compiled code can ask none of them."""

    def settle_with(self, settle: Any) -> None:
        pass

    def begin(
        self, layer_id: int, hidden: Any, topk_ids: I32Array, topk_weights: Any, **options: Any
    ) -> bool:
        return bool(IS_HERE[topk_ids].all())

    def finish(self, is_all_here: bool, out: F64Array) -> None:
        out.fill(0.0)
        if not is_all_here:
            out.fill(7.0)  # of an owner that was not lost
            raise DaemonUnavailable("the other one was lost")

    def local_experts_mask(self, layer_id: int) -> npt.NDArray[np.bool_]:
        return IS_HERE


def test_sums_of_a_step_that_failed_are_not_added_in_the_next(
    any_device: KernelDevice, tmp_path: Path
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    backend = CupyBackend(any_device, max_chunk=64, scratch_bytes=16 << 20)
    with GgufFile.open(path) as file:
        moe, ops = read_spec(file).moe, backend.ops
        resident: dict[int, Any] = {}
        for layer in moe.layers:
            bank = backend.load_experts(file, layer, np.arange(TINY.num_experts, dtype=np.int32))
            here = bank.by_global.only(any_device, IS_HERE)
            assert here is not None
            resident[layer.layer_id] = here
        remote: Any = LosesOwners()
        steps = HostPath(ops, moe, resident, remote=remote, check=lambda: None)

        def added(*expert_ids: int) -> F32Array:
            rows, residual = (ops.steps.rows(1, TINY.hidden_size) for _ in range(2))
            any_device.write(rows.array, np.ones((1, TINY.hidden_size), np.float32))
            any_device.write(residual.array, np.zeros((1, TINY.hidden_size), np.float32))
            choice = ExpertChoice(
                any_device.upload(np.array([expert_ids], np.int32)),
                any_device.upload(np.full((1, len(expert_ids)), 0.5, np.float32)),
                RoutingRule(len(expert_ids), Gating.SOFTMAX, normalise=True),
            )
            routed, experts = RoutedRows(Input(rows), choice), steps.experts(Phase.DECODE)
            for _ in experts(0, routed, residual):  # compiles and allocates
                pass
            any_device.write(residual.array, np.zeros((1, TINY.hidden_size), np.float32))
            pieces, _ = capture_pieces(any_device, experts(0, routed, residual))
            steps.replayed(pieces)()
            found: F32Array = any_device.download(residual.array)
            return found

        expected = added(0, 1)
        with pytest.raises(DaemonUnavailable):
            added(0, TINY.num_experts - 1)
        steps.begin(0)
        np.testing.assert_array_equal(added(0, 1), expected)
        any_device.synchronize()
        steps.close()
    backend.close()


@pytest.mark.parametrize("num_mapped", [0, 1, TINY.num_layers])
def test_a_step_that_cannot_be_made_leaves_no_memory_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_mapped: int
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    device = EmulatedDevice()
    remote: Any = LosesOwners()
    model = GpuModel(path, device, kv_type=KvType.F16)
    map_host = EmulatedDevice.map_host
    mapped: list[int] = []

    def failing(device: EmulatedDevice, array: AnyArray) -> HostMapping:
        if len(mapped) == num_mapped:
            raise DeviceUnavailable("no more memory can be locked")
        mapping = map_host(device, array)
        mapped.append(mapping.device_address)
        return mapping

    monkeypatch.setattr(EmulatedDevice, "map_host", failing)
    with pytest.raises(DeviceUnavailable, match="locked"):
        model.backend.captured_step(
            model.model, model.cache, model.banks, remote=remote, check=lambda: None
        )
    assert len(mapped) == num_mapped
    assert not device._range_bytes.keys() & set(mapped)
    model.close()
