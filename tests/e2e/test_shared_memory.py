"""Daemons that are reached through shared memory: same bits, nothing left, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.errors import HandshakeRefused
from dflash_protocol.ids import F32Array
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from support.processes import running_daemon
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

pytestmark = pytest.mark.e2e

IDS = [int(each) for each in np.random.default_rng(0).integers(0, BLOCK_32_SHAPE.vocab_size, 40)]
CHUNKS = [30, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_qwen3moe(path, BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")


def logits(model: Path, transport: str, mode: str, *, num_daemons: int) -> F32Array:
    settings = replace(load_settings(), ipc_transport=transport, ipc_mode=mode)
    with Engine.open(
        model, backend="cpu", daemons=["cpu"] * num_daemons, settings=settings
    ) as engine:
        found = engine.logits(IDS, CHUNKS)
        owners = engine.stats().owners
    expected = "stream" if transport == "stream" else "shared"
    daemons = [owner for owner in owners.values() if owner.kind == "daemon"]
    assert len(daemons) == num_daemons
    assert {owner.transport for owner in daemons} <= {expected}
    assert not any(owner.checksum_failures + owner.stale for owner in daemons)
    return found


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("auto", "auto"),
        pytest.param("shared", "stream", marks=pytest.mark.slow),
        pytest.param("shared", "batched", marks=pytest.mark.slow),
        pytest.param("stream", "stream", marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_the_transport_nor_on_the_mode(
    model: Path, transport: str, mode: str
) -> None:
    """See also test_exactness, where all of it is drawn at random."""
    expected = logits(model, "auto", "auto", num_daemons=0)
    found = logits(model, transport, mode, num_daemons=2)
    assert np.array_equal(found, expected)


def test_a_daemon_started_by_somebody_else_shares_memory_too(model: Path, run_dir: Path) -> None:
    listen = f"ipc://{run_dir}/daemon"
    with running_daemon(model, listen):
        with Engine.open(model, backend="cpu", connect=[listen]) as engine:
            engine.logits(IDS[:4])
            (owner,) = (each for each in engine.stats().owners.values() if each.kind == "daemon")
            assert owner.transport == "shared"
            assert not list(run_dir.glob("ring-*"))
        with Engine.open(model, backend="cpu", connect=[listen]) as engine:
            engine.logits(IDS[:4])


def test_memory_that_is_required_and_cannot_be_shared_is_an_error(model: Path) -> None:
    settings = replace(load_settings(), ipc_transport="shared")
    listen = "tcp://127.0.0.1:47391"
    with (
        running_daemon(model, listen),
        pytest.raises(HandshakeRefused, match="memory"),
        Engine.open(model, backend="cpu", connect=[listen], settings=settings),
    ):
        pass


def test_what_a_dead_parent_offered_is_removed_when_a_daemon_starts(
    model: Path, run_dir: Path
) -> None:
    leftover = run_dir / f"ring-{2**22 + 1}-1-{32 * '0'}"
    leftover.touch(0o600)
    with running_daemon(model, f"ipc://{run_dir}/daemon"):
        assert not leftover.exists()
