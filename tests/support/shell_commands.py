"""Reads commands from the documents and runs them in a shell, as a reader would.

Only commands that run until they are ended (servers, daemons) are treated specially.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.processes import START_S

SHELLS = ("sh", "bash", "console")
"""Labels of fenced blocks with commands; indented blocks hold commands too."""
_CONTINUED = ("\\", "|", "&&")
_SERVES = re.compile(r"^\S*dflash-moe (serve|daemon)\b")
_STARTED = {"serve": "ready:", "daemon": "listening on"}


@dataclass(frozen=True)
class Command:
    """One command, possibly of several lines."""

    document: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


def commands_of(path: Path) -> Iterator[Command]:
    """All commands of a document, in order. Fails the test for a fenced block without a label."""
    fence: str | None = None
    begun: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            assert fence is not None or line != "```", f"{path.name}:{number}: say what it holds"
            fence = line[3:] if fence is None else None
            continue
        if fence in SHELLS:
            text = line
        elif fence is None and line.startswith("    ") and not line.lstrip().startswith("* "):
            text = line[4:]
        else:
            continue
        if not begun and (not text.strip() or text.startswith("#")):
            continue
        begun.append(text)
        if not text.rstrip().endswith(_CONTINUED):
            yield Command(path.name, number - len(begun) + 1, "\n".join(begun))
            begun = []
    assert not begun, f"{path.name}: {begun} goes on nowhere"


@dataclass
class Served:
    """A command that keeps running. `lines` is its output so far."""

    kind: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def end(self) -> int:
        """Send Ctrl-C. Returns the exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            return self.process.wait(timeout=START_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            if self.reader is not None:
                self.reader.join()


class Reader:
    """Runs one command after the other in a shell; `cd` persists.

    `places` maps paths and addresses in the documents to those of this machine. A server or daemon
    runs until `close`, or until the next server is started.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], places: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._places = places
        self._served: list[Served] = []

    def here(self, text: str) -> str:
        """A text of a document with this machine's paths and addresses."""
        for there, here in self._places.items():
            text = text.replace(there, here)
        return text

    def run(self, command: Command) -> str:
        """Run a command and return its output; a server's until it is ready. Fails the test if the
        command fails."""
        text = self.here(command.text)
        found = _SERVES.match(text)
        if found:
            return self._serve(command, text, found[1])
        with tempfile.NamedTemporaryFile("r") as where:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", f"set -e\n{text}\npwd > {where.name}"],
                cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=8 * START_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{text}\n{done.stdout}{done.stderr}"
            self._folder = Path(where.read().strip())
        return done.stdout + done.stderr

    def _serve(self, command: Command, text: str, kind: str) -> str:
        if kind == "serve":
            self._end("serve")
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}"],
            cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip
        served = Served(kind, process)
        served.reader = threading.Thread(target=self._read, args=(served,))
        served.reader.start()
        end_s = time.monotonic() + 2 * START_S
        while not any(_STARTED[kind] in line for line in list(served.lines)):
            if process.poll() is not None or time.monotonic() > end_s:
                served.end()
                pytest.fail("\n".join([str(command), text, *served.lines]))
            time.sleep(0.02)
        self._served.append(served)
        return "\n".join(served.lines)

    @staticmethod
    def _read(served: Served) -> None:
        assert served.process.stderr is not None
        with served.process.stderr as lines:
            served.lines.extend(line.rstrip("\n") for line in iter(lines.readline, ""))

    def _end(self, *kinds: str) -> None:
        going_on, self._served = self._served, []
        for served in going_on:
            if served.kind in kinds:
                code = served.end()
                assert code in (0, 130), (served.kind, code, served.lines)
            else:
                self._served.append(served)

    def close(self) -> None:
        """End all running commands, servers before the daemons that they use."""
        self._end("serve")
        self._end("daemon")
