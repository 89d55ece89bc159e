"""``dflash-moe doctor``: what is shown, and when its exit code is 1."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.cli.main import main
from support.environments import NEEDED_BY_DAEMONS, make_environment, write_launcher
from support.processes import run_cli, run_main, running_daemon
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e


def diagnosis(*arguments: str | Path, **extra: str) -> tuple[int, dict[str, Any]]:
    done = run_main(main, "doctor", "--json", *arguments, **extra)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_this_interpreter_and_machine_are_shown() -> None:
    code, found = diagnosis()
    assert (code, found["problems"], found["daemons"]) == (0, [], [])
    [here] = found["launchers"]
    assert here["launcher"] == sys.executable
    assert set(here["backends"]) == {"reference", "cpu", "cuda", "hip"}
    assert (here["backends"]["reference"], here["backends"]["cpu"]) == (None, None)
    assert {"numpy", "numba", "llvmlite", "pyzmq", "msgpack"} <= set(here["packages"])
    assert here["cpu"]["processors"] == len(os.sched_getaffinity(0))
    assert here["cpu"]["tier"]
    assert 0 < here["memory"]["free_bytes"] < here["memory"]["total_bytes"]
    assert here["gpus"] or here["why_no_gpu"]
    machine = found["machine"]
    assert machine["run_directory"]["path"] == os.environ["DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR"]
    assert machine["run_directory"]["filesystem"] != "unknown"
    assert machine["open_files"]["soft"] > 0
    assert found["transports"] == {"stream": None, "shared": None}


def test_the_report_for_people_says_the_same() -> None:
    done = run_cli("doctor", "--daemon", "cpu")
    assert done.returncode == 0, done.stderr
    assert f"launcher       {sys.executable} (this interpreter)" in done.stdout
    assert "daemon         cpu0: usable, cpu kernels" in done.stdout
    assert done.stdout.endswith("All that is asked for can be used.\n")


@pytest.mark.parametrize(
    ("device", "arguments"),
    [
        ("hip:7", ("--device", "hip:7")),
        pytest.param("cuda:1000", ("--daemon", "cuda:1000"), marks=pytest.mark.slow),
    ],
)
def test_a_device_that_cannot_be_used_is_a_problem(device: str, arguments: tuple[str, ...]) -> None:
    done = run_main(main, "doctor", *arguments)
    assert done.returncode == 1, done.stderr
    what = "daemon cuda0" if "--daemon" in arguments else "this interpreter"
    assert f"problem        {what}: {device}: " in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("serve", "--port", "0")])
def test_a_parent_on_a_device_that_cannot_be_used_says_why_in_one_line(
    command: tuple[str, ...],
) -> None:
    done = run_main(main, *command, "--device", "cuda:1000")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "dflash-moe: error: device cuda:1000: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_every_launcher_is_asked_in_the_environment_its_daemon_would_have(
    tmp_path: Path,
) -> None:
    without_numba = make_environment(tmp_path / "without-numba", linked=NEEDED_BY_DAEMONS)
    empty = make_environment(tmp_path / "empty", with_ours=False)
    script = write_launcher(tmp_path / "launch.sh", Path(sys.executable))
    silent = tmp_path / "silent.sh"
    silent.write_text("#!/bin/sh\necho '{\"backends\": 1}'\n")
    silent.chmod(0o700)
    file = tmp_path / "moe.toml"
    launchers = [without_numba, empty, script, silent, Path("/bin/false"), tmp_path / "nothing"]
    file.write_text(
        "[[daemon]]\n[[daemon]]\n"
        + "".join(f'[[daemon]]\nlauncher = "{launcher}"\n' for launcher in launchers)
    )
    code, found = diagnosis("--settings", file)
    assert code == 1
    assert [each["launcher"] for each in found["launchers"]] == [
        sys.executable, *map(str, launchers[:-1])
    ]  # fmt: skip
    reasons = {each["name"] or "nothing": each["why_not"] for each in found["daemons"]}
    assert reasons == {
        "cpu0": None,
        "cpu1": None,
        "cpu2": None,
        "cpu3": "numpy is not installed",
        "cpu4": None,
        "cpu5": "its report is not that of a daemon's launcher",
        "cpu6": "it ended with exit code 1: no reason given",
        "nothing": f"daemon launcher '{tmp_path}/nothing': No such file or directory",
    }
    kernels = [each.get("backend") for each in found["daemons"][:3]]
    assert kernels == ["cpu", "cpu", "reference"]
    assert found["launchers"][1]["backends"]["cpu"] == "numba is not installed"
    assert len(found["problems"]) == 4


def test_a_default_launcher_and_a_transport_are_asked_for_too(tmp_path: Path) -> None:
    without_numba = make_environment(tmp_path / "env", linked=NEEDED_BY_DAEMONS)
    assert diagnosis("--ipc-bin", without_numba)[0] == 0
    code, found = diagnosis("--ipc-bin", without_numba, "--ipc-transport", "shared")
    assert code == 1
    assert found["problems"] == [
        "daemon of the default launcher: shared memory needs numba, which is not installed"
    ]


def test_what_is_asked_for_and_cannot_be_had_is_a_problem(tmp_path: Path, run_dir: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    code, found = diagnosis(
        "--connect", f"ipc://{run_dir}/nobody", "--connect", "tcp://127.0.0.1:1",
        "--connect", f"ipc://{shared}/d.sock", "--ipc-work-dir", closed, "--cpu-tier", "neondot",
    )  # fmt: skip
    assert code == 1
    problems = "\n".join(found["problems"])
    assert f"ipc://{run_dir}/nobody: nothing answers: No such file" in problems
    assert "tcp://127.0.0.1:1: nothing answers: Connection refused" in problems
    assert f"run directory {closed} is open to others; chmod 700 it" in problems
    assert "CPU tier neondot: this" in problems
    assert f"ipc://{shared}/d.sock: other accounts may write to the folder {shared};" in problems
    assert len(found["problems"]) == 5


def test_a_daemon_that_is_running_answers(tmp_path: Path, run_dir: Path) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=10)
    endpoint = f"ipc://{run_dir}/d.sock"
    with running_daemon(model, endpoint, ["--backend", "reference"]):
        code, found = diagnosis("--connect", endpoint)
        told = diagnosis(model, "--connect", endpoint)
        timed = diagnosis(model, "--connect", endpoint, "--ipc-transport", "stream")
        other = write_qwen3moe(tmp_path / "other.gguf", ODD_SHAPES[1], seed=10)
        refused = diagnosis(other, "--connect", endpoint)
        shown = run_main(
            main, "doctor", model, "--connect", endpoint, "--ipc-transport", "stream"
        ).stdout
    answers = {"endpoint": endpoint, "why_not": None, "offer": None, "request_s": None}
    assert (code, found["connections"]) == (0, [answers])
    [connection] = told[1]["connections"]
    assert (told[0], connection["why_not"]) == (0, None)
    assert connection["offer"]["free_bytes"] > 0
    assert connection["request_s"] is None  # memory is shared
    assert 0 < timed[1]["connections"][0]["request_s"] < 1
    assert f"{endpoint}: answers, {connection['offer']['device_name']}, " in shown
    assert " us to ask it\n" in shown
    assert (refused[0], len(refused[1]["problems"])) == (1, 1)
    assert " refused: this daemon runs model" in refused[1]["problems"][0]


def test_a_bad_setting_is_misuse_not_a_finding() -> None:
    done = run_main(main, "doctor", "--ipc-dtype", "f64")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == ("dflash-moe: error: --ipc-dtype='f64': must be one of f32, f16, bf16\n")
