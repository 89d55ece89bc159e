"""A parent's steps on a GPU that ask daemons' GPUs through mailboxes, all of them emulated here."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DaemonUnavailable, DeviceOutOfMemory
from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment
from dflash_protocol.settings import Settings
from dflash_runtime import Engine
from dflash_runtime.compute import mailbox_layout
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.compute.cpu.captured.mail_thread import MailThread
from dflash_runtime.compute.gpu.device.device import address
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.gpu.mailbox.parent import MailLink, ParentMail, is_ready
from dflash_runtime.compute.gpu.run.captured_trees import CapturedTrees
from dflash_runtime.compute.gpu.run.path_choice import MailboxSessions
from dflash_runtime.compute.mail_trial import Fault, FaultKind, Faults, TrialBatch
from dflash_runtime.compute.mailbox_layout import (
    LAYOUT_NUMBER,
    LINES_AT,
    Ask,
    Asked,
    MailState,
    MailWord,
    MailWords,
)
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.engine.replacing import ExpertMover
from dflash_runtime.engine.verifying import Verified
from dflash_runtime.experts.events import EventKind
from dflash_runtime.placement.cache.traces import PHASES, read_trace
from dflash_runtime.placement.moves import MovePrices
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, make_placement
from support.emulated_device import EmulatedDevice
from support.emulated_device.peer_memory import FREED_WHILE_OPEN, EmulatedPeerMemory
from support.emulated_gpu import TINY, TINY_LLAMA4, EmulatedGpus
from support.gpu_models import SHAPES
from support.mailbox_rig import (
    NUM_TOKENS,
    PROMPT,
    Rings,
    check_text,
    ended,
    install_mailing_gpus,
    opened,
    patient_settings,
    tokens,
)
from support.processes import START_S, running_daemon, stop, wait_until
from support.random_gguf import write_model
from support.scripted_moves import ScriptedPolicy, move_between_daemons
from support.trees import way_to

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Mailing:
    """A model, daemons on GPUs that know it, and what is asked of them through mailboxes.

    A daemon takes a second or two to start, so that only those are started that are used.
    """

    model: Path
    gpus: EmulatedGpus
    run_dir: Path
    undo: ExitStack
    rings: Rings
    settings: Settings
    daemons: list[subprocess.Popen[str]] = field(default_factory=list)

    def resident(self) -> Engine:
        """All experts on the parent's GPU."""
        return opened(self.model)

    def opened(self, num_daemons: int = 1, **options: Any) -> Engine:
        """An engine with the first daemons, without a replacement for them."""
        options = {"require_daemons": True, "settings": self.settings, **options}
        self.start(num_daemons)
        connect = [self._endpoint(index) for index in range(num_daemons)]
        return opened(self.model, connect=connect, **options)

    def start(self, num_daemons: int) -> None:
        """Start so many daemons, if they have not been."""
        for index in range(len(self.daemons), num_daemons):
            daemon = running_daemon(
                self.model,
                self._endpoint(index),
                ["--device", "cuda:0"],
                module="support.emulated_daemon",
            )
            self.daemons.append(self.undo.enter_context(daemon))

    def _endpoint(self, index: int) -> str:
        return f"ipc://{self.run_dir}/{'ab'[index]}.sock"


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, getattr(request, "param", TINY), seed=4, tensor_type="Q8_0")


@pytest.fixture
def mailing(model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailing]:
    gpus = install_mailing_gpus(monkeypatch)
    with ExitStack() as undo:
        mailing = Mailing(model, gpus, run_dir, undo, Rings(monkeypatch), patient_settings())
        yield mailing
        for process in mailing.daemons:
            assert FREED_WHILE_OPEN not in ended(process)
    assert not EmulatedPeerMemory.freed_while_open


@pytest.mark.parametrize(
    "model",
    [
        TINY,
        pytest.param(TINY_LLAMA4, marks=pytest.mark.slow),
        pytest.param(SHAPES["gpt_oss"], marks=pytest.mark.slow),
    ],
    ids=lambda shape: shape.name,
    indirect=True,
)
def test_steps_through_mailboxes_have_the_bits_of_a_resident_run(
    mailing: Mailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mailing.resident() as engine:
        expected = tokens(engine)
    rings = mailing.rings
    add, rounded = MailKernels.add, set()

    def noted(kernels: MailKernels, *args: Any, **options: Any) -> None:
        rounded.add(options["rounded"])
        add(kernels, *args, **options)

    monkeypatch.setattr(MailKernels, "add", noted)
    # What one daemon has all of is answered as float32; of two there may be none here.
    by_mail = replace(mailing.settings, ipc_transport="device")
    for num_daemons, num_local, is_rounded in ((1, 0, {True}), (2, 2, set()), (2, 0, {False})):
        rounded.clear()
        with mailing.opened(num_daemons, local_experts=num_local, settings=by_mail) as engine:
            rings.count = 0
            assert tokens(engine) == expected
            assert tokens(engine) == expected
            assert rings.count >= 2 * (NUM_TOKENS - 1)
            assert rounded == is_rounded
    assert all(not device.num_bytes for device in mailing.gpus.opened)


@pytest.mark.parametrize("num_local", [0, 2])
def test_traces_of_steps_through_mailboxes_are_those_of_a_resident_run(
    mailing: Mailing, tmp_path: Path, num_local: int
) -> None:
    traces = [tmp_path / name for name in ("resident", "mailed")]
    settings = [replace(mailing.settings, expert_trace=str(trace)) for trace in traces]
    with opened(mailing.model, settings=settings[0]) as engine:
        tokens(engine)
        verified(engine)
    by_mail = replace(settings[1], ipc_transport="device")
    with mailing.opened(1, local_experts=num_local, settings=by_mail) as engine:
        tokens(engine)
        verified(engine)
        assert mailing.rings.count > NUM_TOKENS
    resident, mailed = map(read_trace, traces)
    np.testing.assert_array_equal(mailed.phases, resident.phases)
    np.testing.assert_array_equal(mailed.ids, resident.ids)
    assert (resident.phases == PHASES.index(Phase.VERIFY)).sum() == sum(map(len, TREES))


@pytest.mark.parametrize(
    "model",
    [TINY, pytest.param(SHAPES["qwen35moe"], marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
)
def test_trees_through_mailboxes_have_the_bits_of_a_resident_run(mailing: Mailing) -> None:
    """Up to as many tokens as a step may have; with more the host asks."""
    with mailing.resident() as engine:
        expected = verified(engine)
    rings = mailing.rings
    by_mail = replace(mailing.settings, ipc_transport="device")
    for num_daemons, num_local in ((1, 0), (2, 2)):
        with mailing.opened(num_daemons, local_experts=num_local, settings=by_mail) as engine:
            rings.count = 0
            found = verified(engine)
            assert rings.count == sum(len(parents) <= MOST_TOKENS for parents in TREES)
            check_same(found, expected)
            num_pairs = sum(map(len, TREES)) * sum(
                layer.num_experts_used for layer in engine.spec.moe.layers
            )
            engine.prefill(PROMPT)  # until then what devices have counted stays there
            counted = [owner.phases[Phase.VERIFY] for owner in engine.stats().owners.values()]
            assert sum(each.pairs for each in counted) == num_pairs
    assert all(not device.num_bytes for device in mailing.gpus.opened)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TINY, id="attention"),
        pytest.param(SHAPES["qwen35moe"], id="attention and states"),
    ],
    indirect=True,
)
def test_a_daemon_that_is_lost_within_a_tree_costs_time_and_no_token(
    mailing: Mailing, run_dir: Path
) -> None:
    """The other one has what it had."""
    with mailing.resident() as engine:
        expected = verified(engine)
    rings = mailing.rings
    settings = replace(mailing.settings, step_limit_ms=3000)
    with GgufFile.open(mailing.model) as file:
        moe = read_spec(file).moe
    whole = OwnedExperts.from_lists(
        {layer.layer_id: range(layer.num_experts) for layer in moe.layers}
    )
    placement = make_placement(moe, {"link0": whole, "link1": whole})
    with mailing.opened(2, placement=placement, require_daemons=False, settings=settings) as engine:
        rings.at(2, mailing.daemons[0].kill)
        check_same(verified(engine), expected)
        kinds = [event.kind for event in engine.stats().events]
        assert kinds.count(EventKind.DAEMON_LOST) == 1
        assert rings.count > 2
    for left in run_dir.glob("a.sock*"):  # what is killed cannot clean up
        left.unlink()


def test_whichever_daemon_answers_by_mailbox_the_bits_are_those_of_a_resident_run(
    mailing: Mailing,
) -> None:
    with mailing.resident() as engine:
        expected = tokens(engine)
    rings = mailing.rings
    settings = replace(mailing.settings, ipc_transport="device")
    with GgufFile.open(mailing.model) as file:
        moe = read_spec(file).moe
    whole = OwnedExperts.from_lists(
        {layer.layer_id: range(layer.num_experts) for layer in moe.layers}
    )
    random = np.random.default_rng(1)
    placement = replace(
        make_placement(moe, {"link0": whole, "link1": whole}),
        answering={
            layer.layer_id: random.permutation(np.arange(layer.num_experts, dtype=np.int32) % 2)
            for layer in moe.layers
        },
    )
    with mailing.opened(2, placement=placement, settings=settings) as engine:
        rings.count = 0
        assert tokens(engine) == expected
        assert rings.count >= NUM_TOKENS - 1
        owners = engine.stats().owners
        assert min(owners[name].pairs for name in ("link0", "link1")) > 0


@pytest.mark.parametrize("has_local", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_daemon_and_the_parents_processor_answer_the_same_step(
    mailing: Mailing, run_dir: Path, monkeypatch: pytest.MonkeyPatch, has_local: bool
) -> None:
    """Trees too; the host asks for nothing until the daemon is lost."""
    with mailing.resident() as engine:
        expected, expected_trees = tokens(engine), verified(engine)
    with GgufFile.open(mailing.model) as file:
        moe = read_spec(file).moe
    shares = {LOCAL_OWNER: [4, 1], HOST_OWNER: [2], "link0": [0, 3]}
    if not has_local:
        shares = {HOST_OWNER: [1, 4], "link0": [0, 2, 3]}
    owned = {
        name: OwnedExperts.from_lists({layer.layer_id: ids for layer in moe.layers})
        for name, ids in shares.items()
    }
    num_asked, ask = 0, MailThread.ask

    def counted(thread: MailThread, num_tokens: int) -> None:
        nonlocal num_asked
        num_asked += 1
        ask(thread, num_tokens)

    monkeypatch.setattr(MailThread, "ask", counted)
    placement = make_placement(moe, owned)
    options: dict[str, Any] = {"placement": placement, "require_daemons": False}
    # Then the GPU computes prompts, as in the resident run.
    settings = replace(mailing.settings, step_limit_ms=3000, prefill_offload="on")
    with mailing.opened(1, settings=settings, **options) as engine:
        for _ in range(2):
            before = num_asked
            assert tokens(engine) == expected
            assert num_asked - before >= NUM_TOKENS - 1
        check_same(verified(engine), expected_trees)
        owners = engine.stats().owners
        assert all(owners[name].pairs > 0 for name in shares)
        mailing.rings.at(2, mailing.daemons[0].kill)
        assert tokens(engine) == expected
    for left in run_dir.glob("a.sock*"):  # what is killed cannot clean up
        left.unlink()


def test_experts_move_between_gpus_between_two_steps(mailing: Mailing) -> None:
    """Between daemons, and with the parent's device. Mailboxes are opened anew, with nothing of the
    ones before left; until then the host asks."""
    with mailing.resident() as engine:
        expected, logits = tokens(engine), engine.logits(PROMPT)
    rings = mailing.rings
    settings = replace(mailing.settings, ipc_transport="device")
    with mailing.opened(2, local_experts=2, settings=settings) as engine:
        steps, first = engine._steps, engine.placement

        def turned(by: int) -> Placement:
            """Experts of each layer go to the next owner; the daemons' numbers change too."""
            owners = {name: dict[int, list[int]]() for name in first.owner_names}
            for layer_id, num_experts in first.experts_per_layer.items():
                ids = np.roll(np.arange(num_experts), by).tolist()
                cuts = 2, 3 + by % 2
                parts = ids[: cuts[0]], ids[cuts[0] : cuts[1]], ids[cuts[1] :]
                for name, part in zip(first.owner_names, parts, strict=True):
                    owners[name][layer_id] = part
            lists = tuple(map(OwnedExperts.from_lists, owners.values()))
            return replace(first, owners=lists)

        def mailed() -> int:
            before = rings.count
            assert tokens(engine) == expected
            return rings.count - before

        assert mailed() >= NUM_TOKENS - 1
        for turn in (1, 2):
            found = []
            for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
                found.append(token.token_id)
                if len(found) == 4:  # more steps were started
                    assert steps.keeps_classes(turned(turn))
                    steps.replace(steps.prepare(turned(turn)), ends_run=False)
            assert found == expected
            wait_until(lambda: mailed() >= NUM_TOKENS - 1, "mailboxes", within_s=4 * START_S)
            assert (engine.logits(PROMPT) == logits).all()
        assert engine.stats().events == []
    assert all(not device.num_bytes for device in mailing.gpus.opened)


def test_rounds_wait_for_the_end_of_a_run_and_for_new_mailboxes(
    mailing: Mailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose daemons get other experts would go on through the host."""
    move_between_daemons(monkeypatch)
    monkeypatch.setattr(ScriptedPolicy, "owners", ("link0", "link1"))
    settings = replace(mailing.settings, ipc_transport="device")
    rings = mailing.rings
    with mailing.opened(2, local_experts=0, settings=settings) as engine:
        expected = tokens(engine)
        prices = MovePrices({})
        moe = engine.spec.moe
        engine._mover = ExpertMover(engine._steps, None, moe, prices=prices, most=4, min_gain=1)
        for _ in range(3):
            before, placement = rings.count, engine.placement
            found = []
            for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
                found.append(token.token_id)
                placement = placement if len(found) > 1 else engine.placement
                assert engine.placement is placement
            assert found == expected
            assert rings.count - before >= NUM_TOKENS - 1
            num_rounds = engine.stats().moves.rounds

            def is_applied(num_before: int = num_rounds) -> bool:
                engine.move_experts()
                return engine.stats().moves.rounds > num_before

            wait_until(is_applied, "a round", within_s=4 * START_S)
        assert engine.stats().moves.rounds_not_applied == 0
        assert engine.stats().events == []
        engine._mover.close()


def test_a_trial_that_fails_leaves_steps_as_they_were(
    mailing: Mailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mailing.resident() as engine:
        expected = tokens(engine)
    rings = mailing.rings

    def fails(*_: Any) -> None:
        raise DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=10)

    with mailing.opened(local_experts=0) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(CapturedTrees, "_launch", fails)
            engine.prefill(PROMPT)
            rings.count = 0
            engine.verify([1, 2], [-1, 0])
            assert not rings.count  # the host has asked
        assert tokens(engine) == expected
        assert rings.count >= NUM_TOKENS - 1


def test_a_trial_keeps_whose_fault_it_is_that_a_step_before_it_failed() -> None:
    device = EmulatedDevice()
    words = device.zeros(4, np.uint32)
    peers = [MailPeer(address(words, 8 * index), address(words, 8 * index + 4)) for index in (0, 1)]
    mail = ParentMail.__new__(ParentMail)
    mail._device, mail._side, mail.epoch = device, MailSide(device, peers, 100), 7
    for failed, blamed in ((5, 2), (0, 0)):
        mail._failed = np.array([failed], np.uint32)
        mail._side.set_epoch(6, is_trial=failed != 0, blamed=blamed)
        with mail.trial():
            assert list(device.download(mail._side.state)[2:]) == [7, 1, 0, 0]
        assert list(device.download(mail._side.state)[2:]) == [7, failed != 0, blamed, 0]


def test_mailboxes_may_lie_in_the_devices_memory(
    mailing: Mailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As whichever is the faster is taken, either is made to seem so."""
    choose_memory, use_peers = MailboxSessions.choose_memory, ParentMail.use_peers
    chosen: list[bool] = []

    def used(mail: ParentMail, uses_peers: bool) -> None:
        assert mail.has_peers
        chosen.append(uses_peers)
        use_peers(mail, uses_peers)

    monkeypatch.setattr(ParentMail, "use_peers", used)
    with mailing.resident() as engine:
        expected = tokens(engine)
    rings = mailing.rings
    for num_local, times_s in ((2, [2.0, 1.0]), (2, [1.0, 2.0])):
        tried = iter(times_s)

        def seems(mailed: MailboxSessions, step_s: Any, tried: Iterator[float] = tried) -> None:
            assert step_s() > 0
            choose_memory(mailed, tried.__next__)

        monkeypatch.setattr(MailboxSessions, "choose_memory", seems)
        with mailing.opened(local_experts=num_local) as engine:
            assert chosen[-1] == (times_s[1] < times_s[0])
            rings.count = 0
            assert tokens(engine) == expected
            assert rings.count >= NUM_TOKENS - 1


def test_mailboxes_lie_in_the_hosts_memory_if_that_is_wanted(
    mailing: Mailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_peer, shown = MailLink.open_peer, []

    def noted(link: MailLink) -> None:
        shown.append(link)
        open_peer(link)

    monkeypatch.setattr(MailLink, "open_peer", noted)
    with mailing.resident() as engine:
        expected = tokens(engine)
    rings = mailing.rings
    for mail_memory, num_shown in (("host", 0), ("auto", 1)):
        settings = replace(mailing.settings, mail_memory=mail_memory)
        with mailing.opened(local_experts=0, settings=settings) as engine:
            rings.count = 0
            assert tokens(engine) == expected
            assert rings.count >= NUM_TOKENS - 1
        assert len(shown) == num_shown


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_daemon_lost_within_a_token_costs_time_and_no_token(
    mailing: Mailing, run_dir: Path, fault: str
) -> None:
    mailing.start(1)
    [process] = mailing.daemons
    rings = mailing.rings
    settings = replace(mailing.settings, step_limit_ms=3000)
    with mailing.opened(local_experts=0, require_daemons=False, settings=settings) as engine:
        expected = tokens(engine)
        assert rings.count
        found = []
        for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
            found.append(token.token_id)
            if len(found) == 4:
                process.kill() if fault == "kill" else stop(process.pid)
        assert found[:4] == expected[:4]
        check_text(engine, found)
        kinds = [event.kind for event in engine.stats().events]
        assert "daemon_lost" in kinds
        rings.count = 0
        assert len(tokens(engine)) == NUM_TOKENS  # and all goes on without it
        assert not rings.count
    if fault == "stop":  # who stands still closes nothing, and is not waited for for ever
        EmulatedPeerMemory.freed_while_open.clear()
    process.send_signal(signal.SIGCONT)
    for left in run_dir.glob("a.sock*"):  # what is killed cannot clean up
        if fault == "kill":
            left.unlink()


def test_where_epochs_end_the_host_asks(mailing: Mailing, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = mailing.rings
    with mailing.opened(local_experts=0) as engine:
        expected = tokens(engine)
        assert (num_steps := rings.count) >= NUM_TOKENS - 1
        monkeypatch.setattr(mailbox_layout, "LAST_EPOCH", 1)
        assert tokens(engine) == expected
        assert tokens(engine) == expected
        assert rings.count == num_steps


def test_where_a_probe_fails_the_host_asks(
    mailing: Mailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_probes = 0

    def fails(link: MailLink, *_: Any, **__: Any) -> TrialBatch:
        nonlocal num_probes
        num_probes += 1
        found = Fault(FaultKind.TORN, 0, line=3, word=1, expected=1, found=2)
        nothing = Faults(dict.fromkeys(FaultKind, 0))
        return TrialBatch(np.ones(1, np.int64), Faults({FaultKind.TORN: 1}, found), nothing)

    monkeypatch.setattr(MailLink, "probe", fails)
    rings = mailing.rings
    with mailing.opened(local_experts=0) as engine:
        assert tokens(engine) == tokens(engine)
        assert num_probes == 1
        assert not rings.count
        stats = engine.stats()
        assert stats.owners["link0"].requests
        assert not stats.events


TREES = [[-1, 0, 0, 1], [-1, -1, 0, 2], [-1], [-1, 0, 0, 1, 1, 3, 4, 4, 7], [-1, 0, 1]]


def verified(engine: Engine) -> list[Verified]:
    """What is said of trees one after the other, of each of which a path is accepted."""
    found, layers = [engine.prefill(PROMPT)], (0, engine.spec.num_layers - 1)
    for number, parents in enumerate(TREES):
        ids = np.random.default_rng(number).integers(0, TINY.vocab_size, len(parents))
        found.append(engine.verify(ids.tolist(), parents, feature_layers=layers))
        engine.accept(way_to(parents, len(parents) - 1))
    return found


def check_same(found: list[Verified], expected: list[Verified]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got.next_token_ids, wanted.next_token_ids)
        assert got.features.keys() == wanted.features.keys()
        for layer_id, rows in wanted.features.items():
            np.testing.assert_array_equal(got.features[layer_id], rows)


def test_one_device_has_no_mailbox_with_itself(run_dir: Path) -> None:
    device = EmulatedDevice()
    shape = RingShape(2, 1, TINY.hidden_size, TINY.num_experts_used, mail_bytes=LINES_AT)
    segment = create_segment(run_dir, shape, generation=1)
    try:
        route = MailRoute("a", 0, segment, {}, is_live=lambda: True, fail=lambda reason: None)
        words = MailWords(segment)
        segment.write_mail(MailWord.DAEMON_DEVICE, device.uuid)
        assert not is_ready(route, device)
        words.write(MailWord.STATE, MailState.READY)
        assert not is_ready(route, device)
        assert not is_ready(route, EmulatedDevice())  # which knows no layout
        words.write(MailWord.DAEMON_LAYOUT, LAYOUT_NUMBER + 1)
        assert not is_ready(route, EmulatedDevice())
        words.write(MailWord.DAEMON_LAYOUT, LAYOUT_NUMBER)
        assert not is_ready(route, device)
        assert is_ready(route, EmulatedDevice())
        words.write(MailWord.STATE, MailState.FAILED)
        assert not is_ready(route, EmulatedDevice())
    finally:
        segment.close()
    assert not is_ready(route, device)  # nor any when the memory is gone


def test_who_begins_anew_is_not_taken_for_who_was_there_before(run_dir: Path) -> None:
    shape = RingShape(2, 1, TINY.hidden_size, TINY.num_experts_used, mail_bytes=LINES_AT)
    segment = create_segment(run_dir, shape, generation=1)
    try:
        daemon, first = MailWords(segment), MailWords(segment)
        first.ask(Ask.EPOCH, 3)
        daemon.answer(daemon.asked().number)
        first.await_answer(1.0, lambda: True)
        later = MailWords(segment)
        later.ask(Ask.LEAVE)
        assert daemon.asked() == Asked(2, Ask.LEAVE, 0)
        with pytest.raises(DaemonUnavailable, match="answered"):
            later.await_answer(0.01, lambda: True)
        daemon.answer(2)
        later.await_answer(1.0, lambda: True)
    finally:
        segment.close()
