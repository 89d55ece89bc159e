"""The GPU backend on a whole model: checked, then timed, kernel by kernel.

A random model in the shape of Qwen3-30B-A3B, Q4_K_M, all experts on the device. Decode is a
recorded step replayed without the host in between; a kernel's time is what a step gains when that
kernel is left out of the recording, so that the times of a step add up to about the whole.

Examples:
  python -m bench.gpu --layers 12 --save
  python -m bench.gpu --model /dev/shm/whole.gguf --contexts 448 8192 32768
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench import random_moe, report

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.ops import KvType
from dflash_adapters.registry import adapter_for
from dflash_protocol.device import Device, parse_device
from dflash_protocol.ids import Phase
from dflash_runtime.compute.cupy.backend import CupyBackend
from dflash_runtime.compute.cupy.recorded_step import RecordedStep

_ROUNDS = 7
_STEPS = 64


class Model:
    """A file on a device, all of it."""

    def __init__(self, path: Path, device: Device, *, context: int) -> None:
        started_s = time.perf_counter()
        self.backend = CupyBackend(device)
        self.file = GgufFile.open(path)
        adapter = adapter_for(self.file)
        self.spec = adapter.read_spec(self.file)
        backend = self.backend
        self.model: Any = adapter.load(self.file, backend.ops)
        self.banks = {
            layer.layer_id: backend.load_experts(
                self.file, layer, np.arange(layer.num_experts, dtype=np.int32)
            )
            for layer in self.spec.moe.layers
        }
        backend.device.synchronize()
        self.load_s = time.perf_counter() - started_s
        self.cache = backend.ops.new_kv_cache(self.spec.kv_layers, context, KvType.F16)

    def recorded(self) -> RecordedStep:
        moe = self.backend.moe(self.banks, Phase.DECODE, None)
        return RecordedStep(self.backend.ops, self.model, self.cache, moe=moe)

    def prefill(self, num_tokens: int, first: int = 0) -> Any:
        """Hidden states after a chunk of random tokens."""
        ids = np.random.default_rng(first).integers(0, self.spec.vocab_size, num_tokens)
        positions = np.arange(first, first + num_tokens, dtype=np.int32)
        moe = self.backend.moe(self.banks, Phase.PREFILL, None)
        return self.model.forward(ids.astype(np.int32), positions, self.cache, moe)


def median_s(run: Callable[[], None], model: Model, *, rounds: int = _ROUNDS) -> float:
    """Median time of a run until the device is done, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        model.backend.device.synchronize()
        started_s = time.perf_counter()
        run()
        model.backend.device.synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def decode_s(model: Model, step: RecordedStep, context: int) -> float:
    """Time of a step at this context, steps started one after the other."""

    def run() -> None:
        step.begin(1, context)
        for _ in range(_STEPS):
            step.start()

    return median_s(run, model) / _STEPS


class LeftOut:
    """Leaves kernels of some names out of what is launched, and counts all."""

    def __init__(self, model: Model) -> None:
        device: Any = model.backend.device
        self._device = device
        self._launch = self._device.launch
        self.names: frozenset[str] = frozenset()
        self.counts: Counter[str] = Counter()
        self._device.launch = self

    def __call__(self, kernel: Any, grid: Any, block: int, args: Any, **options: Any) -> None:
        label = f"{kernel.name} {grid[0]}x{grid[1]}x{grid[2]} of {block}"
        self.counts[label] += 1
        if label not in self.names:
            self._launch(kernel, grid, block, args, **options)

    def close(self) -> None:
        del self._device.launch


def kernel_times(model: Model, context: int, whole_s: float) -> list[list[str]]:
    """What a step gains without each of its kernels."""
    left_out = LeftOut(model)
    try:
        step = model.recorded()
        step.begin(1, context)
        step.start()
        step.close()
        labels = {label: count // 2 for label, count in left_out.counts.items()}
        rows = []
        total_s = 0.0
        for label, count in labels.items():
            left_out.names = frozenset([label])
            step = model.recorded()
            gained_s = whole_s - decode_s(model, step, context)
            step.close()
            total_s += gained_s
            rows.append(
                [label, str(count), f"{gained_s * 1e6:.0f}", f"{gained_s / count * 1e6:.2f}"]
            )
        rows.append(["sum", "", f"{total_s * 1e6:.0f}", ""])
        rows.append(["whole step", "", f"{whole_s * 1e6:.0f}", ""])
    finally:
        left_out.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", type=Path, help="a file of that shape; written if not given")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--contexts", type=int, nargs="+", default=[448])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--kernels", action="store_true", help="time of each kernel, too")
    parser.add_argument("--save", action="store_true", help="keep the result in bench/results/")
    options = parser.parse_args()
    path = options.model or random_moe.MODELS / f"q4_k_m-{options.layers}.gguf"
    if not path.exists():
        random_moe.write(path, random_moe.MIXES["q4_k_m"], num_layers=options.layers)
    capacity = max(*options.contexts, *options.prefill) + 2 * _STEPS
    model = Model(path, parse_device(options.device), context=capacity)
    print(f"loaded in {model.load_s:.1f} s", flush=True)
    step = model.recorded()
    rows, record = [], {}
    for context in options.contexts:
        taken_s = decode_s(model, step, context)
        record[f"decode at {context}"] = 1 / taken_s
        rows.append([f"decode at {context}", f"{taken_s * 1e6:.0f} us", f"{1 / taken_s:.0f}"])
        print(rows[-1], flush=True)
    for num_tokens in options.prefill:
        taken_s = median_s(lambda n=num_tokens: model.prefill(n), model, rounds=3)  # type: ignore[misc]
        record[f"prefill {num_tokens}"] = num_tokens / taken_s
        rows.append(
            [f"prefill {num_tokens}", f"{taken_s * 1e3:.1f} ms", f"{num_tokens / taken_s:.0f}"]
        )
        print(rows[-1], flush=True)
    table = report.table(["", "time", "tokens/s"], rows)
    print(table)
    if options.kernels:
        context = options.contexts[0]
        whole_s = decode_s(model, step, context)
        kernels = report.table(
            ["kernel", "a step", "us a step", "us each"], kernel_times(model, context, whole_s)
        )
        print(kernels)
        table += "\n" + kernels
    if options.save:
        head = report.head("The GPU backend on a whole model")
        print(report.save("gpu", {**head, "tokens_per_s": record}, table))


if __name__ == "__main__":
    main()
