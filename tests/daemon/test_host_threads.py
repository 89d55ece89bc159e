"""A daemon that was started by hand times the experts that it gets first, once for a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_daemon.host import ExpertHost
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu import backend as cpu_backend
from dflash_runtime.compute.topology import Core, Topology
from support.environments import cache_with_our_kernels
from support.random_models import ODD_SHAPES, write_qwen3moe


@pytest.mark.parametrize("num_threads", [None, 4])
def test_threads_are_timed_with_the_first_placement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_threads: int | None
) -> None:
    machine = Topology(tuple(Core((cpu,), 0, False) for cpu in range(4)), None)
    monkeypatch.setattr(cpu_backend, "read_topology", lambda: machine)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    model = write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=3)
    folder = cache_with_our_kernels(tmp_path / "c")
    backend = CpuBackend(num_threads=num_threads, cache_dir=str(folder))
    host = ExpertHost(model, backend, str(folder))
    try:
        for experts in ([0, 1], [1, 2]):
            layers = {layer.layer_id: experts for layer in host.spec.moe.layers}
            host.release(host.load(OwnedExperts.from_lists(layers)))
            num_kept = len(list(folder.glob("threads-*")))
            assert num_kept == (1 if num_threads is None else 0)
    finally:
        host.close()
