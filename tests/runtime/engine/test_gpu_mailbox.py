"""A parent's steps on a GPU that ask daemons' GPUs through mailboxes, all of them emulated here."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.cupy.parent_mail import ParentMail
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.processes import running_daemon
from support.random_models import write_qwen3moe

pytestmark = pytest.mark.e2e

PROMPT = [int(i) for i in np.random.default_rng(2).integers(0, TINY.vocab_size, 12)]
NUM_TOKENS = 9


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def settings() -> Settings:
    """Emulated kernels take their time."""
    return replace(load_settings(), step_limit_ms=20_000, deadline_ms=20_000)


@pytest.fixture
def daemons(model: Path, run_dir: Path) -> Iterator[list[tuple[str, subprocess.Popen[str]]]]:
    with ExitStack() as undo:
        found = []
        for name in "ab":
            endpoint = f"ipc://{run_dir}/{name}.sock"
            arguments = ["--device", "cuda:0"]
            process = undo.enter_context(
                running_daemon(model, endpoint, arguments, module="support.emulated_daemon")
            )
            found.append((endpoint, process))
        yield found


class Rings:
    """Counts steps that were asked for through mailboxes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        ring = ParentMail.ring

        def counted(mail: ParentMail) -> None:
            self.count += 1
            ring(mail)

        monkeypatch.setattr(ParentMail, "ring", counted)


def tokens(engine: Engine) -> list[int]:
    return [t.token_id for t in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)]


def opened(model: Path, **options: Any) -> Engine:
    return Engine.open(model, device="cuda:0", context=32, **options)


def test_steps_through_mailboxes_have_the_bits_of_a_resident_run(
    model: Path,
    gpus: EmulatedGpus,
    settings: Settings,
    daemons: list[tuple[str, subprocess.Popen[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(model) as engine:
        expected = tokens(engine)
    rings = Rings(monkeypatch)
    for endpoints, num_here in ((daemons[:1], 0), (daemons, 2)):
        with opened(
            model,
            connect=[endpoint for endpoint, _ in endpoints],
            local_experts=num_here,
            require_daemons=True,
            settings=replace(settings, ipc_transport="device"),
        ) as engine:
            rings.count = 0
            assert tokens(engine) == expected
            assert tokens(engine) == expected
            assert rings.count >= 2 * (NUM_TOKENS - 1)
    assert all(not device.num_bytes for device in gpus.opened)
