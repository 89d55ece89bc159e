"""The memory that an engine takes of a GPU, against what its footprint predicts.

Each case is a process of its own: it opens an engine, computes prompts, decodes, verifies trees and
computes logits, while this one asks the driver, every few milliseconds, what is free. Nothing else
may use the GPU meanwhile.

  predicted  by purpose, from the file's metadata alone: placement/footprint.py
  peak       most that the driver gave the process, its context among it
  context    what it gave before the engine was opened
  pool       what arrays' pool holds of it at the end
  rest       the peak without both: compiled kernels, graphs, and the driver's own

Examples:
  python -m bench.gpu_memory --model q4_k_m --context 8192 32768 --local-experts 128 64
  python -m bench.gpu_memory --model olmoe demo --kv-type f16 q8_0 --chunk 4096 1024 --save
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu_parts import say
from bench.options import add_save_option, bench_parser
from bench.random_moe import MIXES, model_path
from bench.verify_tree import PARENTS

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import parse_device
from dflash_runtime import Engine
from dflash_runtime.compute import devices
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.chunk_room import MAX_CHUNK
from dflash_runtime.compute.gpu.device.devices import VENDORS
from dflash_runtime.compute.gpu.device.driver import Driver, open_driver
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.placement.footprint import Memory, footprint

_MIB = 1 << 20
_SAMPLE_S = 0.002
_SETTLE_S = 0.3
_DECODED = 64
_LOGITS = 600
_LIMIT_S = 400.0
_DEMO = "demo"


@dataclass(frozen=True)
class Case:
    """What is opened. `local_experts`: of each layer; the others are in a CPU daemon."""

    path: Path
    context: int
    chunk: int
    kv_type: str
    local_experts: int
    device: str

    def __str__(self) -> str:
        return (
            f"{self.path.stem} {self.context} {self.kv_type}, chunk {self.chunk}, "
            f"{self.local_experts} experts"
        )


class Watch:
    """The least free memory of a device since `begin`, sampled by a thread of its own."""

    def __init__(self, driver: Driver, index: int, *, sample_s: float = _SAMPLE_S) -> None:
        self._driver, self._index = driver, index
        self._sample_s = sample_s
        self._least = 0
        self._lock = threading.Lock()  # a sample that had begun before `begin` is not of after it
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def free(self) -> int:
        self._driver.use(self._index)
        return self._driver.memory_info()[0]

    def begin(self) -> None:
        with self._lock:
            self._least = self.free()

    @property
    def least(self) -> int:
        with self._lock:
            self._least = min(self._least, self.free())
            return self._least

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._sample_s):
            _ = self.least


def main() -> None:
    """Command line."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument(
        "--model", nargs="+", default=["q4_k_m"], help=f"{', '.join([*MIXES, _DEMO])}, or files"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--context", nargs="+", type=int, default=[8192])
    parser.add_argument("--chunk", nargs="+", type=int, default=[MAX_CHUNK])
    parser.add_argument("--kv-type", nargs="+", default=["f16"])
    parser.add_argument(
        "--local-experts", nargs="+", type=int, default=[1 << 20], help="of each layer; 0: none"
    )
    add_save_option(parser)
    options = parser.parse_args()
    cases = [
        Case(_path_of(model), context, chunk, kv_type, local_experts, options.device)
        for model, context, chunk, kv_type, local_experts in itertools.product(
            options.model, options.context, options.chunk, options.kv_type, options.local_experts
        )
    ]
    record = report.head("GPU memory, predicted and taken")
    record["cases"] = []
    device = parse_device(options.device)
    driver = open_driver(VENDORS[device.kind])
    driver.use(device.index)
    for case in cases:
        say(str(case))
        try:
            found = _measured(case, Watch(driver, device.index))
        except Exception as error:  # of one case: the others are measured
            found = {"error": str(error) or type(error).__name__}
            say(f"  {found['error']}")
        record["cases"].append({"case": str(case), **found})
        print(_table(record["cases"]), flush=True)
    report.finish("gpu-memory", record, _table(record["cases"]), options.save)


def _path_of(model: str) -> Path:
    if model == _DEMO:
        return demo_model_path()
    return model_path(model) if model in MIXES else Path(model)


def _measured(case: Case, watch: Watch) -> dict[str, Any]:
    """Run a case in a process of its own. Raises: RuntimeError if it fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_case, args=(case, theirs))
    before = watch.free()
    watch.begin()
    stages: dict[str, int] = {}
    result: dict[str, Any] = {}
    with watch.running():
        process.start()
        theirs.close()
        try:
            while "end" not in stages:
                if not ours.poll(_LIMIT_S):
                    raise RuntimeError(f"nothing came within {_LIMIT_S:.0f} s")
                stage, told = ours.recv()
                if stage == "error":
                    raise RuntimeError(told)
                stages[stage] = before - watch.least
                result |= told
                ours.send(None)
        except EOFError:
            raise RuntimeError("the process has ended") from None
        finally:
            process.join(30)
            if process.is_alive():
                process.kill()
    peak = max(stages.values())
    return {**result, "stages": stages, "peak": peak, "over": result["predicted"]["total"] - peak}


def _run_case(case: Case, pipe: Connection) -> None:
    """In the process of its own: tells the other after each stage, and waits for its answer."""

    def tell(stage: str, **told: Any) -> None:
        time.sleep(_SETTLE_S)
        pipe.send((stage, told))
        pipe.recv()

    try:
        _compute(case, tell)
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _compute(case: Case, tell: Any) -> None:
    device = parse_device(case.device)
    with GgufFile.open(case.path) as file:
        spec = read_spec(file)
        found = footprint(file, spec, Memory.GPU)
    local = {each.layer_id: min(each.num_experts, case.local_experts) for each in spec.moe.layers}
    num_remote = sum(local[each.layer_id] < each.num_experts for each in spec.moe.layers)
    kv_type = KvType(case.kv_type)
    needs = found.needs(
        num_positions=case.context,
        kv_type=kv_type,
        chunk=case.chunk,
        num_remote_layers=num_remote,
        num_daemons=min(1, num_remote),
    )
    predicted = {**needs.as_record(), "experts": found.experts_bytes(local)}
    predicted["total"] += predicted["experts"]
    open_driver(VENDORS[device.kind]).use(device.index)
    tell("context", predicted=predicted)
    backends: list[CupyBackend] = []

    def opened(device: Any, cache_dir: str | None, **options: int) -> Any:
        backends.append(CupyBackend(device, max_chunk=case.chunk, cache_dir=cache_dir))
        return backends[0]

    devices._open_gpu = opened
    engine = Engine.open(
        case.path,
        device=case.device,
        context=case.context,
        kv_type=case.kv_type,
        daemons=["cpu"] if num_remote else [],
        local_experts=case.local_experts if num_remote else None,
    )
    pool: Any = backends[0].device._memory._pool  # type: ignore[attr-defined]
    if backends[0]._offload is not None:
        missing = {
            each.layer_id: each.num_experts - local[each.layer_id] for each in spec.moe.layers
        }
        predicted["offload"] = found.offload_bytes(missing)
        predicted["total"] += predicted["offload"]
    tell("open", predicted=predicted, pool_opened=pool.total_bytes())
    longest = case.context - _DECODED - 1
    prompt = [(7 * index + 11) % spec.vocab_size for index in range(longest)]
    for length in {100, longest // 7, longest // 3, longest}:
        list(engine.generate(prompt[:length], 1, ignore_eos=True))
    tell("prompts")
    for temperature in (0.0, 0.8):
        list(
            engine.generate(
                prompt, _DECODED, temperature=temperature, ignore_eos=True, reuse_prefix=True
            )
        )
    tell("decode")
    engine.prefill(prompt[: longest // 2])
    for num_tokens in (8, 22, 64):
        parents = [*PARENTS, *range(len(PARENTS) - 1, 63)][:num_tokens]
        engine.verify(prompt[:num_tokens], parents)
        engine.accept([0])
    tell("trees")
    engine.logits(prompt[: min(_LOGITS, longest)])
    tell("logits", pool=pool.total_bytes(), pool_used=pool.used_bytes())
    engine.close()
    tell("end")


def _table(cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        if "error" in case:
            rows.append([case["case"], case["error"][:60], *[""] * 13])
            continue
        predicted, stages = case["predicted"], case["stages"]
        purposes = ("experts", "weights", "cache", "work", "recorded", "driver", "total")
        context, pool = stages["context"], case["pool"]
        rest = case["peak"] - context - pool
        rows.append(
            [
                case["case"] + (", offload" if "offload" in predicted else ""),
                *(_mib(predicted[name]) for name in purposes),
                _mib(case["peak"]),
                f"{_mib(case['over'])} ({100 * case['over'] / case['peak']:+.1f} %)",
                *map(_mib, (context, pool, rest)),
                " ".join(f"{name} {_mib(size)}" for name, size in stages.items()),
            ]
        )
    columns = (
        *("case", "experts", "weights", "cache", "work", "recorded", "driver", "predicted"),
        *("peak", "over", "context", "pool", "rest", "peak after"),
    )
    return report.table(columns, [row[: len(columns)] for row in rows])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f}"


if __name__ == "__main__":
    main()
