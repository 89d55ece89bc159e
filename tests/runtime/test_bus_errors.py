"""A process that is ended by SIGBUS says why, in one line, from whichever thread it was."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import START_S, environment

_READER = """
import mmap, os, sys, threading
from pathlib import Path
from dflash_runtime.bus_errors import explain_bus_errors

path = sys.argv[1]
explain_bus_errors("program", Path(path))
with open(path, "rb") as file:
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, 10)
print(mapping[5], flush=True)  # what is there still can be read
readers = [threading.Thread(target=lambda: print(mapping[90_000])) for _ in range(4)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
print("goes on")
"""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], r"program: error: {path}\b.*\bSIGBUS\b.*\n"),
        (["-X", "faulthandler"], None),
    ],
    ids=["ours", "faulthandler's"],
)  # fmt: skip
def test_one_line_is_said_and_the_process_ends_by_the_signal(
    tmp_path: Path, flags: list[str], says: str | None
) -> None:
    path = tmp_path / "cut\n.gguf"
    path.write_bytes(bytes(100_000))
    done = subprocess.run(
        [sys.executable, *flags, "-c", _READER, str(path)],
        env=environment(), capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "0\n"
    if says is None:
        assert done.stderr.startswith("Fatal Python error: Bus error")
    else:
        shown = str(path).replace("\n", "\\n")
        assert re.fullmatch(says.format(path=re.escape(shown)), done.stderr)
