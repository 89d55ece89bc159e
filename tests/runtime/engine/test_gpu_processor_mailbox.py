"""A parent on a GPU, emulated here, that asks a daemon on a processor through a mailbox: the bits
of steps that the host asks for, and of a model that is on the GPU as a whole."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_protocol.errors import HandshakeRefused
from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import Settings
from dflash_runtime import Engine
from dflash_runtime.experts.events import EventKind
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY
from support.mailbox_rig import (
    NUM_TOKENS,
    PROMPT,
    Rings,
    install_mailing_gpus,
    opened,
    patient_settings,
    tokens,
)
from support.processes import running_daemon
from support.random_gguf import write_model

pytestmark = pytest.mark.e2e

LOCAL = 3
"""Experts of each layer on the parent's GPU."""


@dataclass
class Asking:
    """A model, a daemon on a processor that knows it, and what is asked of it."""

    model: Path
    endpoint: str
    undo: ExitStack
    rings: Rings
    settings: Settings

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        """Start the daemon."""
        options = ["--device", "cpu", "--threads", "2", *arguments]
        return self.undo.enter_context(running_daemon(self.model, self.endpoint, options, **extra))

    def opened(self, **options: Any) -> Engine:
        """An engine that has nothing to replace the daemon's experts with."""
        options = {"settings": self.settings, "require_daemons": True, **options}
        options.setdefault("local_experts", LOCAL)
        return opened(self.model, connect=[self.endpoint], **options)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, TINY, seed=4, tensor_type=getattr(request, "param", "Q8_0"))


@pytest.fixture
def asking(model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    install_mailing_gpus(monkeypatch)
    settings = replace(patient_settings(), check_replies=0, prefill_offload="on")
    with ExitStack() as undo:
        yield Asking(model, f"ipc://{run_dir}/d.sock", undo, Rings(monkeypatch), settings)


def losses(engine: Engine) -> int:
    return [event.kind for event in engine.stats().events].count(EventKind.DAEMON_LOST)


@pytest.mark.parametrize(
    "model", ["Q8_0", pytest.param("F32", marks=pytest.mark.slow)], indirect=True
)
def test_steps_and_trees_have_the_bits_of_those_that_the_host_asks_for(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking.start()
    with opened(asking.model) as engine:
        expected = tokens(engine)
    for local_experts in (LOCAL, 0):
        asking.rings.count = 0
        with asking.opened(local_experts=local_experts) as engine:
            assert tokens(engine) == expected
            assert asking.rings.count >= NUM_TOKENS - 1
            first = engine.prefill(PROMPT)
            asking.rings.count = 0
            found = engine.verify(expected[:4], [-1, 0, 1, 2])
            assert [int(first.next_token_ids[-1]), *found.next_token_ids.tolist()] == expected[:5]
            assert asking.rings.count
            assert not losses(engine)
            assert engine.stats().owners["link0"].phases[Phase.DECODE].pairs
    with monkeypatch.context() as patch:
        patch.setattr(MoeExpertComputeRuntime, "mail_routes", lambda self: ())
        asking.rings.count = 0
        with asking.opened() as engine:
            assert tokens(engine) == expected
            assert not asking.rings.count


def test_a_step_asks_both_processors(asking: Asking) -> None:
    asking.start()
    with opened(asking.model) as engine:
        expected = tokens(engine)
    every, names = range(TINY.num_experts), (LOCAL_OWNER, "link0", HOST_OWNER)
    parts = (every[:2], every[2:4], every[4:])
    owned = tuple(
        OwnedExperts.from_lists(dict.fromkeys(range(TINY.num_layers), part)) for part in parts
    )
    counts = dict.fromkeys(range(TINY.num_layers), TINY.num_experts)
    with asking.opened(placement=Placement(counts, names, owned), local_experts=None) as engine:
        assert tokens(engine) == expected
        assert asking.rings.count >= NUM_TOKENS - 1
        assert [each.name for each in threading.enumerate()].count("dflash-mail") == 1
        phases = [engine.stats().owners[name].phases[Phase.DECODE] for name in names[1:]]
        assert all(each.pairs for each in phases)
        assert not losses(engine)


def test_a_mailbox_may_be_asked_for_and_a_daemon_may_have_none(asking: Asking) -> None:
    settings = replace(asking.settings, ipc_transport="device")
    asking.start(DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT="shared")
    with pytest.raises(HandshakeRefused):
        asking.opened(settings=settings)
    with asking.opened() as engine:
        tokens(engine, 3)
        assert not asking.rings.count


def test_a_daemon_sleeps_between_two_texts(asking: Asking) -> None:
    process = psutil.Process(asking.start().pid)
    settings = replace(asking.settings, ipc_transport="device")
    with asking.opened(settings=settings) as engine:
        tokens(engine)
        assert asking.rings.count >= NUM_TOKENS - 1
        time.sleep(0.5)
        before, began_s = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(4.0)
        used_s = sum(process.cpu_times()[:2]) - before
        assert used_s <= 0.02 * (time.monotonic() - began_s)
        tokens(engine)
        assert not losses(engine)
