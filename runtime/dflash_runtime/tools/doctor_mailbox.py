"""``dflash-moe doctor --mailbox``: whether two devices, each in its own process, can use a mailbox,
in which memory, and how long a round trip takes.

Starts the second process (echo.py) as a daemon would be started. No model is needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from dflash_protocol.device import Device, DeviceKind, parse_device
from dflash_protocol.errors import DaemonUnavailable, SettingsError, one_line
from dflash_protocol.process.output import noun
from dflash_protocol.ring.segment import create_segment
from dflash_protocol.settings import Settings, run_directory
from dflash_protocol.settings.kinds import Daemons, DaemonSetting, checked
from dflash_runtime.compute.mail_trial import TRIAL_GENERATION, FaultKind, MailTrial, Medium
from dflash_runtime.experts.daemons.launching import DaemonChoice, choose_daemon
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.tools.mailbox_findings import MailboxFindings, MediumFindings

_READY_S = 120.0
"""Limit for the second process to be ready: it may have to compile its kernels."""
_STOP_S = 3.0
_LONGEST_PAUSE_US = 20.0
"""About two round trips, so that the sides meet in every order."""
_FIRST_BATCH, _LARGEST_BATCH = 16, 4096
_BATCH_S = 0.1
"""Batches grow until one takes this long; Ctrl-C takes effect between two."""
_LARGEST_OUTPUT = 1 << 16


def try_mailbox(
    devices: tuple[str, str],
    settings: Settings,
    *,
    num_rounds: int,
    seed: int,
    on_progress: ProgressCallback,
) -> MailboxFindings:
    """Run the trial in each kind of memory that both devices see.

    Raises: SettingsError if no two devices are named, or one cannot be used; DflashError if one
    fails, or the second process does.
    """
    from dflash_runtime.compute import open_backend

    here, there = _chosen(devices, settings)
    with contextlib.ExitStack() as undo:
        backend = open_backend(here, cache_dir=settings.cache_dir)
        undo.callback(backend.close)
        mail, mover = backend.mail, backend.mover
        if mail is None or mover is None:
            raise SettingsError(f"device {here} cannot have a mailbox")
        folder = run_directory(settings)
        segment = create_segment(folder, mail.trial_shape, generation=TRIAL_GENERATION)
        undo.callback(segment.close)
        segment.open_window(mover)
        mail.begin(segment, settings.step_limit_ms)
        echo = undo.enter_context(_EchoProcess(there, settings, folder / segment.name))
        trial = mail.try_out(segment, seed=seed)
        undo.callback(trial.close)
        found = MailboxFindings((str(here), str(there.device)), seed, settings.step_limit_ms)
        try:
            trial.begin(_READY_S, echo.is_running)
            segment.unlink()
            found.why_no_device_memory = trial.why_not
            for medium in trial.media:
                found.media.append(_tried(trial, medium, num_rounds, on_progress))
        except DaemonUnavailable as error:
            reason, device = echo.why_ended() or str(error), str(there.device)
            told = reason if device in reason else f"{device}: {reason}"
            raise DaemonUnavailable(told) from error
    return found


def _chosen(devices: tuple[str, str], settings: Settings) -> tuple[Device, DaemonChoice]:
    """Raises: SettingsError if these are not two GPUs."""
    here = checked("--mailbox", devices[0], parse_device)
    assert isinstance(here, Device)
    setting = checked("--mailbox", devices[1], Daemons().from_item)
    assert isinstance(setting, DaemonSetting)
    there = choose_daemon(setting, 0, settings)
    for device in (here, there.device):
        if device.kind is DeviceKind.CPU:
            raise SettingsError(f"--mailbox: {device} is not a GPU; a mailbox joins two")
    if here == there.device:
        raise SettingsError(f"--mailbox: {here} is named twice, and a mailbox joins two GPUs")
    return here, there


def _tried(
    trial: MailTrial, medium: Medium, num_rounds: int, on_progress: ProgressCallback
) -> MediumFindings:
    """Trial batches in one kind of memory; every other one has random pauses and is not timed."""
    found, size, has_pauses = MediumFindings(medium), _FIRST_BATCH, False
    while found.num_rounds < num_rounds:
        size = min(size, num_rounds - found.num_rounds)
        began_s = time.monotonic()
        batch = trial.run(medium, size, longest_pause_us=_LONGEST_PAUSE_US if has_pauses else 0.0)
        elapsed_s = time.monotonic() - began_s
        found.add(batch, size, is_timed=not has_pauses)
        if found.has(FaultKind.MISSING):
            break  # lines may still be in flight
        stage = f"{found.num_rounds:,} of {num_rounds:,} round trips, "
        stage += f"{found.num_faults} {noun(found.num_faults, 'fault')}"
        on_progress(medium, stage, found.num_rounds, num_rounds)
        if elapsed_s < _BATCH_S:
            size = min(2 * size, _LARGEST_BATCH)
        has_pauses = not has_pauses
    return found


class _EchoProcess:
    """The second device's process; ended when the context is left.

    Owns: the process, the write end of its life-line, and the file of its stderr.
    """

    def __init__(self, choice: DaemonChoice, settings: Settings, segment: Path) -> None:
        """Raises: DaemonUnavailable if it cannot be started."""
        lifeline_read, self._lifeline_write = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        command = [
            str(choice.program),
            *(("-P", "-m", "dflash_daemon") if choice.is_python else ()),
            *("--echo", str(choice.device), str(segment), str(lifeline_read)),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=choice.environment(settings),
                pass_fds=(lifeline_read,),
                process_group=0,  # Ctrl-C goes to this process alone
            )
        except OSError as error:
            os.close(self._lifeline_write)
            self._stderr.close()
            raise DaemonUnavailable(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            os.close(lifeline_read)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def why_ended(self) -> str:
        """Its last line on stderr, or how it ended; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        self._stderr.seek(0)
        lines = self._stderr.read(_LARGEST_OUTPUT).decode(errors="replace").strip().splitlines()
        if lines and code > 0:
            return one_line(lines[-1].removeprefix("dflash-daemon: error: "))
        named = {-number.value: number.name for number in signal.Signals}
        return f"its process was ended by {named[code]}" if code in named else "its process ended"

    def __enter__(self) -> _EchoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lifeline_write)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
