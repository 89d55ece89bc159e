"""Programs whose standard streams are closed, full, or read by nobody any more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.processes import START_S, environment

_PROGRAM = """
import logging, os, subprocess, sys
from dflash_protocol.process.startup import prepare_standard_streams

prepare_standard_streams()
logging.basicConfig(level=logging.INFO)
opened = os.open("/dev/zero", os.O_RDONLY)  # where a closed one was, anything of ours would be
for _ in range(3):
    print("a line", "x" * 70_000, file=sys.stderr)
    logging.info("a line of the log")
child = ["sh", "-c", "echo a line of a child >&2"]
subprocess.run(child, check=False)
print(opened > 2, repr(sys.stdin.read()), flush=True)
"""


def run(redirection: str, stderr: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", _PROGRAM],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
        text=True, timeout=START_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("redirection", ["", "2>/dev/full", "2>&-", "<&- 2>&-", "2>&1 1>&-"])
def test_what_stderr_does_not_take_is_dropped_and_its_place_is_taken_by_nothing(
    redirection: str,
) -> None:
    done = run(redirection, subprocess.PIPE)
    assert done.returncode == 0
    said = done.stdout if "2>&1" in redirection else done.stderr
    num_lines = 0 if "2>/" in redirection or "2>&-" in redirection else 3
    assert said.count("a line of the log") == said.count("a line x") == num_lines
    assert said.count("a line of a child") == bool(num_lines)
    if "1>&-" not in redirection:
        assert done.stdout == "True ''\n"


def test_a_log_that_nobody_reads_any_more_ends_no_program() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run("", writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stdout) == (0, "True ''\n")
