"""A daemon says that it is ready when every kernel of its file has run, and not before."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from dflash_runtime import Engine
from support.processes import START_S, running_daemon
from support.random_models import ODD_SHAPES, write_qwen3moe
from support.service_manager import ServiceManager, service_manager

pytestmark = pytest.mark.e2e

COLD_S = 240.0
"""Longest that compiling the kernels of one type may take on a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


def cold(tmp_path: Path, manager: ServiceManager) -> dict[str, str]:
    """The environment of a daemon under a service manager that has compiled nothing yet."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    return {**manager.environment(), "DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR": str(cache)}


def test_with_warm_kernels_it_is_ready_at_once(model: Path, run_dir: Path, tmp_path: Path) -> None:
    with (
        service_manager(tmp_path) as manager,
        running_daemon(model, f"ipc://{run_dir}/d.sock", **manager.environment()) as daemon,
    ):
        ready = manager.wait_for("READY")
        assert f"ipc://{run_dir}/d.sock" in ready["STATUS"]
        assert manager.told[0]["STATUS"].startswith("compile ")
        daemon.terminate()
        manager.wait_for("STOPPING")
        assert daemon.wait(timeout=10) == 0


@pytest.mark.slow
def test_it_is_ready_once_its_kernels_are_compiled_and_then_computes_at_once(
    model: Path, run_dir: Path, tmp_path: Path
) -> None:
    with service_manager(tmp_path) as manager:
        environment = cold(tmp_path, manager)
        endpoint = f"ipc://{run_dir}/d.sock"
        with running_daemon(model, endpoint, **environment) as daemon:
            manager.wait_for("READY", within_s=COLD_S)
            starting = manager.told[:-1]
            stages = [each["STATUS"].split() for each in starting]
            assert {stage for stage, _ in stages} == {"compile"}
            num_done, num_jobs = map(int, stages[-1][1].split("/"))
            assert num_done == num_jobs > 1
            assert all("READY" not in each for each in starting)
            done = list((tmp_path / "cache").rglob("*.done"))
            assert len(done) == num_jobs, "all of it is compiled"
            before_s = max(path.stat().st_mtime for path in (tmp_path / "cache").rglob("*"))
            with Engine.open(model, connect=[endpoint]) as engine:
                assert len(engine.logits([1, 2, 3])) == 3
                assert engine.stats().owners["link0"].requests > 0
            after_s = max(path.stat().st_mtime for path in (tmp_path / "cache").rglob("*"))
            assert after_s == before_s, "a parent's requests compile nothing"
            daemon.terminate()
            assert daemon.wait(timeout=10) == 0
            assert daemon.stderr is not None
            said = daemon.stderr.read().splitlines()
            assert "dflash-daemon: ready" in said
            assert any(line.startswith("dflash-daemon: compile ") for line in said)


@pytest.mark.slow
def test_a_parent_that_comes_meanwhile_is_told_how_far_it_is_and_waits(
    model: Path, run_dir: Path, tmp_path: Path
) -> None:
    """Its timeout is shorter than compiling takes."""
    with service_manager(tmp_path) as manager:
        environment = cold(tmp_path, manager)
        endpoint = f"ipc://{run_dir}/d.sock"
        stages: list[str] = []

        def on_progress(owner: str, stage: str, num_done: int, num_total: int) -> None:
            stages.append(f"{owner} {stage}")
            manager.hear_all(0.02)  # what a manager does not hear soon is lost

        with (
            running_daemon(model, endpoint, **environment) as daemon,
            Engine.open(model, connect=[endpoint], on_progress=on_progress) as engine,
        ):
            if not any("READY" in each for each in manager.told):
                assert "READY" in manager.wait_for("READY", within_s=COLD_S)
            assert len(engine.logits([1, 2, 3])) == 3
            assert engine.stats().events == []
            assert "link0 compile" in stages
            daemon.terminate()
            daemon.wait(timeout=START_S)


@pytest.mark.slow
def test_one_that_is_told_to_stop_while_it_compiles_was_never_ready(
    model: Path, run_dir: Path, tmp_path: Path
) -> None:
    with service_manager(tmp_path) as manager:
        environment = cold(tmp_path, manager)
        with running_daemon(model, f"ipc://{run_dir}/d.sock", **environment) as daemon:
            manager.wait_for("STATUS")
            time.sleep(0.5)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(timeout=10) == 0
            manager.hear_all(0.1)
        assert not any("READY" in each for each in manager.told)
    assert list(run_dir.iterdir()) == []
