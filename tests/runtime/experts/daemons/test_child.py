"""Daemon processes of our own: started, watched, ended, whatever they do."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.settings import child_environment
from dflash_runtime.experts.daemons import child
from dflash_runtime.experts.daemons.child import DaemonProcess
from dflash_runtime.experts.daemons.link import Launch
from support.descriptors import no_descriptor_leak
from support.processes import environment, own_children

pytestmark = pytest.mark.asyncio

TIMEOUT_S = 20.0
ENDPOINT: Endpoint = parse_endpoint("ipc:///run/nowhere/cpu0")
PRELUDE = """
import os, signal, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
lifeline = int(options["--lifeline-fd"])
def say(text):
    with open(sys.argv[1], "w") as fifo:
        fifo.write(text)
"""


class Ear:
    """Hears what a process writes to a named pipe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "said"
        os.mkfifo(self.path)
        # Open for writing too, so that neither opening nor the end of a writer matters.
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    async def said(self) -> str:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._fd, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), TIMEOUT_S)
        finally:
            loop.remove_reader(self._fd)
        return os.read(self._fd, 4096).decode()

    def close(self) -> None:
        os.close(self._fd)


class Nursery:
    """Starts children that can say something, and ends what is left of them.

    Every child is told the path of a pipe before its own arguments.
    """

    def __init__(self, folder: Path) -> None:
        self._ear = Ear(folder)
        self._children: list[DaemonProcess] = []

    def start(
        self, code: str, *python_paths: Path, environment: Mapping[str, str] | None = None
    ) -> DaemonProcess:
        command = (sys.executable, "-S", "-c", PRELUDE + code, str(self._ear.path))
        if environment is None:
            environment = child_environment(python_paths)
        process = DaemonProcess(Launch(command, environment), ENDPOINT)
        self._children.append(process)
        return process

    async def said(self) -> str:
        """What a child says; waits for it."""
        return await self._ear.said()

    async def end(self) -> None:
        for process in self._children:
            await process.stop()
        self._ear.close()


@pytest_asyncio.fixture
async def nursery(tmp_path: Path) -> AsyncIterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    await nursery.end()


async def ended(process: DaemonProcess) -> str:
    await asyncio.wait_for(process.ended.wait(), TIMEOUT_S)
    assert process.has_ended
    return process.how_it_ended


async def assert_starts(nursery: Nursery) -> None:
    """The good child after a failure."""
    process = nursery.start("say('here')")
    assert await nursery.said() == "here"
    assert (await ended(process)).endswith("exit code 0")


async def test_a_child_is_told_its_endpoint_and_lifeline(nursery: Nursery) -> None:
    process = nursery.start("say(f'{options} {os.fstat(lifeline).st_mode:o}')")
    said = await nursery.said()
    assert f"'--listen': '{ENDPOINT.address}'" in said
    assert said.endswith(" 10600"), "the lifeline is a pipe"
    assert (await ended(process)).endswith("exit code 0")


async def test_a_child_has_our_environment_and_import_path_but_not_our_files(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    inheritable, other_end = os.pipe()
    os.set_inheritable(inheritable, True)
    try:
        nursery.start(
            "say('|'.join([os.environ['PYTHONPATH'], os.environ['OMP_WAIT_POLICY'],"
            " ','.join(sorted(os.listdir('/proc/self/fd')))]))",
            tmp_path,
        )
        python_path, policy, descriptors = (await nursery.said()).split("|")
    finally:
        os.close(inheritable)
        os.close(other_end)
    assert python_path == f"{tmp_path}:/inherited"
    assert policy == "passive"
    # Standard streams, the lifeline, and the folder that is being listed.
    assert len(descriptors.split(",")) == 5


async def test_a_child_that_is_given_an_environment_has_no_other(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/rocm/lib")
    given = {"ONLY": "this", "LC_ALL": "C.UTF-8"}
    nursery.start("say(repr(dict(os.environ)))", environment=given)
    assert ast.literal_eval(await nursery.said()) == given


async def test_a_child_is_out_of_reach_of_the_terminals_interrupt(nursery: Nursery) -> None:
    nursery.start("say(f'{os.getpid()} {os.getpgrp()}')")
    pid, group = (await nursery.said()).split()
    assert group == pid
    assert int(group) != os.getpgrp()


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(3)", r"\bexit code 3$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"\bSIGKILL$"),
        ("os.kill(os.getpid(), signal.SIGBUS)", r"\bSIGBUS\b.*\bfile\b"),
        ("os.kill(os.getpid(), 40)", r"\bsignal 40$"),
    ],
)
async def test_the_end_of_a_child_is_noticed_and_told(
    nursery: Nursery, code: str, how: str
) -> None:
    process = nursery.start(code)
    assert re.search(how, await ended(process))
    await process.stop()
    await assert_starts(nursery)


async def test_what_cannot_be_executed_is_unavailable_with_the_reason(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/nonexistent/interpreter\n")
    with no_descriptor_leak():
        for path, mode, reason in (
            (tmp_path / "nothing", None, "No such file or directory"),
            (script, 0o600, "Permission denied"),
            (script, 0o700, "No such file or directory"),
            (tmp_path, None, "Permission denied"),
        ):
            if mode is not None:
                path.chmod(mode)
            with pytest.raises(DaemonUnavailable, match=f"{path}.*{reason}"):
                DaemonProcess(Launch((str(path),), {}), ENDPOINT)
    await assert_starts(nursery)


async def test_stopping_a_child_lets_it_end_in_order(nursery: Nursery) -> None:
    process = nursery.start(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); say('ready'); signal.pause()"
    )
    assert await nursery.said() == "ready"
    await process.stop()
    assert process.how_it_ended.endswith("exit code 7")
    await process.stop()


async def test_a_child_that_ignores_being_asked_is_killed(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_TERMINATE_S", 0.1)
    process = nursery.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready')\nwhile True: signal.pause()"
    )
    assert await nursery.said() == "ready"
    started_s = time.monotonic()
    await process.stop()
    assert "SIGKILL" in process.how_it_ended
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    await assert_starts(nursery)


async def test_stopping_closes_the_lifeline(nursery: Nursery) -> None:
    process = nursery.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready')\n"
        "os.read(lifeline, 1); sys.exit(9)"
    )
    assert await nursery.said() == "ready"
    await process.stop()
    assert process.how_it_ended.endswith("exit code 9")


async def test_the_lifeline_of_one_child_does_not_hang_on_another(nursery: Nursery) -> None:
    """Nobody but us holds the write end, or a child would outlive us with its sibling."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); os.read(lifeline, 1)"
    first = nursery.start(ignore)
    assert await nursery.said() == "ready"
    second = nursery.start(ignore)
    assert await nursery.said() == "ready"
    await first.stop()
    assert first.how_it_ended.endswith("exit code 0")
    assert not second.has_ended
    await second.stop()
    assert second.how_it_ended.endswith("exit code 0")


async def test_a_stop_that_is_cancelled_can_be_completed(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = nursery.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready')\nwhile True: signal.pause()"
    )
    assert await nursery.said() == "ready"
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not process.has_ended
    monkeypatch.setattr(child, "_TERMINATE_S", 0.0)
    await process.stop()
    assert "SIGKILL" in process.how_it_ended


async def test_children_leave_no_zombies_and_no_descriptors(nursery: Nursery) -> None:
    await assert_starts(nursery)
    with no_descriptor_leak():
        for _ in range(5):
            process = nursery.start("raise SystemExit(0)")
            await ended(process)
            await process.stop()
        assert own_children() == []


async def test_a_child_ends_when_we_are_killed(tmp_path: Path) -> None:
    """The lifeline's other end closes with us, even if we cannot say goodbye."""
    ear = Ear(tmp_path)
    waits = "os.read(lifeline, 1); say('ended')"
    parent = (
        "import asyncio, sys\n"
        "from dflash_protocol.endpoint import parse_endpoint\n"
        "from dflash_runtime.experts.daemons.child import DaemonProcess\n"
        "from dflash_runtime.experts.daemons.link import Launch\n"
        "async def main():\n"
        f"    command = (sys.executable, '-S', '-c', {PRELUDE + waits!r}, {str(ear.path)!r})\n"
        "    child = DaemonProcess(Launch(command, {}), parse_endpoint('ipc:///run/x'))\n"
        "    print('started', flush=True)\n"
        "    await child.ended.wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await ear.said() == "ended"
    ear.close()
