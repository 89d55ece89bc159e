"""``dflash-moe doctor --mailbox``: whether two devices, each in its own process, can use a mailbox,
in which memory, and how long a round trip takes.

Starts the second process (echo.py) as a daemon would be started. No model is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_protocol.device import Device, DeviceKind, parse_device
from dflash_protocol.errors import DaemonUnavailable, SettingsError, one_line
from dflash_protocol.process.output import noun
from dflash_protocol.ring.segment import MailTerms, create_segment
from dflash_protocol.settings import Settings, run_directory
from dflash_protocol.settings.kinds import Daemons, DaemonSetting, checked
from dflash_runtime.compute.mail_trial import (
    NO_FAULTS,
    TRIAL_GENERATION,
    FaultKind,
    Faults,
    MailTrial,
    Medium,
    TrialBatch,
    TripTimes,
)
from dflash_runtime.experts.daemons.launching import DaemonChoice, choose_daemon
from dflash_runtime.experts.daemons.supervisor import ProgressCallback

_READY_S = 120.0
"""Limit for the second process to be ready: it may have to compile its kernels."""
_STOP_S = 3.0
_LONGEST_PAUSE_US = 20.0
"""About two round trips, so that the sides meet in every order."""
_FIRST_BATCH, _LARGEST_BATCH = 16, 4096
_BATCH_S = 0.1
"""Batches grow until one takes this long; Ctrl-C takes effect between two."""
_LARGEST_OUTPUT = 1 << 16


_QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_BAR_WIDTH = 40
_NAMES = {
    FaultKind.WRONG: "words wrong",
    FaultKind.TORN: "words torn",
    FaultKind.STALE: "words stale",
    FaultKind.MISSING: "lines missing",
}


@dataclass(slots=True)
class MediumFindings:
    """Round trips through one kind of memory."""

    medium: Medium
    num_rounds: int = 0
    times: TripTimes = field(default_factory=TripTimes)
    """Times of round trips without pauses."""
    in_requests: Faults = NO_FAULTS
    """Faults found by the second device."""
    in_replies: Faults = NO_FAULTS
    """Faults found by the first device."""

    def add(self, batch: TrialBatch, num_rounds: int, *, is_timed: bool) -> None:
        """Add a batch of round trips."""
        self.num_rounds += num_rounds
        self.in_requests += batch.in_requests
        self.in_replies += batch.in_replies
        if is_timed:
            self.times.add(batch.trips_ns)

    def has(self, kind: FaultKind) -> bool:
        return any(faults.counts.get(kind, 0) for faults in (self.in_requests, self.in_replies))

    @property
    def num_faults(self) -> int:
        return self.in_requests.total + self.in_replies.total

    @property
    def quantiles_us(self) -> dict[str, float]:
        """Quantiles by name, and ``longest``, in µs."""
        found = {name: self.times.quantile_us(share) for name, share in _QUANTILES.items()}
        return {**found, "longest": self.times.longest_ns * 1e-3}


@dataclass(slots=True)
class MailboxFindings:
    """Findings for each kind of memory; `devices`: the asking one, the answering one."""

    devices: tuple[str, str]
    seed: int
    limit_ms: int
    """A line that takes longer counts as missing."""
    media: list[MediumFindings] = field(default_factory=list)
    why_no_device_memory: str = ""

    @property
    def problems(self) -> list[str]:
        """A line for each kind of memory and direction with faults."""
        found = []
        for medium in self.media:
            directions = (
                (*self.devices, medium.in_requests),
                (*self.devices[::-1], medium.in_replies),
            )
            for source, target, faults in directions:
                if faults.total:
                    found.append(f"{medium.medium}, {source} to {target}: {_faults_text(faults)}")
        return found

    @property
    def chosen(self) -> Medium | None:
        """The memory with the fastest median round trip, of those without faults."""
        sound = [each for each in self.media if not each.num_faults]
        return min(sound, key=lambda each: each.quantiles_us["p50"]).medium if sound else None

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "devices": self.devices,
                "seed": self.seed,
                "limit_ms": self.limit_ms,
                "media": [_medium_json(each) for each in self.media],
                "why_no_device_memory": self.why_no_device_memory or None,
                "chosen": self.chosen,
                "problems": self.problems,
            },
            allow_nan=False,
        )

    def as_text(self) -> str:
        """Text for people."""
        asks, answers = self.devices
        lines = [f"mailbox        {asks} asks, {answers} answers; seed {self.seed}", ""]
        for each in self.media:
            lines += [*_medium_lines(each), ""]
        if self.why_no_device_memory:
            lines += [f"{Medium.DEVICES:14s} cannot be used: {self.why_no_device_memory}", ""]
        lines += [f"problem        {problem}" for problem in self.problems]
        if self.chosen is not None:
            lines.append(
                f"faster         {self.chosen}: used if a parent measures the same at its start"
            )
        else:
            lines.append("No memory can be used for a mailbox.")
        return "\n".join(lines)


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
        mail.begin(segment, MailTerms(settings.step_limit_ms))
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


def _faults_text(faults: Faults) -> str:
    counts = ", ".join(f"{num:,} {_NAMES[kind]}" for kind, num in faults.counts.items() if num)
    first = faults.first
    if first is None:
        return counts
    what = "epoch" if first.kind is FaultKind.MISSING else "word"
    return (
        f"{counts}; the first in round {first.round_number}, line {first.line}, {what} "
        f"{first.word}: {first.found:#010x} instead of {first.expected:#010x}"
    )


def _medium_json(found: MediumFindings) -> dict[str, Any]:
    sides = {"requests": found.in_requests, "replies": found.in_replies}
    return {
        "medium": found.medium,
        "rounds": found.num_rounds,
        "timed": found.times.num_trips,
        "microseconds": found.quantiles_us,
        "histogram": found.times.rows(),
        "faults": {
            side: {kind.name.lower(): faults.counts.get(kind, 0) for kind in FaultKind}
            for side, faults in sides.items()
        },
    }


def _medium_lines(found: MediumFindings) -> list[str]:
    verdict = (
        f"{found.num_faults:,} {noun(found.num_faults, 'fault')}"
        if found.num_faults
        else "nothing wrong"
    )
    lines = [
        f"{found.medium:14s} {found.num_rounds:,} round trips, {verdict}; "
        f"{found.times.num_trips:,} of them without pauses, in µs:"
    ]
    lines.append("  " + ", ".join(f"{name} {us:.1f}" for name, us in found.quantiles_us.items()))
    rows = found.times.rows()
    most = max((count for *_, count in rows), default=0)
    for first_us, last_us, count in rows:
        if count:
            bar = "#" * max(1, round(_BAR_WIDTH * count / most))
            lines.append(f"  {first_us:10.1f} to {last_us:10.1f} {count:12,}  {bar}")
    return lines
