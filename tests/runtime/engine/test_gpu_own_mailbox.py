"""A parent's GPU, emulated here, asks its own processor through a mailbox: whatever goes wrong, the
text is that of a model that is on the GPU as a whole, and what can be used again is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime import Engine
from dflash_runtime.compute.cpu.captured.mail_thread import MailThread
from dflash_runtime.compute.gpu.mailbox import parent, processor_peer
from dflash_runtime.compute.gpu.run import captured_step, path_choice
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.interrupts import interrupt_main_thread
from support.random_gguf import write_model
from support.undisturbed import settings_with

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 10
LIMIT_MS = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For steps that are never served."""
    monkeypatch.setattr(parent, "LIMIT_MS", LIMIT_MS)


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        install_emulated_gpus(patch)
        with opened(model, local_experts=TINY.num_experts) as engine:
            yield text_of(engine)


class Steps:
    """Counts steps that the processor is asked for; `before` is called with their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.before: Callable[[int], bool] = lambda count: True
        """Returns whether to ask for it."""
        ask = MailThread.ask

        def counted(thread: MailThread, num_tokens: int) -> None:
            self.count += 1
            if self.before(self.count):
                ask(thread, num_tokens)

        monkeypatch.setattr(MailThread, "ask", counted)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def opened(model: Path, *, local_experts: int = 3, **wishes: Any) -> Engine:
    settings = replace(settings_with(), context=48, prefill_offload="on", **wishes)
    return Engine.open(model, device="cuda:0", settings=settings, local_experts=local_experts)


def text_of(engine: Engine) -> list[int]:
    return [each.token_id for each in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)]


def mail_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "dflash-mail"]


def test_steps_need_no_host_between_layers(
    model: Path, gpus: EmulatedGpus, steps: Steps, expected: list[int]
) -> None:
    with opened(model) as engine:
        assert text_of(engine) == expected
        assert steps.count == NUM_TOKENS - 1
        hits = engine.stats().hits
        assert 0 < hits.layers_hot_only < hits.layers
        assert len(mail_threads()) == 1
    assert not mail_threads()
    assert not any(device._range_bytes for device in gpus.opened)


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("at", [1, 4, NUM_TOKENS - 1])
def test_a_step_that_is_not_served_is_computed_by_the_host(
    model: Path, gpus: EmulatedGpus, steps: Steps, expected: list[int], at: int
) -> None:
    steps.before = lambda count: count != at
    with opened(model) as engine:
        assert text_of(engine) == expected
        before = steps.count
        assert text_of(engine) == expected
        assert steps.count - before >= NUM_TOKENS - 1
        assert len(mail_threads()) == 1
    assert not any(device._range_bytes for device in gpus.opened)


@pytest.mark.usefixtures("short_limit")
def test_after_many_failures_the_host_asks(
    model: Path,
    gpus: EmulatedGpus,
    steps: Steps,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(path_choice, "_MOST_FAILURES", 2)
    steps.before = lambda count: False
    with opened(model) as engine:
        for _ in range(4):
            assert text_of(engine) == expected
        before = steps.count
        assert text_of(engine) == expected
        assert steps.count == before
    assert [each for each in caplog.messages if "2 steps have failed" in each]


def test_memory_that_cannot_be_locked_costs_the_mailbox_only(
    model: Path,
    gpus: EmulatedGpus,
    steps: Steps,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*_: object) -> None:
        raise DeviceUnavailable("cuda:0: out of memory that can be locked")

    monkeypatch.setattr(processor_peer, "MappedBlock", refused)
    with caplog.at_level(logging.WARNING), opened(model) as engine:
        assert text_of(engine) == expected
    assert steps.count == 0
    [said] = [each for each in caplog.messages if "no mailbox" in each]
    assert "out of memory" in said


def test_a_text_that_is_interrupted_leaves_the_next_ones_right(
    model: Path, gpus: EmulatedGpus, steps: Steps, expected: list[int]
) -> None:
    with opened(model) as engine:
        for at in (1, 2, 5):
            first = steps.count

            def interrupt(count: int, due: int = first + at) -> bool:
                if count == due:
                    interrupt_main_thread()
                return True

            steps.before = interrupt
            with pytest.raises(KeyboardInterrupt):
                text_of(engine)
            steps.before = lambda count: True
            assert text_of(engine) == expected
        assert len(mail_threads()) == 1


def test_an_engine_may_be_closed_within_a_text(
    model: Path, gpus: EmulatedGpus, steps: Steps, expected: list[int]
) -> None:
    with opened(model) as engine:
        tokens = engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
        assert [next(tokens).token_id for _ in range(3)] == expected[:3]
        engine.close()
    del tokens
    assert not mail_threads()
    assert not any(device._range_bytes for device in gpus.opened)


def test_a_start_that_fails_leaves_nothing(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        assert mail_threads()
        raise DeviceUnavailable("cuda:0: out of memory")

    monkeypatch.setattr(captured_step, "DecodeTokens", refused)
    with pytest.raises(DeviceUnavailable, match="out of memory"):
        opened(model)
    assert not mail_threads()
    assert not any(device._range_bytes for device in gpus.opened)
