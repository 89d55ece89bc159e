"""A process in a memory cgroup: the right text, or one line that says what would fit; never killed.

The cgroup has no swap. The model's pages count in it, as they are dropped from the page cache
before; they are read again whenever the memory is needed for something else.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.memory_cgroup import drop_pages, memory_cgroup

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.placement import OwnedExperts
from dflash_runtime import Engine
from dflash_runtime.placement.split import make_placement
from support import moving_parent
from support.emulated_gpu import TINY
from support.faults import greedy
from support.processes import START_S, cli_command, environment, wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe

pytestmark = pytest.mark.e2e

MIB = 1 << 20
NUM_TOKENS = 6
CONTEXT = 4096
SHAPE = Qwen3MoeShape(
    "large cache",
    num_layers=4,
    hidden_size=256,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    num_experts=8,
    num_experts_used=2,
    ffn_size=256,
    vocab_size=300,
    context_length=CONTEXT,
)
"""32 KiB of keys and values for a position in f16: 128 MiB in all."""
LARGE = Qwen3MoeShape(
    **{name: getattr(SHAPE, name) for name in SHAPE.__slots__}
    | {"num_experts": 64, "ffn_size": 1024}
)
"""The same with 204 MiB of experts in Q8_0."""
LENGTHS = (5, 700, 3000)
"""Of prompts."""


@dataclass(frozen=True)
class Written:
    """A model, and what it writes without a limit after a prompt of each length."""

    path: Path
    expected: dict[int, list[int]]


def prompt_of(length: int) -> list[int]:
    return [(7 * index + 11) % SHAPE.vocab_size for index in range(length)]


def written(folder: Path, shape: Qwen3MoeShape) -> Written:
    path = folder / f"{shape.num_experts}.gguf"
    write_qwen3moe(path, shape, seed=5, tensor_type="Q8_0", tokenizer="bytes")
    # Also compiles the kernels.
    with Engine.open(path, kv_type="f16", daemons=["cpu"]):
        pass
    with Engine.open(path, kv_type="f16") as engine:
        return Written(
            path, {each: greedy(engine, prompt_of(each), NUM_TOKENS) for each in LENGTHS}
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("model"), LARGE)


def run_within(limit_mib: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """``dflash-moe`` in a cgroup of its own; skips the test where none can be made."""
    with memory_cgroup(limit_mib * MIB) as group:
        if group is None:
            pytest.skip("may not make a memory cgroup")
        done = subprocess.run(
            group.command([*cli_command(), *map(str, arguments)]),
            env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=4 * START_S, check=False,
        )  # fmt: skip
        assert group.num_kills == 0, (limit_mib, arguments[:1], arguments[-4:])
    return done


def generate(
    model: Written, limit_mib: int, length: int, *arguments: str
) -> subprocess.CompletedProcess[str]:
    drop_pages(model.path)
    prompt = ",".join(map(str, prompt_of(length)))
    return run_within(
        limit_mib, "generate", model.path, "--token-ids", prompt, "-n", str(NUM_TOKENS), "--json",
        "--temp", "0", *arguments,
    )  # fmt: skip


def assert_right_or_refused(
    model: Written, done: subprocess.CompletedProcess[str], length: int
) -> str:
    """Returns the line with which it was refused; empty if there is text."""
    if done.returncode == 0:
        assert json.loads(done.stdout)["tokens"] == model.expected[length]
        return ""
    assert done.returncode in (1, 2), (done.returncode, done.stderr)
    assert done.stdout == ""
    lines = [each for each in done.stderr.splitlines() if "error:" in each]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_without_room_for_a_process_one_line_says_so(model: Written) -> None:
    done = generate(model, 100, LENGTHS[0])
    line = assert_right_or_refused(model, done, LENGTHS[0])
    assert len(done.stderr.splitlines()) == 1
    assert "no context fits" in line


def test_a_context_that_was_not_asked_for_is_what_fits(model: Written) -> None:
    done = generate(model, 310, LENGTHS[1], "--kv-type", "f16")
    assert assert_right_or_refused(model, done, LENGTHS[1]) == ""
    said = re.search(r"a context of (\d+) fits", done.stderr)
    assert said is not None
    assert LENGTHS[1] < int(said[1]) < CONTEXT


def test_the_context_that_is_said_to_fit_does(model: Written) -> None:
    options = ("--kv-type", "f16", "-c")
    done = generate(model, 386, LENGTHS[2], *options, str(CONTEXT))
    said = re.search(r"a context of ([\d,]+) fits", assert_right_or_refused(model, done, 3000))
    assert said is not None
    context = said[1].replace(",", "")
    assert int(context) > LENGTHS[2] + NUM_TOKENS
    done = generate(model, 386, LENGTHS[2], *options, context)
    assert assert_right_or_refused(model, done, LENGTHS[2]) == ""


@pytest.mark.parametrize("limit_mib", [100, 170])
def test_a_daemon_without_room_says_so(model: Written, run_dir: Path, limit_mib: int) -> None:
    done = run_within(limit_mib, "daemon", model.path, "--listen", f"ipc://{run_dir}/d.sock")
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1


def test_experts_move_while_the_limit_falls_to_what_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is that of a new engine with its placement; the GPU is emulated."""
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    moving_parent.install_moving_gpu(monkeypatch, path)
    with moving_parent.opened(path):
        pass  # compiles the kernels
    with memory_cgroup(1024 * MIB) as group:
        if group is None:
            pytest.skip("may not make a memory cgroup")
        program = [sys.executable, "-m", "support.moving_parent", str(path), str(group.limit)]
        done = subprocess.run(
            group.command(program), env=environment(), capture_output=True, text=True,
            timeout=4 * START_S, check=False,
        )  # fmt: skip
        assert group.num_kills == 0
        assert int(group.limit.read_text()) < 1024 * MIB
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert len(rounds) == moving_parent.NUM_ROUNDS
    with GgufFile.open(path) as file:
        moe = read_spec(file).moe
    for each in rounds[:: moving_parent.NUM_ROUNDS // 4]:
        owned = {
            name: OwnedExperts.from_lists({int(layer): ids for layer, ids in by_layer.items()})
            for name, by_layer in each["owners"].items()
        }
        with moving_parent.opened(path, make_placement(moe, owned)) as engine:
            assert moving_parent.text_of(engine) == each["text"]


@pytest.mark.parametrize("limit_mib", [560, 600])
def test_experts_without_room_are_read_when_they_are_used(large: Written, limit_mib: int) -> None:
    done = generate(large, limit_mib, LENGTHS[1], "--kv-type", "f16", "-c", "1024")
    assert assert_right_or_refused(large, done, LENGTHS[1]) == ""
    assert re.search(r"memory has room for \d+ of 256 experts", done.stderr)
    disk = json.loads(done.stdout)["disk"]
    assert disk["failed"] == 0
    assert disk["found"] > 0
    assert disk["missed"] > 0
    assert disk["read_bytes"] > 50 * MIB
    assert 64 <= disk["num_slots"] < 256


_GENERATES = """
import json, sys
from pathlib import Path
from dflash_runtime import Engine
path, stop, prompt = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
with Engine.open(path, kv_type="f16", context=1024) as engine:
    texts, slots = [], []
    while not stop.exists():
        tokens = engine.generate(prompt, 6, temperature=0.0, ignore_eos=True)
        texts.append([each.token_id for each in tokens])
        slots.append(engine.stats().disk.num_slots)
        print(slots[-1], flush=True)
print(json.dumps({"texts": texts, "slots": slots}))
"""
_TAKES = """
import time
taken = []
while True:
    taken.append(b"x" * (4 << 20))
    time.sleep(0.25)
"""


@pytest.mark.slow
def test_experts_leave_memory_that_another_program_takes(large: Written, tmp_path: Path) -> None:
    """In the same cgroup, 16 MiB a second."""
    drop_pages(large.path)
    stop, prompt = tmp_path / "stop", json.dumps(prompt_of(LENGTHS[1]))
    generates = [sys.executable, "-c", _GENERATES, str(large.path), str(stop), prompt]
    takes = [sys.executable, "-c", _TAKES]
    with memory_cgroup(600 * MIB) as group:
        if group is None:
            pytest.skip("may not make a memory cgroup")
        command = group.command(generates)
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True
        ) as ours:
            try:
                assert ours.stdout is not None
                before = int(ours.stdout.readline())
                with subprocess.Popen(group.command(takes)) as other:
                    try:
                        while int(ours.stdout.readline()) == before:
                            pass
                    finally:
                        other.kill()
            finally:
                stop.touch()
                said = ours.communicate(timeout=START_S)[0]
        assert group.num_kills == 0
    assert ours.returncode == 0
    found = json.loads(said.splitlines()[-1])
    assert 64 <= min(found["slots"]) < before == found["slots"][0]
    assert all(text == large.expected[LENGTHS[1]] for text in found["texts"])


@pytest.mark.slow
def test_what_is_said_to_be_needed_is_enough_to_compile_kernels(
    model: Written, tmp_path: Path
) -> None:
    wish = ("--kv-type", "f16", "-c", "64")
    said = re.search(r"needs (\d+) MiB", generate(model, 100, LENGTHS[0], *wish).stderr)
    assert said is not None
    done = generate(model, int(said[1]) + 4, LENGTHS[0], *wish, "--cache-dir", str(tmp_path))
    assert assert_right_or_refused(model, done, LENGTHS[0]) == ""
    assert any(tmp_path.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [221, 240, 300])
def test_a_daemon_with_less_memory_than_its_experts_serves(
    large: Written, run_dir: Path, limit_mib: int
) -> None:
    drop_pages(large.path)
    listen = f"ipc://{run_dir}/d.sock"
    with memory_cgroup(limit_mib * MIB) as group:
        if group is None:
            pytest.skip("may not make a memory cgroup")
        command = [*cli_command(), "daemon", str(large.path), "--listen", listen]
        with subprocess.Popen(group.command(command), env=environment()) as process:
            try:
                wait_until((run_dir / "d.sock").exists, "the daemon to listen")
                with Engine.open(large.path, kv_type="f16", connect=[listen]) as engine:
                    for length, expected in large.expected.items():
                        assert greedy(engine, prompt_of(length), NUM_TOKENS) == expected
                    assert engine.stats().owners["link0"].pairs > 0
                    assert engine.stats().events == []
            finally:
                process.send_signal(signal.SIGTERM)
                code = process.wait(START_S)
        assert (code, group.num_kills) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_limits(large: Written) -> None:
    """Smaller than the weights among them, and beside a daemon in the same cgroup."""
    rng = random.Random(21)
    num_right = 0
    for _ in range(50):
        limit_mib, length = rng.randrange(64, 700), rng.choice(LENGTHS)
        arguments: list[str] = []
        if rng.random() < 0.5:
            arguments += ["-c", str(rng.randrange(length + NUM_TOKENS, CONTEXT))]
        if rng.random() < 0.3:
            arguments += ["--daemon", "cpu"]
        done = generate(large, limit_mib, length, "--kv-type", "f16", *arguments)
        line = assert_right_or_refused(large, done, length)
        num_right += not line
        is_refused_early = limit_mib < 200 or "context" in line or "position" in line
        assert not line or is_refused_early, (limit_mib, length, arguments, line)
    assert num_right >= 20
