"""``dflash-moe doctor --mailbox`` between two emulated GPUs, each in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ring.segment import Segment, create_segment
from dflash_runtime.cli.main import main
from dflash_runtime.compute.gpu.mailbox.mail import TRIAL_LAYOUT
from dflash_runtime.compute.gpu.mailbox.parent import MailLink
from dflash_runtime.compute.mail_trial import TrialBatch
from dflash_runtime.compute.mailbox_layout import LINE_BYTES, LINES_AT, MailWord
from dflash_runtime.tools import doctor_mailbox
from support.emulated_device import EmulatedDevice
from support.emulated_device.peer_memory import EmulatedPeerMemory
from support.emulated_gpu import EmulatedGpus, install_emulated_gpus
from support.environments import write_launcher
from support.processes import START_S, environment, own_children, run_main, wait_until

pytestmark = pytest.mark.e2e

ROUNDS = 200
DAMAGED_LINE = 7
_BETWEEN_DAMAGES_S = 3e-4
"""Less than a round takes, and time for others."""
LIMIT_MS = 3000
"""Emulated devices and busy machines take their time."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    monkeypatch.setattr(EmulatedPeerMemory, "freed_while_open", [])
    return install_emulated_gpus(monkeypatch)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of daemons on emulated GPUs."""
    path = tmp_path_factory.mktemp("launcher") / "emulated"
    return write_launcher(path, Path(sys.executable), module="support.emulated_daemon")


def arguments(launcher: Path, *, num_rounds: int = ROUNDS, second: str = "cuda:1") -> list[str]:
    devices = ["--mailbox", "cuda:0", f"{second}@{launcher}"]
    limit = ["--ipc-step-limit-ms", str(LIMIT_MS)]
    return ["doctor", *devices, "--rounds", str(num_rounds), *limit]


def diagnosis(*given: str) -> tuple[int, dict[str, Any]]:
    done = run_main(main, *given, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@contextmanager
def repeated(damage: Any) -> Iterator[None]:
    """Again and again, while something else runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(_BETWEEN_DAMAGES_S):
            damage()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_every_word_arrives_in_every_memory(gpus: EmulatedGpus, launcher: Path) -> None:
    code, found = diagnosis(*arguments(launcher), "--seed", "17")
    assert (code, found["problems"], found["why_no_device_memory"]) == (0, [], None)
    assert (found["devices"], found["seed"]) == (["cuda:0", "cuda:1"], 17)
    assert [each["medium"] for each in found["media"]] == ["host memory", "device memory"]
    for each in found["media"]:
        assert each["rounds"] == ROUNDS
        assert 0 < each["timed"] < ROUNDS  # the others had pauses
        assert sum(count for *_, count in each["histogram"]) == each["timed"]
        times = [each["microseconds"][name] for name in ("p50", "p99", "p99.9", "longest")]
        assert 0 < times[0] <= times[1] <= times[2] <= times[3]
        assert not any(count for side in each["faults"].values() for count in side.values())
    medians = {each["medium"]: each["microseconds"]["p50"] for each in found["media"]}
    assert found["chosen"] == min(medians, key=lambda medium: medians[medium])
    assert not any(device.num_bytes for device in gpus.opened)
    assert not EmulatedPeerMemory.freed_while_open


@pytest.mark.parametrize("in_devices", [False, True])
def test_a_damaged_word_is_found_and_named(
    gpus: EmulatedGpus,
    launcher: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_devices: bool,
) -> None:
    """Whose epoch is left as it is: nothing but the word itself can tell."""
    export_memory = EmulatedDevice.export_memory
    segments: list[Segment] = []
    exported: list[EmulatedPeerMemory] = []

    def created(*args: Any, **options: Any) -> Segment:
        segments.append(create_segment(*args, **options))
        return segments[-1]

    def shown(device: EmulatedDevice, num_bytes: int) -> EmulatedPeerMemory:
        exported.append(export_memory(device, num_bytes))
        return exported[-1]

    def damage() -> None:
        at = DAMAGED_LINE * LINE_BYTES
        if in_devices and exported and exported[0].device_address:
            exported[0].write(at, b"\xde\xad\xbe\xef")
        elif segments and not in_devices and segments[0].window is not None:
            segments[0].write_mail(
                LINES_AT + TRIAL_LAYOUT.requests_nbytes + at, b"\xde\xad\xbe\xef"
            )

    monkeypatch.setattr(doctor_mailbox, "create_segment", created)
    monkeypatch.setattr(EmulatedDevice, "export_memory", shown)
    link_close = MailLink.close

    def closed(link: MailLink) -> None:
        segments.clear()
        exported.clear()
        link_close(link)

    monkeypatch.setattr(MailLink, "close", closed)
    with repeated(damage):
        done = run_main(main, *arguments(launcher, num_rounds=100))
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    medium = "device memory" if in_devices else "host memory"
    [problem] = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert problem.startswith(f"problem        {medium}, cuda:1 to cuda:0: "), problem
    assert " words wrong" in problem or " words torn" in problem
    assert f"line {DAMAGED_LINE}, word 0: 0xefbeadde instead of 0x" in problem
    other = "host memory" if in_devices else "device memory"
    assert f"faster         {other}: " in done.stdout


def test_a_process_that_is_killed_is_said_so(
    gpus: EmulatedGpus, launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, num_probes = MailLink.probe, 0

    def probed(link: MailLink, *args: Any, **options: Any) -> TrialBatch:
        nonlocal num_probes
        num_probes += 1
        if num_probes == 3:
            for child in own_children():
                child.kill()
        return probe(link, *args, **options)

    monkeypatch.setattr(MailLink, "probe", probed)
    done = run_main(main, *arguments(launcher))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dflash-moe: error: cuda:1: its process was ended by SIGKILL\n"
    assert not any(device.num_bytes for device in gpus.opened)


def test_ctrl_c_ends_both_sides(launcher: Path, run_dir: Path) -> None:
    command = [sys.executable, "-m", "support.emulated_cli"]
    with subprocess.Popen(
        [*command, *arguments(launcher, num_rounds=10**9)],
        env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:."),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            wait_until(lambda: any(run_dir.iterdir()), "memory to be shared")
            wait_until(lambda: not any(run_dir.iterdir()), "the other side to have it")
            [child] = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=START_S)
        finally:
            process.kill()
    assert (process.returncode, output) == (130, "")
    assert errors.strip() == "dflash-moe: error: interrupted"
    assert not child.is_running()


def test_memory_of_devices_that_cannot_be_seen_is_left_out(
    gpus: EmulatedGpus, launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(device: EmulatedDevice, handle: bytes, num_bytes: int) -> EmulatedPeerMemory:
        raise DeviceUnavailable("peer access is not supported")

    monkeypatch.setattr(EmulatedDevice, "import_memory", blind)
    done = run_main(main, *arguments(launcher, num_rounds=20))
    assert done.returncode == 0, done.stderr
    assert "device memory  cannot be used: peer access is not supported\n" in done.stdout
    assert "faster         host memory: " in done.stdout
    assert not EmulatedPeerMemory.freed_while_open


def test_one_device_under_two_names_is_no_pair(
    gpus: EmulatedGpus, launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_mail = Segment.read_mail

    def same(segment: Segment, offset: int, num_bytes: int) -> bytes:
        own = gpus.opened[0].uuid
        return own if offset == MailWord.DAEMON_DEVICE else read_mail(segment, offset, num_bytes)

    monkeypatch.setattr(Segment, "read_mail", same)
    done = run_main(main, *arguments(launcher))
    assert (done.returncode, done.stdout) == (2, "")
    expected = "dflash-moe: error: both are the same device: a mailbox needs two\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("cuda:0", "cuda:0", "--mailbox: cuda:0 is named twice"),
        ("cuda:0", "cpu", "--mailbox: cpu "),
        ("nothing", "cuda:0", "--mailbox='nothing': must be cpu, cuda:N or hip:N"),
        ("cuda:0", "nothing", "--mailbox='nothing': must be DEVICE[@LAUNCHER]"),
        ("cuda:0", "cuda:1@/no/such", "daemon launcher '/no/such': No such file"),
        ("cuda:1000", "cuda:1001", "device cuda:1000: "),
    ],
)
def test_what_cannot_be_tried_is_one_line(first: str, second: str, message: str) -> None:
    done = run_main(main, "doctor", "--mailbox", first, second)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert message in line


def test_a_second_device_that_is_not_there_says_so_itself(
    gpus: EmulatedGpus, launcher: Path
) -> None:
    done = run_main(main, *arguments(launcher, second="cuda:9"))
    assert (done.returncode, done.stdout) == (1, "")
    expected = "dflash-moe: error: cuda:9: the driver sees 8 devices of this kind\n"
    assert done.stderr == expected
