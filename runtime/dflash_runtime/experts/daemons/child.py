"""A daemon that is our child process: exec'd, watched, and never left behind.

The child ends when the write end of its life-line pipe, which we hold, is closed, even if we are
killed; besides, it asks the kernel to end it with the thread that spawned it. Used within the
supervisor's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess

from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DaemonUnavailable
from dflash_runtime.experts.daemons.link import Launch

_TERMINATE_S = 3.0
# docs: of a daemon: restore the whole file, look at the system's log for errors of the disk
_MEMORY_IS_GONE = ": the model's file was cut short while it was in use, or its disk failed"


class DaemonProcess:
    """One running child.

    Owns: the process, its pidfd, and the write end of its life-line pipe.
    Raises: DaemonUnavailable if it cannot be started.
    """

    def __init__(self, launch: Launch, endpoint: Endpoint) -> None:
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if endpoint.path is not None:
            # An ending daemon of an older version removes the empty folder, and does not make it.
            with contextlib.suppress(OSError):  # the daemon reports it better
                endpoint.path.parent.mkdir(mode=0o700, exist_ok=True)
        lifeline_read, self._lifeline_write = os.pipe()
        command = [
            *launch.command, "--listen", endpoint.address, "--lifeline-fd", str(lifeline_read)
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=launch.environment,
                pass_fds=(lifeline_read,),
                process_group=0,  # Ctrl-C goes to the parent alone, which ends its daemons
            )
        except OSError as error:
            os.close(self._lifeline_write)
            raise DaemonUnavailable(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            os.close(lifeline_read)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
            try:
                self._loop.add_reader(self._pidfd, self._reap)
            except OSError:
                os.close(self._pidfd)
                raise
        except OSError as error:
            os.close(self._lifeline_write)
            self._process.kill()
            self._process.wait()
            raise DaemonUnavailable(f"cannot watch {command[0]}: {error.strerror}") from error

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    @property
    def how_it_ended(self) -> str:
        """For people: ``ended with exit code 1`` or ``was ended by SIGKILL``."""
        code = self._process.returncode
        if code is not None and code < 0:
            named = {number.value: number.name for number in signal.Signals}
            signal_name = named.get(-code, f"signal {-code}")
            hint = _MEMORY_IS_GONE if -code == signal.SIGBUS else ""
            # docs: a signal ended the daemon: with SIGKILL often the kernel, for lack of memory
            # (`dmesg`). `… before it was ready, 3 times`: every attempt to start it ended so; give
            # it fewer experts. Required daemons get one attempt
            return f"was ended by {signal_name}{hint}"
        return f"ended with exit code {code}"

    @property
    def was_told_to_end(self) -> bool:
        """Whether it was ended from outside: by a signal, or by a request to stop (exit code 0).

        A shell in between reports a signal as an exit code from 129 on.
        """
        code = self._process.returncode
        return code is not None and (code <= 0 or 128 < code <= 128 + max(signal.valid_signals()))

    async def stop(self) -> None:
        """Terminate it, kill it after 3 s; returns when it has ended."""
        if self._lifeline_write >= 0:
            os.close(self._lifeline_write)
            self._lifeline_write = -1
        if not self.has_ended:
            self._process.terminate()
            try:
                async with asyncio.timeout(_TERMINATE_S):
                    await self.ended.wait()
            except TimeoutError:
                self._process.kill()
                await self.ended.wait()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.ended.set()
