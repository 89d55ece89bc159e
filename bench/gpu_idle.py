"""What a parent and its daemon use while they have nothing to do, after decode through the mailbox:
of the CPU each process by the kernel's count, of each GPU what nvidia-smi tells.

A GPU counts as used while any kernel runs on it, one that only waits included.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

import psutil
from bench.cpu_time import used_s
from bench.gpu_parts import Result, say
from bench.gpu_record import GPU_USE, IDLE_CPU, OURS
from bench.gpu_resident import prompt_of, random_ids, spec_of
from bench.gpu_split import Place, Split, SplitWork, open_split

from dflash_protocol.device import DeviceKind, parse_device

_SETTLE_S = 2.0
"""Longer than nvidia-smi looks back."""
_IDLE_S = 6.0
_INTERVAL_S = 1.0
_QUERY = ("nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")


def measure_idle(
    result: Result,
    until_s: float,
    *,
    split: Split,
    place: Place,
    work: SplitWork,
) -> None:
    """Fill `result` with percentages: of a core by process, of each GPU a few samples, and the
    largest of both, as goals have them.

    Raises: RuntimeError if a daemon ended in the pause, or the text is another after it.
    """
    context = prompt_of(random_ids(spec_of(place.path).vocab_size), work.context)
    devices = [place.device, *place.others[: split.num_others]]
    with open_split(split, place, context=work.positions, until_s=until_s) as side:
        result[OURS] = side.call("opened")
        text = side.call("text", context, work.num_tokens)
        pids = side.call("processes")
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        time.sleep(_SETTLE_S)
        before = {name: used_s(process) for name, process in processes.items()}
        started_s = time.monotonic()
        samples = _gpu_samples(devices, started_s + _IDLE_S)
        seconds = time.monotonic() - started_s
        cpu = {
            name: 100 * (used_s(process) - before[name]) / seconds
            for name, process in processes.items()
        }
        result |= {"seconds_idle": round(seconds, 2), "cpu_percent": cpu, "gpu_percent": samples}
        result["largest"] = {IDLE_CPU: max(cpu.values())}
        if known := [each for values in samples.values() for each in values or ()]:
            result["largest"][GPU_USE] = max(known)
        say(f"idle: {', '.join(f'{name} {each:.2f} %' for name, each in cpu.items())} of a core")
        say(f"idle: {', '.join(f'{name} {each}' for name, each in samples.items())} % of a GPU")
        result["owners"] = side.call("owners")
        if side.call("processes") != pids:
            raise RuntimeError("a daemon ended in the pause")
        if side.call("text", context, work.num_tokens) != text:
            raise RuntimeError("the text after the pause is another than before")


def gpu_use(devices: Sequence[str]) -> list[float | None]:
    """Utilisation of each device in percent; None if it cannot be read."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return [None] * len(devices)
    found = re.findall(r"^(\d+), (\d+)$", done.stdout, re.MULTILINE)
    by_index = {int(index): float(percent) for index, percent in found}
    asked = [parse_device(each) for each in devices]
    return [by_index.get(each.index) if each.kind is DeviceKind.CUDA else None for each in asked]


def _gpu_samples(devices: Sequence[str], until_s: float) -> dict[str, list[float] | None]:
    """Samples of each device until `time.monotonic` reaches a time; None if they cannot be read."""
    samples: dict[str, list[float]] = {name: [] for name in devices}
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _INTERVAL_S))
        for name, percent in zip(devices, gpu_use(devices), strict=True):
            if percent is not None:
                samples[name].append(percent)
    return {name: values or None for name, values in samples.items()}
