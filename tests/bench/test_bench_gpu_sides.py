"""Sides of the GPU bench where there is no GPU: an emulated device, an engine on the CPU, a whole
run, and a side that takes too long."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from bench.gpu_device import DEPTH, THREADS, ReadMemory
from bench.gpu_engine import EngineSide
from bench.gpu_kernels import KernelBench, role_of
from bench.gpu_parts import Result
from bench.gpu_tests import measure_tests

from bench import gpu_kernels
from dflash_runtime.compute.gpu.layers.attention import AttentionDecodeArgs
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY
from support.processes import run_python
from support.random_models import write_qwen3moe

SLOW_SIDE = """
import threading, time
from bench.sides import Side, SideError
if __name__ == "__main__":
    with Side("slow", threading.Event, until_s=time.monotonic() + 30) as side:
        assert side.call("is_set") is False
        side.until_s = time.monotonic() + 0.2
        try:
            side.call("wait")
        except SideError as error:
            print(error)
"""


def test_a_side_that_takes_too_long_is_ended() -> None:
    done = run_python("-c", SLOW_SIDE)
    assert done.stdout == "slow did not answer in time and was ended\n"
    assert "threading.py" in done.stderr  # where it was


@pytest.mark.parametrize("lanes", [32, 64])
def test_memory_is_read_to_the_last_word(lanes: int) -> None:
    device = EmulatedDevice(lanes=lanes)
    num_bytes = 16 * THREADS * DEPTH * 3
    words = np.random.default_rng(0).integers(0, 1 << 32, num_bytes // 4, np.uint32)
    read = ReadMemory(device, num_bytes)
    read.launch(device.upload(words.view(np.uint8)))
    device.synchronize()
    total = device.download(read.sums).sum(dtype=np.uint32)
    assert total == words.sum(dtype=np.uint32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "tiny.gguf"
    return write_qwen3moe(path, TINY, seed=1, tensor_type="Q8_0")


def test_kernels_of_a_step_read_what_the_file_has(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "_STEPS", 2)
    monkeypatch.setattr(gpu_kernels, "_ROUNDS", 1)
    with contextlib.closing(KernelBench(tiny, EmulatedDevice(), context=40)) as bench:
        check_kernels(tiny, bench)


def check_kernels(tiny: Path, bench: KernelBench) -> None:
    launches = bench.launches(20)
    by_tensors = {each["reads"]: each for each in launches.values() if each["reads"]}
    sizes: dict[str, int] = {}
    for tensor in gguf.GGUFReader(tiny).tensors:
        role = role_of(tensor.name)
        sizes[role] = sizes.get(role, 0) + int(tensor.n_bytes)
    head = by_tensors["output"]
    assert head["count"] == 1
    assert head["weight_bytes"] == pytest.approx(sizes["output"], rel=0.5)  # rows are padded
    assert head["weight_bytes"] >= sizes["output"]
    down = by_tensors["ffn_down_exps"]
    assert down["count"] == TINY.num_layers
    share = TINY.num_experts_used / TINY.num_experts
    assert down["weight_bytes"] >= share * sizes["ffn_down_exps"]
    cache = by_tensors["keys + values"]["cache_bytes"]
    assert cache == 20 * TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 2
    assert by_tensors["token_embd"]["weight_bytes"] == 0  # one row
    # What is left out is not launched, and only while it is.
    label = next(each for each in launches if each.endswith("ffn_down_exps"))
    assert bench.step_s(20) > 0
    assert bench.step_s(20, label) > 0
    assert bench.launches(20) == launches


def test_addresses_are_found_within_structures() -> None:
    args = AttentionDecodeArgs(positions=5)
    args.cache.keys, args.rows.queries = 7, 9
    assert sorted(gpu_kernels.pointers(args)) == [5, 7, 9]


def test_an_engine_is_timed_and_writes_the_same_text_each_time(tiny: Path) -> None:
    ids = [position % TINY.vocab_size for position in range(60)]
    with contextlib.closing(EngineSide(tiny, device="cpu", context=200)) as side:
        assert side.opened()["kv_type"] == "f16"
        text = side.text(ids, 5)
        assert len(text) == 5
        assert side.prefill(ids) > 0
        assert side.decode(ids, 4) > 0
        assert side.decode(ids, 4, 0.8) > 0
        assert side.text(ids, 5) == text
        assert side.logits(ids).shape == (TINY.vocab_size,)
        assert side.owners()


def test_tests_that_fail_or_take_too_long_are_said(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest, time\n"
        "@pytest.mark.gpu\ndef test_right(): pass\n"
        "@pytest.mark.gpu\ndef test_wrong(): assert False\n"
        "def test_of_the_host(): assert False\n"
    )
    result: Result = {"errors": []}
    with pytest.raises(RuntimeError, match=r"^tests failed: 1 failed, 1 passed, 1 deselected"):
        measure_tests(result, time.monotonic() + 60, tests=[str(file)])
    assert next(line.partition(" - ")[0] for line in result["failures"]).endswith("test_wrong")
    measure_tests(result, time.monotonic() + 60, tests=[f"{file}::test_right"])
    assert result["summary"].startswith("1 passed")
    file.write_text("import pytest, time\n@pytest.mark.gpu\ndef test_slow(): time.sleep(60)\n")
    with pytest.raises(RuntimeError, match="took too long"):
        measure_tests(result, time.monotonic() + 2, tests=[str(file)])


@pytest.mark.slow
@pytest.mark.e2e
def test_a_whole_run_without_a_gpu(tiny: Path) -> None:
    done = run_python(
        *("-m", "bench.gpu", "--model", str(tiny), "--device", "cpu", "--peer", "none"),
        *("--parts", "resident", "kernels", "split-cpu", "--contexts", "16", "--prompts", "12"),
        *("--tokens", "4", "--rounds", "2"),
    )
    assert done.returncode == 1, done.stderr  # kernels need a GPU
    assert "cpu is not a GPU" in done.stdout
    assert "5 of 5" in done.stdout
    assert "decode at 16: ours" in done.stderr
