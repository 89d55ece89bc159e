"""The suite tests Ctrl-C wherever it was started."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.processes import START_S, environment

CODE = """
import signal, subprocess, sys
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
import conftest
look = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
subprocess.run([sys.executable, "-I", "-S", "-c", look], check=True)
exec(look)
"""


def test_interrupts_are_not_ignored_though_a_script_started_the_suite_in_the_background() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment(PYTHONUNBUFFERED="1"),
        # As a shell does for `make test &` in a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True\n" * 2, "")
