"""Whatever is wrong with what a user gives: one line, the right exit code, nothing left behind.

The command line is called within this process, except where a process is what is tested.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from dflash_daemon.__main__ import main as daemon_main
from dflash_runtime.cli.main import main
from support.processes import cli_command, environment, run_cli, run_main, running_daemon
from support.random_models import ODD_SHAPES, Qwen3MoeShape, write_qwen3moe

pytestmark = pytest.mark.e2e

SMALL = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, SMALL, seed=1, tokenizer="bytes")


def check_fails(exit_code: int, message: str, *arguments: str | Path, **extra: str) -> None:
    """The program prints nothing but one line that matches `message`, and leaves with that code."""
    check_failure(exit_code, message, run_main(main, *arguments, **extra))


def check_failure(exit_code: int, message: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert re.search(message, lines[0]), lines[0]


@pytest.mark.parametrize("program", ["daemon", "generate"])
def test_a_socket_in_a_folder_of_others_is_neither_made_nor_used(
    model: Path, tmp_path: Path, program: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    endpoint = f"ipc://{shared}/d.sock"
    message = f"error: endpoint {endpoint}: other accounts may write to the folder {shared}; use a"
    if program == "daemon":
        check_failure(2, message, run_main(daemon_main, model, "--listen", endpoint))
    else:
        check_fails(2, message, "generate", model, "-p", "a", "--connect", endpoint)
    assert not list(shared.iterdir())


def write_gguf(path: Path, architecture: str, **keys: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("command", ["generate", "inspect"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "empty|not a GGUF"), (b"<html>" * 100, "not a GGUF")],
    ids=["missing", "empty", "not gguf"],
)
def test_what_is_no_model_file(
    tmp_path: Path, command: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / "x.gguf"
    if content is not None:
        path.write_bytes(content)
    arguments = ["-p", "x"] if command == "generate" else []
    check_fails(1, message, command, path, *arguments)


def test_a_folder_is_no_model_file(tmp_path: Path) -> None:
    check_fails(1, "directory|folder", "inspect", tmp_path)
    check_failure(1, "directory|folder", run_cli("inspect", tmp_path))


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "nosuch", expert_count=4)
    check_fails(1, "'nosuch'.*supported: .*qwen3moe", "inspect", path)


def test_a_dense_model_is_said_to_be_one(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", block_count=1)
    check_fails(1, r"'llama'.*\bdense\b", "generate", path, "-p", "x")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--token-ids", "1,-2"], 2, r"-2\b.*\b1\b"),
        (["--token-ids", "300"], 2, r"\b300\b.*\b0\b.* 0\.\.299"),
        (["--token-ids", "1,x"], 2, "--token-ids"),
        (["--token-ids", "99999999999999999999"], 2, r"--token-ids\b.*large"),
        (["-p", "x", "-n", "0"], 2, r"\b1 or more"),
        (["-p", "x", "-n", "-4"], 2, r"\b1 or more"),
        (["-p", ""], 2, "prompt .*empty"),
        (["-p", "x" * 300], 2, r"\d tokens .*context.* 256 "),
        (["-p", "x", "--context", "100000"], 2, r"\b256\b"),
        ([], 2, "--token-ids"),
        (["-p", "x", "--token-ids", "1"], 2, "--token-ids"),
        (["-p", "x", "--temp", "-1"], 2, "temperature=-1"),
        (["-p", "x", "--top-p", "0"], 2, "top_p"),
        (["-p", "x", "--backend", "gpu"], 2, "gpu"),
        (["-p", "x", "--no-such-flag"], 2, "no-such-flag"),
        (["-p", "x", "--local-experts", "9"], 2, r"layer 0\b.* 4\b"),
        (["-p", "x", "--local-experts", "2"], 2, r"\bdaemon\b"),
        (["-p", "x", "--daemon", "tpu"], 2, "--daemon='tpu'.* DEVICE"),
        (["-p", "x", "--daemon", "cpu@/no/such/python"], 2, "No such file"),
        (["-p", "x", "--daemon", "cpu@/etc/passwd"], 2, "/etc/passwd.*executable"),
        (["-p", "x", "--connect", "http://localhost"], 2, "'http://localhost'.* ipc:///.* tcp:"),
        (["-p", "x", "--connect", "ipc:///" + "d" * 120], 2, r"\b100\b"),
        (["--prompt-file", "/no/such/file"], 2, "No such file"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_misuse_of_generate(
    model: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    check_fails(exit_code, message, "generate", model, *arguments)


def test_a_prompt_that_is_no_utf8(model: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_bytes(b"\xff\xfe")
    check_fails(2, "not UTF-8", "generate", model, "--prompt-file", prompt)


def test_text_for_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=1)
    check_fails(2, "no tokenizer; give token ids", "generate", path, "-p", "x")
    done = run_main(main, "generate", path, "--token-ids", "1,2,3", "-n", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 4


def test_an_endpoint_where_nobody_answers(model: Path, run_dir: Path) -> None:
    check_fails(
        1,
        "nothing answers at ipc://.*nobody.sock",
        "generate", model, "-p", "x", "--connect", f"ipc://{run_dir}/nobody.sock",
        DFLASH_MOE_EXPERT_COMPUTE_CONNECT_TIMEOUT_MS="300",
    )  # fmt: skip


@pytest.mark.skipif(os.getuid() == 0, reason="root may open any socket")
def test_an_endpoint_we_may_not_open(model: Path, run_dir: Path) -> None:
    endpoint = f"ipc://{run_dir}/d.sock"
    with running_daemon(model, endpoint):
        (run_dir / "d.sock").chmod(0)
        check_fails(1, "nothing answers", "generate", model, "-p", "x", "--connect", endpoint)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DFLASH_MOE_EXPERT_COMPUTE_IPC_DEADLINE_MS", "soon"),
        ("DFLASH_MOE_EXPERT_COMPUTE_IPC_BATCH_CAPACITY", "0"),
        ("DFLASH_MOE_NO_SUCH_VARIABLE", "1"),
    ],
)
def test_a_bad_variable_is_named(model: Path, variable: str, value: str) -> None:
    check_fails(2, variable, "generate", model, "-p", "x", **{variable: value})


def test_a_file_cut_anywhere_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    """Through the scanner in one process, every 1 kB; through the command line, a few times."""
    from dflash_protocol.errors import ModelFileError
    from dflash_runtime import Engine

    data = model.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(0, len(data), 1000):
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError) as caught:
            Engine.open(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    for size in (3, 5_000):
        path.write_bytes(data[:size])
        check_fails(1, re.escape(str(path)), "generate", path, "-p", "x")
    path.write_bytes(data[:-1])
    check_failure(1, re.escape(str(path)), run_cli("generate", path, "-p", "x"))
    path.write_bytes(data)
    assert run_main(main, "generate", path, "-p", "x", "-n", "2").returncode == 0


def test_help_has_examples_and_needs_no_model() -> None:
    commands = ("generate", "inspect", "doctor")
    helped = [
        run_cli("daemon", "--help"),  # becomes another program
        run_main(main, "--help"),
        *(run_main(main, command, "--help") for command in commands),
    ]
    for done in helped:
        assert done.returncode == 0
        assert "xample" in done.stdout
    assert re.fullmatch(r"dflash-moe \d+\.\d+\.\d+\n", run_main(main, "version").stdout)


GENERATE = ["generate", "-p", "x", "-n", "3"]


@pytest.mark.parametrize(
    ("redirection", "arguments"),
    [
        (">/dev/full", ["version"]),
        (">/dev/full", ["inspect"]),
        (">/dev/full", GENERATE),
        (">&-", ["inspect"]),
        pytest.param(">&-", GENERATE, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_full_or_closed_stdout_is_no_traceback(redirection: str, arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *cli_command(), *arguments],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if redirection == ">/dev/full":
        assert done.returncode == 1
        assert done.stderr.startswith("dflash-moe: error: ")
        assert "No space left on device" in done.stderr


def test_files_in_the_current_folder_are_not_imported(model: Path, tmp_path: Path) -> None:
    for name in ("random.py", "dflash_daemon.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current folder')")
    done = subprocess.run(
        [sys.executable, "-P", *cli_command()[1:], "generate", str(model), "-p", "x", "-n", "2",
         "--backend", "reference", "--daemon", "cpu"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_tensor_that_the_adapter_would_ignore_is_refused(tmp_path: Path) -> None:
    """A bias that is left out would be a wrong answer, not an error."""
    path = tmp_path / "m.gguf"
    data = write_qwen3moe(path, SMALL, seed=1, tokenizer="bytes").read_bytes()
    path.write_bytes(data.replace(b"blk.0.attn_k_norm.weight", b"blk.0.attn_k_nope.weight"))
    check_fails(1, "attn_k_norm.weight", "inspect", path)
    path.write_bytes(data)
    assert run_main(main, "inspect", path).returncode == 0
