"""The idle part of the GPU bench: a parent and its daemon on CPUs, and what nvidia-smi may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.gpu_idle import gpu_use

from support.emulated_gpu import TINY
from support.processes import run_python
from support.random_models import write_qwen3moe

IDLE = """
import json, sys, time
from pathlib import Path
from bench import gpu_idle
from bench.gpu_split import SPLITS, Place, SplitWork
if __name__ == "__main__":
    gpu_idle._SETTLE_S, gpu_idle._IDLE_S = 0.5, 1.5
    result = {"errors": []}
    gpu_idle.measure_idle(
        result,
        time.monotonic() + 120,
        split=SPLITS["split-cpu"],
        place=Place(Path(sys.argv[1]), "cpu", ["cuda:1"]),
        work=SplitWork(context=16, prompt=12, num_tokens=4, rounds=2),
    )
    print(json.dumps(result))
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_parent_and_its_daemon_are_watched_while_they_wait(tmp_path: Path) -> None:
    model = write_qwen3moe(tmp_path / "tiny.gguf", TINY, seed=1, tensor_type="Q8_0")
    done = run_python("-c", IDLE, str(model))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["cpu_percent"]) == ["parent", "daemon 1"]
    assert 0 <= max(result["cpu_percent"].values()) < 50  # neither spins
    assert result["largest"] == {"CPU of a process": max(result["cpu_percent"].values())}
    assert result["gpu_percent"] == {"cpu": None}
    assert 1.5 <= result["seconds_idle"] < 30


def vendor_tool(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_use_of_gpus_is_known_where_the_vendor_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    devices = ["cuda:1", "cuda:0", "cpu", "hip:0", "cuda:2"]
    assert gpu_use(devices) == [None] * 5
    vendor_tool(tmp_path, "echo '0, 0'; echo '1, 97'; echo '2, [N/A]'")
    assert gpu_use(devices) == [97.0, 0.0, None, None, None]
    vendor_tool(tmp_path, "echo 'No devices were found'; exit 6")
    assert gpu_use(devices) == [None] * 5
