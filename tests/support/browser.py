"""A headless Chromium, driven through its DevTools protocol over two pipes: no port, no library."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.processes import START_S, wait_until

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_INSTALL_S = 150.0
_CALL_S = 30.0
# Chromium reads from descriptor 3 and writes to 4, which Popen cannot give to a child.
_PUT_PIPES = """
import fcntl, os, sys
apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in ({0}, {1})]
os.dup2(apart[0], 3)
os.dup2(apart[1], 4)
os.execv(sys.argv[1], sys.argv[1:])
"""
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-sync",
)


def chromium_program() -> str:
    """Path of a Chromium, which is installed if possible; otherwise skips the test."""
    if program := _found():
        return program
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        pytest.skip("no Chromium here, and only root with apt-get can install one")
    command = [apt, "--yes", "-o", "DPkg::Lock::Timeout=60"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    end_s = time.monotonic() + _INSTALL_S
    for step in (["update"], ["install", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(
                [*command, *step],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(1.0, end_s - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"apt-get {step[0]} took longer than {_INSTALL_S:.0f} s")
        if done.returncode:
            pytest.skip(f"apt-get {step[0]} failed: {done.stderr.strip()[-200:]}")
    program = _found()
    assert program is not None, "apt-get installed chromium, but there is none"
    return program


def _found() -> str | None:
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


class Page:
    """The only page of a browser. `complaints` are the errors and warnings so far."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._rest = b""
        self._num_calls = 0
        self._session = ""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command of the protocol. Fails the test if the command fails."""
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + _CALL_S
        while (answer := self._next_message(end_s)).get("id") != self._num_calls:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Fails the test on a timeout."""
        # An element would arrive as an empty value, which is false here.
        wait_until(lambda: self.evaluate(f"Boolean({expression})"), expression)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def look(self, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the window's size and the colour scheme, light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")

    def type(self, selector: str, text: str) -> None:
        """Type into a field, as a keyboard does."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            keys: Mapping[str, Any] = {"type": kind, "key": key, "code": key, "text": text}
            self.call("Input.dispatchKeyEvent", **keys)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a position in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _next_message(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._answers, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(json.dumps(details)[:500])
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error" | "warning"}}:
                self.complaints.append(json.dumps(event["params"]["args"])[:500])


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A page of a new browser with its files in `profile`; the browser ends with the block."""
    program = chromium_program()
    flags = [*_FLAGS, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # the sandbox does not work as root
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    with contextlib.ExitStack() as undo:
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _PUT_PIPES.format(commands_out, answers_in),
                    program,
                    *flags,
                ],
                pass_fds=(commands_out, answers_in),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            undo.callback(_end, process)
        finally:
            os.close(commands_out)
            os.close(answers_in)
            # Registered last, so closed first: that ends the browser.
            undo.callback(os.close, commands_in)
            undo.callback(os.close, answers_out)
        yield Page(commands_in, answers_out)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=START_S / 3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=START_S)
