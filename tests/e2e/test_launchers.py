"""Daemons of other environments: their own interpreter, libraries, variables and settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.settings import DaemonSetting, Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.cli.main import main
from support.environments import (
    NEEDED_BY_DAEMONS,
    install,
    make_environment,
    versions,
    write_launcher,
)
from support.processes import own_children, run_cli, run_main
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

IDS = "1,2,3,4,5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@pytest.fixture(scope="module")
def without_numba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what a daemon needs, and no numba."""
    return make_environment(tmp_path_factory.mktemp("env") / "other", linked=NEEDED_BY_DAEMONS)


def generate(model: Path) -> tuple[str | Path, ...]:
    return ("generate", model, "--token-ids", IDS, "-n", "4", "--json")


def generated(model: Path, *arguments: str | Path, **extra: str) -> dict[str, object]:
    """By a parent that is this process."""
    return record_of(run_main(main, *generate(model), *arguments, **extra))


def record_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    record: dict[str, object] = json.loads(done.stdout)
    return {**record, "stderr": done.stderr}


def check_slow_daemon(record: dict[str, object], python: Path) -> None:
    """It computed, with the reference backend, and everybody was told."""
    owners, events, tokens = record["owners"], record["events"], record["tokens"]
    assert isinstance(owners, dict)
    assert isinstance(events, list)
    assert isinstance(tokens, list)
    assert owners["cpu0"]["requests"] > 0
    assert [event["kind"] for event in events] == ["numeric_class_differs"]
    assert "reference" in events[0]["reason"]
    warned = rf"dflash-daemon: {re.escape(str(python))}\b.*No module named 'numba'.*\breference\b"
    assert re.search(warned, str(record["stderr"]))
    assert len(tokens) == 4


def test_a_daemon_without_numba_computes_with_the_reference_backend(
    model: Path, without_numba: Path
) -> None:
    """The parent is a process too, since the daemon writes to where its parent does."""
    done = run_cli(
        *generate(model), DFLASH_MOE_EXPERT_COMPUTE_DAEMONS=f"cpu@{without_numba}"
    )  # fmt: skip
    check_slow_daemon(record_of(done), without_numba)


def test_its_bits_are_ours_if_we_compute_alike(
    model: Path, without_numba: Path, tmp_path: Path
) -> None:
    alone = generated(model, "--backend", "reference")
    file = tmp_path / "moe.toml"
    file.write_text(f'[[daemon]]\nlauncher = "{without_numba}"\nname = "other"\nthreads = 1\n')
    record = generated(model, "--backend", "reference", "--settings", file)
    assert record["events"] == []
    assert isinstance(record["owners"], dict)
    assert record["owners"]["other"]["requests"] > 0
    assert record["tokens"] == alone["tokens"]


def test_kernels_that_are_asked_for_by_name_are_refused_in_one_line(
    model: Path, without_numba: Path
) -> None:
    command = [str(without_numba), "-P", "-m", "dflash_daemon", str(model), "--backend", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    python = re.escape(str(without_numba))
    error = rf"dflash-daemon: error: {python}\b.*No module named 'numba'.* backend reference\n"
    assert re.fullmatch(error, done.stderr)


def test_nothing_of_our_environment_that_leads_to_libraries_reaches_it(
    model: Path, without_numba: Path, tmp_path: Path
) -> None:
    """Every daemon notes the environment that it was started with."""
    notes = {}
    daemons = []
    for name, variables in (("first", "{}"), ("second", '{ CUDA_VISIBLE_DEVICES = "1" }')):
        notes[name] = tmp_path / name
        launcher = write_launcher(
            tmp_path / f"{name}.sh", without_numba, before=f'env > "{notes[name]}"'
        )
        daemons.append(f'[[daemon]]\nname = "{name}"\nlauncher = "{launcher}"\nenv = {variables}\n')
    file = tmp_path / "moe.toml"
    file.write_text("".join(daemons))
    leaks = {
        "LD_LIBRARY_PATH": "/opt/rocm/lib",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HIP_VISIBLE_DEVICES": "7",
        "ROCR_VISIBLE_DEVICES": "7",
        "CUDA_VISIBLE_DEVICES": "7",
        "CUDA_PATH": "/usr/local/cuda",
    }
    record = generated(model, "--settings", file, "--ipc-batch-capacity", "77", **leaks)
    assert isinstance(record["owners"], dict)
    assert {"first", "second"} <= set(record["owners"])
    seen = {
        name: dict(line.split("=", 1) for line in path.read_text().splitlines())
        for name, path in notes.items()
    }
    for name, environment in seen.items():
        expected = {"second": {"CUDA_VISIBLE_DEVICES": "1"}}.get(name, {})
        assert {n: environment[n] for n in leaks if n in environment} == expected
        assert environment["PATH"] == os.environ["PATH"]
        assert environment["DFLASH_MOE_EXPERT_COMPUTE_IPC_BATCH_CAPACITY"] == "77"
        assert "DFLASH_MOE_EXPERT_COMPUTE_IPC_DEADLINE_MS" not in environment  # the parent's


@pytest.mark.parametrize(
    ("linked", "with_ours", "message"),
    [
        ((), False, "No module named dflash_daemon"),
        ((), True, "No module named"),
        pytest.param(
            ("numpy",),
            True,
            "No module named",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["empty", "without libraries", "without most"],
)
def test_an_environment_that_lacks_more_fails_with_the_reason_in_one_line(
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    linked: tuple[str, ...],
    with_ours: bool,
    message: str,
) -> None:
    python = make_environment(tmp_path / "env", linked=linked, with_ours=with_ours)
    done = run_main(main, *generate(model), "--daemon", f"cpu@{python}")
    assert done.returncode == 1
    assert re.fullmatch(r"dflash-moe: error: .*\bcpu0\b.* exit code 1\b.*\n", done.stderr)
    # It may have been started again before the first failure was told.
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert all(message in line for line in lines)


def test_daemons_have_names_and_cores_of_their_own(model: Path) -> None:
    core = min(os.sched_getaffinity(0))
    daemons = [
        DaemonSetting("cpu", name="a", cores=str(core), threads=2),
        DaemonSetting("cpu", name="b"),
    ]
    settings = replace(load_settings(), ipc_transport="stream")
    with Engine.open(model, daemons=daemons, backend="reference", settings=settings) as engine:
        engine.logits([1, 2, 3])
        assert {"a", "b"} <= set(engine.stats().owners)


def test_an_engine_takes_from_the_settings_what_it_is_not_told(model: Path, run_dir: Path) -> None:
    settings = Settings(
        daemons=(DaemonSetting("cpu"),),
        ipc_required=True,
        ipc_transport="stream",
        run_dir=str(run_dir),
    )
    with Engine.open(model, settings=settings, backend="reference", daemons=()) as engine:
        engine.logits([1, 2, 3])
        assert set(engine.stats().owners) == {"local"}
    for require_daemons in (None, False):
        with Engine.open(
            model, settings=settings, backend="reference", require_daemons=require_daemons
        ) as engine:
            engine.logits([1, 2, 3])
            assert set(engine.stats().owners) == {"cpu0"}
            [daemon] = own_children()
            daemon.kill()
            if require_daemons is None:
                with pytest.raises(DaemonUnavailable):
                    engine.logits([1, 2, 3])
            else:
                engine.logits([1, 2, 3])
                assert "fallback" in engine.stats().owners


def test_a_daemon_that_refuses_its_settings_is_reported(model: Path) -> None:
    daemon = DaemonSetting("cpu", environment=(("DFLASH_MOE_NO_SUCH", "1"),))
    with pytest.raises(DaemonUnavailable, match=r"\bcpu0\b.* exit code 2\b"):
        Engine.open(model, daemons=[daemon], backend="reference")


@pytest.mark.slow
def test_with_an_environment_of_its_own_and_other_versions(model: Path, tmp_path: Path) -> None:
    """Nothing is linked: pip installs it, some of it a version older than ours."""
    python = make_environment(tmp_path / "env")
    ours = versions(Path(sys.executable), ["numpy", "psutil", "pyzmq"])
    older = [f"{name}<{version}" for name, version in ours.items()]
    why_not = install(python, ["msgpack", "xxhash", "gguf", *older], timeout_s=240)
    if why_not is not None:
        pytest.skip(f"no package registry: {why_not}")
    theirs = versions(python, list(ours))
    assert not set(ours.items()) & set(theirs.items())
    done = run_cli(*generate(model), "--daemon", f"cpu@{python}")
    check_slow_daemon(record_of(done), python)
    doctor = run_cli("doctor", "--daemon", f"cpu@{python}", "--json")
    assert doctor.returncode == 0, doctor.stderr
    launchers = json.loads(doctor.stdout)["launchers"]
    assert {name: launchers[1]["packages"][name] for name in theirs} == theirs
    backends = launchers[1]["backends"]
    assert backends["reference"] is None
    assert "numba" in backends["cpu"]
    assert "CuPy" in backends["cuda"]
