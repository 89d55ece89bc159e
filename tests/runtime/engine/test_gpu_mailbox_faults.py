"""Mailboxes whose other side dies, stands still or writes nonsense in the middle of a token: the
text is right, whoever is left goes on, and nothing is kept. All devices are emulated.

Parents have replicas of all experts, which they use when the daemon is lost: with its bits.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.registry import adapter_for
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.ring_segment import Segment
from dflash_runtime import Engine
from dflash_runtime.compute.cupy import mailed_steps
from dflash_runtime.compute.cupy.kept_memory import KEPT_S
from dflash_runtime.compute.cupy.mailbox_layout import (
    DAEMON_ABORT_AT,
    LINE_BYTES,
    LINES_AT,
    PARENT_ABORT_AT,
    PROBE_FOLLOWS_AT,
    MailLayout,
    mail_layout,
)
from dflash_runtime.compute.cupy.parent_mail import ParentMail
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement
from support.emulated_device import EmulatedDevice
from support.emulated_device.peer_memory import FREED_WHILE_OPEN, EmulatedPeerMemory
from support.emulated_gpu import TINY, EmulatedGpus
from support.mailbox_rig import (
    NUM_TOKENS,
    PROMPT,
    TRIED_STEPS,
    Rings,
    ended,
    install_mailing_gpus,
    opened,
    patient_settings,
    shared_things,
    tokens,
)
from support.processes import START_S, environment, running_daemon, wait_until
from support.random_gguf import write_model
from support.random_models import write_qwen3moe
from support.random_qwen35moe import Qwen35MoeShape

pytestmark = pytest.mark.e2e

RECURRENT = Qwen35MoeShape(
    hidden_size=64,
    num_experts=7,
    num_experts_used=2,
    ffn_size=32,
    num_layers=2,
    recurrent_layers=(True, False),
    head_dim=16,
    shared_ffn_size=32,
    vocab_size=TINY.vocab_size,
)
LIMIT_MS = 2000
"""Of a step: emulated kernels take their time."""
LINK_SILENCE_S = 5.0
ROUNDS = 20
PATIENCE_S = 60.0
FAULT_AT = 3
"""The step that is not answered."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_mailing_gpus(monkeypatch)


@pytest.fixture(scope="module")
def qwen3moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent") / "m.gguf"
    return write_model(path, RECURRENT, seed=4, tensor_type="Q8_0")


@pytest.fixture
def endpoint(run_dir: Path) -> Iterator[str]:
    endpoint = f"ipc://{run_dir}/gpu.sock"
    yield endpoint
    remove_sockets(endpoint)


def remove_sockets(endpoint: str) -> None:
    """What is killed cannot do so."""
    path = Path(endpoint.removeprefix("ipc://"))
    for left in path.parent.glob(f"{path.name}*"):
        left.unlink()


@contextmanager
def emulated_daemon(model: Path, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    with running_daemon(
        model,
        endpoint,
        ["--device", "cuda:0"],
        module="support.emulated_daemon",
        DFLASHTEST_LINK_SILENCE_S=str(LINK_SILENCE_S),
    ) as process:
        yield process


@dataclass
class Mailing:
    """An engine whose experts are asked for through a daemon's mailbox."""

    engine: Engine
    rings: Rings
    expected: list[int]
    """What it chooses without any daemon."""

    def check_text(self) -> None:
        assert tokens(self.engine) == self.expected

    def is_used_again(self) -> bool:
        """Whether the next text goes through a mailbox."""
        num_before = self.rings.count
        self.check_text()
        return self.rings.count > num_before

    @property
    def num_losses(self) -> int:
        return [event.kind for event in self.engine.stats().events].count("daemon_lost")


@contextmanager
def mailing(model: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailing]:
    with opened(model) as engine:
        expected = tokens(engine)
    with GgufFile.open(model) as file:
        moe = adapter_for(file).read_spec(file).moe
    every = {layer.layer_id: range(layer.num_experts) for layer in moe.layers}
    whole = OwnedExperts.from_lists(every)
    placement = make_placement(moe, {"link0": whole, LOCAL_OWNER: whole})
    rings = Rings(monkeypatch)
    settings = patient_settings(step_limit_ms=LIMIT_MS)
    with opened(model, connect=[endpoint], placement=placement, settings=settings) as engine:
        yield Mailing(engine, rings, expected)
        assert rings.count >= FAULT_AT


@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_recurrent_model_whose_daemon_is_lost_within_a_token(
    recurrent: Path,
    endpoint: str,
    gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    fault: signal.Signals,
) -> None:
    """Its states are those before the step again when that is computed anew."""
    with (
        emulated_daemon(recurrent, endpoint) as process,
        mailing(recurrent, endpoint, monkeypatch) as mailed,
    ):
        lost_s = 0.0

        def lose() -> None:
            nonlocal lost_s
            process.send_signal(fault)
            lost_s = time.monotonic()

        mailed.rings.at(FAULT_AT, lose)
        found, gap_s = [], 0.0
        for token in mailed.engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
            if lost_s and not gap_s:
                gap_s = time.monotonic() - lost_s
            found.append(token.token_id)
        assert found == mailed.expected
        assert 0 < gap_s < 2 * LIMIT_MS * 1e-3
        assert mailed.num_losses == 1
        process.send_signal(signal.SIGCONT)
    assert not any(device.num_bytes for device in gpus.opened)


def test_a_parent_that_dies_within_a_token_costs_its_daemon_nothing(
    qwen3moe: Path, endpoint: str, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_daemon(qwen3moe, endpoint) as process:
        die_within_a_step(qwen3moe, endpoint, step=2 * TRIED_STEPS + FAULT_AT)
        assert process.poll() is None
        with mailing(qwen3moe, endpoint, monkeypatch) as mailed:
            mailed.check_text()
            assert not mailed.num_losses
        said = ended(process)
        assert process.returncode == 0, said
        assert FREED_WHILE_OPEN not in said


@dataclass
class Damage:
    """What is written into a mailbox, again and again, until a step has failed by it."""

    pieces: list[tuple[int, bytes]]
    """Places and bytes."""
    is_done: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def begin(self, segment: Segment) -> None:
        def run() -> None:
            with suppress(DaemonUnavailable):  # the session is over
                while not self.is_done.wait(1e-4):
                    for offset, data in self.pieces:
                        segment.write_mail(offset, data)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.is_done.set()
        if self.thread is not None:
            self.thread.join()


def damages(layout: MailLayout) -> dict[str, list[tuple[int, bytes]]]:
    """By name; of the model's first layer. Words are damaged beside checks that are left alone."""
    request, reply = LINES_AT + 3 * LINE_BYTES, layout.replies_at + 3 * LINE_BYTES
    aborts = [(at, bytes(4)) for at in (PARENT_ABORT_AT, DAEMON_ABORT_AT)]
    rng = np.random.default_rng(6)
    return {
        "a word of a reply, and what says that the step has failed": [
            (reply, b"\1\2\3\4"),
            *aborts,
        ],
        "a word of a request": [(request + 8, b"\1\2\3\4")],
        "all replies": [(layout.replies_at, rng.bytes(layout.replies_nbytes))],
        "all that hosts read": [(0, rng.bytes(PROBE_FOLLOWS_AT + 4))],
    }


@pytest.mark.parametrize(
    "what",
    [
        name if index == 0 else pytest.param(name, marks=pytest.mark.slow)
        for index, name in enumerate(damages(MailLayout(1, 1, 1)))
    ],
)
def test_what_is_damaged_in_a_mailbox_is_computed_anew(
    qwen3moe: Path,
    endpoint: str,
    gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    def blind(device: EmulatedDevice, handle: bytes, num_bytes: int) -> EmulatedPeerMemory:
        raise DeviceUnavailable("lines are where the test damages them")

    monkeypatch.setattr(EmulatedDevice, "import_memory", blind)
    with GgufFile.open(qwen3moe) as file:
        layout = mail_layout(adapter_for(file).read_spec(file).moe)
    damage, fail = Damage(damages(layout)[what]), ParentMail.fail

    def failed(mail: ParentMail) -> None:
        damage.end()
        fail(mail)

    monkeypatch.setattr(ParentMail, "fail", failed)
    with (
        emulated_daemon(qwen3moe, endpoint) as process,
        mailing(qwen3moe, endpoint, monkeypatch) as mailed,
    ):
        rings = mailed.rings

        def begin() -> None:
            assert rings.segment is not None
            damage.begin(rings.segment)

        rings.at(FAULT_AT, begin)
        try:
            end_s = time.monotonic() + PATIENCE_S  # it may come too late for one text
            while not damage.is_done.is_set():
                assert time.monotonic() < end_s
                mailed.check_text()
        finally:
            damage.end()
        assert mailed.num_losses >= 1
        assert process.poll() is None
        wait_until(mailed.is_used_again, "the mailbox to be used again")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parents_that_die_leave_nothing_in_their_daemon(qwen3moe: Path, endpoint: str) -> None:
    with ExitStack() as undo:
        process = undo.enter_context(emulated_daemon(qwen3moe, endpoint))
        watched, counts = psutil.Process(process.pid), []
        for number in range(ROUNDS + 1):
            die_within_a_step(qwen3moe, endpoint, step=1 + number % (2 * TRIED_STEPS + 2))
            if number in (0, ROUNDS):
                wait_for_silence(watched)
                counts.append((*device_memory(process), shared_things(watched)))
        assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_daemons_that_die_leave_nothing_in_their_parent(
    qwen3moe: Path, endpoint: str, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It gives up after ten steps that failed, as a rule.
    monkeypatch.setattr(mailed_steps, "_MOST_FAILURES", 2 * ROUNDS)
    ours, counts = psutil.Process(), []
    with ExitStack() as undo:
        daemon = undo.enter_context(ExitStack())
        process = daemon.enter_context(emulated_daemon(qwen3moe, endpoint))
        mailed = undo.enter_context(mailing(qwen3moe, endpoint, monkeypatch))
        for number in range(ROUNDS + 1):
            mailed.rings.at(FAULT_AT, process.kill)
            mailed.check_text()
            mailed.rings.then = lambda: None
            daemon.close()
            remove_sockets(endpoint)
            process = daemon.enter_context(emulated_daemon(qwen3moe, endpoint))
            wait_until(mailed.is_used_again, "the mailbox to be used again", within_s=60.0)
            if number in (0, ROUNDS):
                time.sleep(2 * KEPT_S)
                gc.collect()
                used = gpus.used_bytes(), gpus.opened[0].num_ranges
                counts.append((*used, shared_things(ours)))
        assert counts[0] == counts[1]


def die_within_a_step(model: Path, endpoint: str, *, step: int) -> None:
    """A parent of its own process does."""
    arguments = [str(model), endpoint, str(step), str(LIMIT_MS)]
    command = [sys.executable, "-m", "support.emulated_parent", *arguments]
    roots = environment()["PYTHONPATH"]
    done = subprocess.run(
        command,
        env=environment(PYTHONPATH=f"{roots}:."),
        capture_output=True,
        text=True,
        timeout=4 * START_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def wait_for_silence(process: psutil.Process) -> None:
    """Until a daemon has forgotten all parents that are gone."""
    wait_until(
        lambda: not shared_things(process)["mappings"], "shared memory to be given back",
        within_s=10 * LINK_SILENCE_S, pause_s=0.1,
    )  # fmt: skip


def device_memory(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Of a daemon's device: bytes of its arrays, and pieces that its kernels see."""
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("memory: "):
            num_bytes, num_ranges = map(int, line.split()[1:])
            return num_bytes, num_ranges
    raise AssertionError("the daemon has ended")
