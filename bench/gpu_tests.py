"""The tests that need a GPU, as a part of the GPU bench: from a bare checkout, with pytest alone.

Knows nothing of what they test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.gpu_parts import Result
from bench.machine import ROOT

from dflash_protocol.settings import child_environment

_SOURCES = ("protocol", "adapters", "daemon", "runtime", "tests", ".")
TESTS = ("tests/runtime/compute/gpu", "tests/runtime/engine")
# The project's settings name plugins that a bare machine has not got.
_PYTEST = ("-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-W", "ignore")
_OPTIONS = ("-p", "no:cacheprovider", "-q", "-m", "gpu")


def measure_tests(result: Result, until_s: float, *, tests: Sequence[str] = TESTS) -> None:
    """Fill `result` with pytest's summary. Raises: RuntimeError naming what failed."""
    try:
        done: Any = subprocess.run(
            [sys.executable, "-m", "pytest", *_PYTEST, *_OPTIONS, *tests],
            cwd=ROOT,
            env=child_environment(tuple((ROOT / name).resolve() for name in _SOURCES)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=until_s - time.monotonic(),
        )
    except subprocess.TimeoutExpired as late:
        shown = (late.stdout or b"").decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"tests took too long, after: {' '.join(shown[-1:])}") from None
    lines = done.stdout.strip().splitlines()
    result["summary"] = lines[-1] if lines else ""
    result["failures"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        failures = "; ".join(result["failures"])
        raise RuntimeError(f"tests failed: {result['summary']} {failures}".strip())
