"""Faults in daemons, parents and mailboxes between them, and checks that nothing leaks."""

from __future__ import annotations

import gc
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.ring.segment import Segment
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail
from dflash_runtime.compute.gpu.mailbox.peer_memory import KEPT_S
from dflash_runtime.compute.mailbox_layout import LINE_BYTES, LINES_AT, MailLayout, MailWord
from dflash_runtime.engine.penalties import Penalties
from dflash_runtime.experts.events import EventKind
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement
from support.mailbox_pairs import PROCESSOR, DevicePair, Pace
from support.mailbox_rig import PROMPT, Rings, opened, patient_settings, shared_things, tokens
from support.processes import START_S, wait_until
from support.talking_process import TalkingProcess, talking_process
from support.watched_daemon import HOLDS, RESIDENT, resident_bytes

_TIMEOUT_S = 60.0


def socket_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def remove_sockets(endpoint: str) -> None:
    """Remove the sockets of a killed daemon."""
    path = socket_of(endpoint)
    for left in path.parent.glob(f"{path.name}*"):
        left.unlink()


def experts_of(model: Path) -> MoeSpec:
    with GgufFile.open(model) as file:
        return read_spec(file).moe


@contextmanager
def waiting_daemon(pair: DevicePair, model: Path, endpoint: str) -> Iterator[TalkingProcess]:
    """A daemon's process that has imported everything, but not begun."""
    arguments = [str(model), "--listen", endpoint, "--device", pair.devices[1]]
    silence_s = str(pair.pace.silence_s)
    with talking_process(
        pair.daemon_module, arguments, DFLASHTEST_LINK_SILENCE_S=silence_s
    ) as daemon:
        yield daemon


@contextmanager
def starting_daemon(pair: DevicePair, model: Path, endpoint: str) -> Iterator[TalkingProcess]:
    """A daemon that has begun to start."""
    with waiting_daemon(pair, model, endpoint) as daemon:
        daemon.begin()
        yield daemon


def await_listening(daemon: TalkingProcess) -> None:
    """Wait until parents can connect."""
    daemon.await_line("listening on")


@dataclass
class Mailing:
    """An engine that uses a daemon's experts through a mailbox."""

    engine: Engine
    pace: Pace
    rings: Rings
    expected: list[int]
    """The tokens that it generates without a daemon."""
    penalties: Penalties | None = None
    """With some, each step waits for the token before it to be known."""
    longest_gap_s: float = 0.0
    """The longest time between two tokens of a text with a fault."""

    def check_text(self) -> None:
        """Generate the text: it is right, and no token takes too long."""
        found, gap_s, last_s = [], 0.0, 0.0
        for token in self.engine.generate(
            PROMPT, self.pace.num_tokens, penalties=self.penalties, ignore_eos=True
        ):
            now_s = time.monotonic()
            gap_s = max(gap_s, now_s - (last_s or now_s))
            last_s = now_s
            found.append(token.token_id)
        assert found == self.expected
        assert gap_s < 2 * self.pace.limit_ms * 1e-3
        self.longest_gap_s = max(self.longest_gap_s, gap_s)

    def is_used_again(self) -> bool:
        """Whether the next text goes through a mailbox; opening one takes a while."""
        num_before = self.rings.count
        assert tokens(self.engine, self.pace.num_tokens, self.penalties) == self.expected
        return self.rings.count > num_before

    def await_use(self) -> None:
        wait_until(self.is_used_again, "the mailbox to be used again", within_s=_TIMEOUT_S)

    @property
    def num_losses(self) -> int:
        return [event.kind for event in self.engine.stats().events].count(EventKind.DAEMON_LOST)


@contextmanager
def mailing(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    daemon: TalkingProcess,
    check_replies: int | None = 0,
    penalties: Penalties | None = None,
) -> Iterator[Mailing]:
    """A parent in this process with replicas of all experts; checks that it leaves nothing. The
    expected text is computed while the daemon starts."""
    pace, held_before = pair.pace, pair.held()
    open_engine = partial(opened, model, device=pair.devices[0], context=pace.context)
    with open_engine() as engine:
        expected = tokens(engine, pace.num_tokens, penalties)
    moe = experts_of(model)
    whole = OwnedExperts.from_lists(
        {layer.layer_id: range(layer.num_experts) for layer in moe.layers}
    )
    placement = make_placement(moe, {"link0": whole, LOCAL_OWNER: whole})
    rings = Rings(monkeypatch)
    settings = patient_settings(step_limit_ms=pace.asked_limit_ms)
    settings = replace(settings, check_replies=check_replies)
    if pair.name == PROCESSOR:  # prompts have other bits there
        settings = replace(settings, prefill_offload="on")
    await_listening(daemon)
    with open_engine(connect=[endpoint], placement=placement, settings=settings) as engine:
        mailed = Mailing(engine, pace, rings, expected, penalties)
        yield mailed
        print(f"longest gap between tokens: {1e3 * mailed.longest_gap_s:.0f} ms")
        assert rings.count >= pace.fault_at
    wait_until(lambda: pair.held() == held_before, "what a device has to be given back")


@dataclass
class Damage:
    """Writes into a mailbox again and again until a step fails."""

    pieces: list[tuple[int, bytes]]
    """Offsets and the bytes to write there."""
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

    def do(self, mailed: Mailing, monkeypatch: pytest.MonkeyPatch) -> None:
        """Do the damage, and check that texts are right meanwhile."""
        fail = ParentMail.fail

        def failed(mail: ParentMail) -> None:
            self.end()
            fail(mail)

        def begin() -> None:
            assert mailed.rings.segment is not None
            self.begin(mailed.rings.segment)

        mailed.rings.at(mailed.pace.fault_at, begin)
        with monkeypatch.context() as patched:
            patched.setattr(ParentMail, "fail", failed)
            try:
                end_s = time.monotonic() + _TIMEOUT_S  # one text may end before the damage is done
                while not self.is_done.is_set():
                    assert time.monotonic() < end_s
                    mailed.check_text()
            finally:
                self.end()


def damages(layout: MailLayout) -> dict[str, list[tuple[int, bytes]]]:
    """Kinds of damage by name, to lines of the first layer: words change, checks stay."""
    request, reply = LINES_AT + 3 * LINE_BYTES, layout.replies_at + 3 * LINE_BYTES
    aborts = [(at, bytes(4)) for at in (MailWord.PARENT_ABORT, MailWord.DAEMON_ABORT)]
    rng = np.random.default_rng(6)
    return {
        "a word of a reply, and what says that the step has failed": [
            (reply, b"\1\2\3\4"),
            *aborts,
        ],
        "a word of a request": [(request + 8, b"\1\2\3\4")],
        "all replies": [(layout.replies_at, rng.bytes(layout.replies_nbytes))],
        "all that hosts read": [(0, rng.bytes(MailWord.PROBE_FOLLOWS + 4))],
    }


def parents_die(
    pair: DevicePair, model: Path, endpoint: str, steps: Sequence[int]
) -> Iterator[int]:
    """Kill parents in separate processes, one after the other, each in one of these steps; yields
    the step. The next parent imports its modules meanwhile."""
    with ExitStack() as undo:

        def new_parent(step: int) -> TalkingProcess:
            arguments = [pair.name, pair.devices[0], str(model), endpoint, str(step)]
            return undo.enter_context(talking_process("support.dying_parent", arguments))

        parent: TalkingProcess | None = new_parent(steps[0])
        for step, next_step in itertools.zip_longest(steps, steps[1:]):
            dying, parent = parent, None if next_step is None else new_parent(next_step)
            assert dying is not None
            dying.begin()
            code = dying.await_end(4 * START_S)
            assert code == -signal.SIGKILL, dying.said
            yield step


class Readings:
    """Resources of a process and its devices, before and after a test that must not leak."""

    def __init__(
        self,
        pair: DevicePair,
        process: psutil.Process,
        folder: Path,
        held: Callable[[], Mapping[str, int]],
    ) -> None:
        """`held` returns the process's device resources and its resident bytes."""
        self._pair, self._process, self._folder, self._held = pair, process, folder, held
        self._before: dict[str, int] = {}
        self._grown: dict[str, int] = {}

    def begin(self) -> None:
        """Take the baseline."""
        self._before = self._read()

    def end(self) -> dict[str, int]:
        """The growth since the baseline; fails the test if it stays above the bounds."""
        with suppress(AssertionError):
            wait_until(self._is_unchanged, "", within_s=10.0, pause_s=0.5)
        allowed = self._pair.may_grow()
        leaks = {
            name: number for name, number in self._grown.items() if number > allowed.get(name, 0)
        }
        assert not leaks, f"{leaks} more than {self._before}"
        return self._grown

    def _is_unchanged(self) -> bool:
        allowed, now = self._pair.may_grow(), self._read()
        self._grown = {name: now[name] - number for name, number in self._before.items()}
        return all(number <= allowed.get(name, 0) for name, number in self._grown.items())

    def _read(self) -> dict[str, int]:
        gc.collect()
        return {
            **self._held(),
            **self._pair.used(),
            **shared_things(self._process),
            "files": sum(1 for _ in self._folder.iterdir()),
        }


def held_by(daemon: TalkingProcess) -> dict[str, int]:
    """A daemon's device resources and its resident bytes."""
    num_before = daemon.num_lines
    daemon.process.send_signal(signal.SIGUSR1)
    line = daemon.await_line(HOLDS, since=num_before)
    found: dict[str, int] = json.loads(line.split(HOLDS)[1])
    return found


def held_here(pair: DevicePair) -> dict[str, int]:
    """The same for this process."""
    return {**pair.held(), RESIDENT: resident_bytes()}


def wait_for_silence(pace: Pace, process: psutil.Process) -> None:
    """Wait until a daemon has dropped the parents that are gone."""
    wait_until(
        lambda: not shared_things(process)["mappings"], "shared memory to be given back",
        within_s=10 * pace.silence_s, pause_s=0.1,
    )  # fmt: skip


def wait_for_kept_memory() -> None:
    """Wait until memory that was kept for daemons that are gone is released."""
    time.sleep(2 * KEPT_S)
