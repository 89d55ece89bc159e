"""A program that takes a GPU's memory: all that is free at once, and then more, as it gets it.

Example:
  python -m support.memory_taker 0 2147483648
"""

from __future__ import annotations

import sys
import time
from typing import Any

import cupy

_PIECE_BYTES = 64 << 20
_LEFT_BYTES = 32 << 20
_LIMIT_S = 120.0


def main() -> int:
    """Arguments: the GPU's index, and the bytes to take beyond those that are free. Prints "full",
    then "has SECONDS"; ends when a line is read."""
    index, more_bytes = map(int, sys.argv[1:3])
    runtime: Any = cupy.cuda.runtime
    runtime.setDevice(index)
    runtime.free(0)  # the context
    pieces = [runtime.malloc(max(1, runtime.memGetInfo()[0] - _LEFT_BYTES))]
    print("full", flush=True)
    begun_s = time.monotonic()
    while len(pieces) * _PIECE_BYTES <= more_bytes:
        try:
            pieces.append(runtime.malloc(_PIECE_BYTES))
        except runtime.CUDARuntimeError:
            if time.monotonic() > begun_s + _LIMIT_S:
                return 1
            time.sleep(0.01)
    print(f"has {time.monotonic() - begun_s:.2f}", flush=True)
    sys.stdin.readline()
    return 0


if __name__ == "__main__":
    sys.exit(main())
