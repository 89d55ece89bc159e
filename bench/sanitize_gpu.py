"""compute-sanitizer on every GPU kernel: memcheck and racecheck, one format and size each.

What runs a kernel is a test of it, whose emulated device is replaced by a real one with poisoned
results (tests/support/on_gpu.py), so that results are checked as well. First each test runs without
the tool, which compiles its kernels; then file by file with it, the file's own kernels instrumented
and no others. Two kernels with mistakes show that the tool sees them. Exit status: 0 if nothing is
found.

Examples:
  python -m bench.sanitize_gpu --save
  python -m bench.sanitize_gpu --file gemm_down.cu --tool racecheck
  python -m bench.sanitize_gpu --rehearse
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from bench.machine import ROOT
from bench.options import NOTHING, add_save_option, bench_parser
from bench.sanitize_cases import CASES

from bench import report
from dflash_protocol.device import DeviceKind
from dflash_protocol.settings import child_environment
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.gpu.device.devices import describe_gpus
from dflash_runtime.compute.gpu.device.kernel_sources import kernel_source

_TESTS = ROOT / "tests/runtime/compute/gpu"

_SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
_MISTAKES = {"memcheck": "writes_behind", "racecheck": "misses_a_barrier"}
_LAUNCHED = re.compile(r"^launched (\S+) (\w+)$", re.MULTILINE)
_KERNEL = re.compile(r"^KERNEL\((\w+),", re.MULTILINE)
_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_FOUND = 9
"""Exit status of the tool when it has found something and the program has ended well."""
_FIRST_PORT, _PORTS_EACH = 50000, 10
_SHOWN_LINES = 25


@dataclass(frozen=True)
class Run:
    """One program's end. `count` is what the tool has found, None if it has said nothing."""

    status: int
    output: str
    seconds: float
    count: int | None = None

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-_SHOWN_LINES:])


@dataclass
class File:
    """One kernel file, and what was found."""

    name: str
    kernels: tuple[str, ...] = field(init=False)
    runs: dict[str, Run] = field(default_factory=dict)
    """By tool."""
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kernels = kernels_of(self.name)


def kernels_of(file: str) -> tuple[str, ...]:
    """Kernels that a file defines, or a header that it includes."""
    source = kernel_source(file)
    texts = (source.text, *(text for _, text in source.headers))
    return tuple(dict.fromkeys(name for text in texts for name in _KERNEL.findall(text)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--file", action="append", choices=sorted(CASES), help="only this one")
    parser.add_argument("--tool", action="append", choices=sorted(_SUMMARY), help="only this one")
    parser.add_argument("--jobs", type=int, default=max(1, len(usable_cores()) - 2))
    parser.add_argument("--limit-s", type=float, default=90.0, help="of each run")
    add_save_option(parser)
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="only run the tests, in the emulation: no GPU needed",
    )
    given = parser.parse_args(arguments)
    if not given.rehearse and (why_none := describe_gpus(DeviceKind.CUDA)[1]) is not None:
        raise SystemExit(f"there is no GPU to run on: {why_none}")
    began_s = time.monotonic()
    files = [File(name) for name in given.file or sorted(CASES)]
    with ThreadPoolExecutor(given.jobs) as pool:
        try_out = partial(_try_out, is_emulated=given.rehearse, limit_s=given.limit_s)
        for each in pool.map(try_out, files):
            _tell(each, "; ".join(each.problems) or "results are right")
    tools = given.tool or sorted(_SUMMARY)
    if not given.rehearse:
        _sanitize(files, tools, num_jobs=given.jobs, limit_s=given.limit_s)
        if given.save != NOTHING:
            _save(files, tools, given.save)
    num_bad = sum(bool(each.problems) for each in files)
    print(f"{len(files) - num_bad} of {len(files)} files clean, {time.monotonic() - began_s:.0f} s")
    return min(num_bad, 1)


def _try_out(file: File, *, is_emulated: bool, limit_s: float) -> File:
    """Run a file's tests without any tool: whether they pass, and launch all of its kernels."""
    run = _run(_tests(CASES[file.name], is_emulated=is_emulated), limit_s)
    launched = {kernel for name, kernel in _LAUNCHED.findall(run.output) if name == file.name}
    if run.status:
        file.problems.append(f"tests failed: {run.status}\n{run.tail}")
    elif missing := sorted(set(file.kernels) - launched):
        file.problems.append(f"not launched: {', '.join(missing)}")
    return file


def _sanitize(files: list[File], tools: Sequence[str], *, num_jobs: int, limit_s: float) -> None:
    """Raises: SystemExit if the tool is not there, or does not see mistakes that are there."""
    sanitizer = _sanitizer()
    ports: SimpleQueue[int] = SimpleQueue()
    for number in range(num_jobs):
        ports.put(_FIRST_PORT + _PORTS_EACH * number)

    def check(tool: str, kernels: Iterable[str], command: list[str]) -> Run:
        port = ports.get()
        try:
            wrapped = _with_tool(sanitizer, tool, kernels, port=port)
            return _run([*wrapped, *command], limit_s, summary=_SUMMARY[tool])
        finally:
            ports.put(port)

    def check_file(file: File) -> File:
        command = _tests(CASES[file.name], is_emulated=False)
        for tool in tools:
            run = file.runs[tool] = check(tool, file.kernels, command)
            if run.count or run.status or run.count is None:
                found = "no summary" if run.count is None else f"{run.count} found"
                file.problems.append(f"{tool}: {found}, status {run.status}\n{run.tail}")
        return file

    with ThreadPoolExecutor(num_jobs) as pool:
        mistakes = {
            tool: pool.submit(check, tool, (name,), [sys.executable, "-m", "support.on_gpu", name])
            for tool, name in _MISTAKES.items()
            if tool in tools
        }
        for each in pool.map(check_file, files):
            words = ", ".join(
                f"{tool} {run.count} found in {run.seconds:.0f} s"
                for tool, run in each.runs.items()
            )
            _tell(each, "\n".join((words, *each.problems)))
        for tool, future in mistakes.items():
            if not (run := future.result()).count:
                raise SystemExit(f"{tool} does not see what {_MISTAKES[tool]} does\n{run.tail}")


def _tell(file: File, words: str) -> None:
    print(f"{file.name:24s} {words}", flush=True)


def _sanitizer() -> str:
    name = "compute-sanitizer"
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PLACES))
    if found is None:
        raise SystemExit(f"{name} is neither in PATH nor in {', '.join(_PLACES)}")
    return found


def _with_tool(sanitizer: str, tool: str, kernels: Iterable[str], *, port: int) -> list[str]:
    """The beginning of a command: only these kernels are instrumented."""
    filters = [word for kernel in kernels for word in ("--kernel-name", f"kne={kernel}")]
    return [
        *(sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "10"),
        *("--target-processes", "application-only", "--port", str(port)),
        *("--launch-timeout", "60", *filters),
    ]


def _tests(names: Iterable[str], *, is_emulated: bool) -> list[str]:
    """Runs these tests wherever pytest and hypothesis are, installed or not."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)),
        *("--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore"),
        *("-p", "support.on_gpu", *(["--like-a-gpu"] if is_emulated else [])),
        *(f"{_TESTS / name}" for name in names),
    ]


def _run(command: list[str], limit_s: float, *, summary: re.Pattern[str] | None = None) -> Run:
    """Run a program and whatever it starts, until its deadline."""
    sources = ("protocol", "adapters", "daemon", "runtime", "tests", ".")
    began_s = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(tuple(ROOT / name for name in sources)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\nended after {limit_s:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    found = summary.findall(output) if summary is not None else []
    return Run(
        status=process.returncode,
        output=output,
        seconds=time.monotonic() - began_s,
        count=int(found[-1]) if found else None,
    )


def _save(files: list[File], tools: Sequence[str], how: str) -> None:
    record = report.head("compute-sanitizer on every GPU kernel")
    record["gpu"] = _gpu_name()
    record["files"] = [
        {
            "file": each.name,
            "kernels": each.kernels,
            "tests": CASES[each.name],
            "problems": each.problems,
            **{
                tool: {"found": run.count, "status": run.status, "seconds": round(run.seconds, 1)}
                for tool, run in each.runs.items()
            },
        }
        for each in files
    ]
    columns = ["kernel file", "kernels", *(part for tool in tools for part in (tool, "s"))]
    rows = [
        [
            each.name,
            str(len(each.kernels)),
            *(
                part
                for tool in tools
                for part in (str(each.runs[tool].count), f"{each.runs[tool].seconds:.0f}")
            ),
        ]
        for each in files
    ]
    report.save("sanitize-gpu", record, report.table(columns, rows), how)


def _gpu_name() -> str:
    found, _ = describe_gpus(DeviceKind.CUDA)
    return found[0].name


if __name__ == "__main__":
    sys.exit(main())
