"""What another class computed for a lost daemon is not reused; what the same class computed is.

Logits depend on weights, tokens and the class map alone, which leaves out lost owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.logprobs import bits_of
from support.processes import running_daemon, wait_until
from support.random_gguf import END_OF_TEXT_ID, write_model
from support.random_models import write_qwen3moe
from support.random_qwen35moe import SHAPES

pytestmark = pytest.mark.e2e

NUM_TOKENS, KILL_AFTER = 8, 3
ON_CPU = ("--device", "cpu", "--threads", "1")

Daemon = Callable[[], AbstractContextManager["Popen[str]"]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def endpoint(run_dir: Path) -> Iterator[str]:
    yield f"ipc://{run_dir}/daemon.sock"
    for left in run_dir.glob("daemon.sock*"):  # what is killed cannot clean up
        left.unlink()


def attention_model(folder: Path) -> Path:
    return write_qwen3moe(folder / "m.gguf", TINY, seed=4, tensor_type="Q8_0")


def recurrent_model(folder: Path) -> Path:
    """Its sequences cannot be cut: it is gone on from checkpoints."""
    return write_model(
        folder / "m.gguf", replace(SHAPES[0], vocab_size=300), seed=4, tokenizer="bytes"
    )


def prompt_of(engine: Engine) -> list[int]:
    """It ends in a turn of its own, where a checkpoint is worth its memory."""
    ids = [each % engine.spec.vocab_size for each in range(1, 80)]
    return [*ids, min(END_OF_TEXT_ID, engine.spec.vocab_size - 1), 5, 6, 7]


def opened(model: Path, endpoint: str, **options: Any) -> Engine:
    # A busy machine does not lose a daemon that lives.
    patient = replace(load_settings(), deadline_ms=20_000, step_limit_ms=2_000)
    settings = replace(patient, **options.pop("settings", {}))
    return Engine.open(
        model, connect=[endpoint], local_experts=0, threads=1, settings=settings, **options
    )


def written(engine: Engine, prompt: Sequence[int], *, kill: Popen[str] | None = None) -> list[int]:
    """Token ids of a generation that reuses what it can; `kill` is ended after some of them."""
    tokens = []
    options: dict[str, Any] = {"ignore_eos": True, "reuse_prefix": True}
    for token in engine.generate(prompt, NUM_TOKENS, **options):
        tokens.append(token.token_id)
        if len(tokens) == KILL_AFTER and kill is not None:
            kill.kill()
            kill.wait()
    return tokens


def check_reuse(
    undo: ExitStack, daemon: Daemon, open_engine: Callable[[], Engine], *, in_step_order: bool
) -> None:
    """A daemon of another class than what computes for it while it is lost, within a run: in any
    phase, or in prompts alone."""
    first = undo.enter_context(daemon())
    engine = undo.enter_context(open_engine())
    prompt = prompt_of(engine)
    longer = [*prompt, *written(engine, prompt, kill=first), *prompt[:70]]
    before = engine.stats().hits.other_class
    assert (before > 0) != in_step_order
    for _ in range(2):  # computed before the loss, and no more than that
        written(engine, longer)
        assert engine.last_generation.num_reused_tokens <= len(prompt) + KILL_AFTER
        assert engine.stats().hits.other_class > before
    undo.enter_context(daemon())
    wait_until(lambda: not engine.stats().owners["link0"].is_lost, "the daemon to be back")
    found = bits_of(engine, longer, reuse=True)
    num_reused = engine.last_generation.num_reused_tokens
    assert 0 < num_reused <= len(prompt) + KILL_AFTER
    fresh = undo.enter_context(open_engine())
    assert bits_of(fresh, longer, reuse=False) == found
    assert bits_of(engine, longer, reuse=True) == found
    assert engine.last_generation.num_reused_tokens >= num_reused


@pytest.mark.parametrize(
    "write", [pytest.param(attention_model, marks=pytest.mark.slow), recurrent_model]
)
def test_a_processors_fallback_of_another_class(
    write: Callable[[Path], Path], tmp_path: Path, endpoint: str
) -> None:
    model = write(tmp_path)
    daemon = partial(running_daemon, model, endpoint, [*ON_CPU, "--backend", "reference"])
    with ExitStack() as undo:
        parent = partial(opened, model, endpoint, backend="cpu")
        check_reuse(undo, daemon, parent, in_step_order=False)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["off", "auto"])
def test_a_gpus_experts_computed_by_the_parents_processor(
    tmp_path: Path, endpoint: str, gpus: EmulatedGpus, offload: str
) -> None:
    model = attention_model(tmp_path)
    module, settings = "support.emulated_daemon", {"prefill_offload": offload}
    daemon = partial(running_daemon, model, endpoint, ["--device", "cuda:0"], module=module)
    with ExitStack() as undo:
        check_reuse(
            undo,
            daemon,
            partial(opened, model, endpoint, device="cuda:0", context=256, settings=settings),
            in_step_order=True,
        )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_fallback_of_the_same_class_keeps_reuse_unless_sums_were_rounded(
    tmp_path: Path, endpoint: str, dtype: str
) -> None:
    model, settings = attention_model(tmp_path), {"ipc_dtype": dtype}
    with (
        running_daemon(model, endpoint, [*ON_CPU, "--backend", "cpu"]) as daemon,
        opened(model, endpoint, backend="cpu", settings=settings) as engine,
    ):
        prompt = prompt_of(engine)
        longer = [*prompt, *written(engine, prompt, kill=daemon)]
        assert engine.stats().owners["fallback"].requests > 0
        found = bits_of(engine, longer, reuse=True)
        is_exact = dtype == "f32"
        assert (engine.last_generation.num_reused_tokens == len(longer) - 1) == is_exact
        assert (engine.stats().hits.other_class == 0) == is_exact
    if is_exact:
        with Engine.open(model, backend="cpu", threads=1) as fresh:
            assert bits_of(fresh, longer, reuse=False) == found
