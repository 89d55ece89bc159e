"""Engine as its callers see it: misuse is told in one line, nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.device import CPU, parse_device
from dflash_protocol.errors import ContextExceeded, DaemonUnavailable, SettingsError
from dflash_protocol.settings import Settings, cache_folder
from dflash_runtime import Engine
from dflash_runtime.compute.cpu.captured.step import CpuStep
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.ops import ReferenceOps
from support.processes import START_S, environment, own_children, wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe

SHAPE = Qwen3MoeShape(num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, SHAPE, seed=1, tokenizer="bytes")


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine.open(model, backend="reference") as engine:
        yield engine


def token_ids(engine: Engine, num_tokens: int = 8, **options: Any) -> list[int]:
    tokens = engine.generate(PROMPT, num_tokens, ignore_eos=True, **options)
    return [token.token_id for token in tokens]


@pytest.mark.parametrize(
    "ids",
    [[1.9], ["1"], [[1, 2]], [True + 0.5], "12", b"12", 5, [-1], [300], [2**70], [float("nan")]],
    ids=repr,
)
def test_what_is_no_list_of_token_ids_is_refused(engine: Engine, ids: Any) -> None:
    for use in (lambda: engine.logits(ids), lambda: engine.generate(ids, 4)):
        if use is not None and isinstance(ids, str):
            continue  # a text is a prompt
        with pytest.raises(SettingsError) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert len(token_ids(engine)) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": True},
        {"temperature": -1.0}, {"temperature": "hot"}, {"top_k": 1.5}, {"top_k": -1},
        {"top_p": 0.0}, {"min_p": 2.0}, {"seed": 1.5}, {"seed": -1},
    ],
    ids=repr,
)  # fmt: skip
def test_a_wrong_option_of_generate_is_refused_before_anything_is_computed(
    engine: Engine, options: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError):
        engine.generate(PROMPT, **{"max_tokens": 4, **options})
    assert len(token_ids(engine)) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0}, {"threads": 100_000}, {"threads": "2"}, {"context": 0}, {"context": 10.5},
        {"context": 1 << 20}, {"local_experts": 1.5}, {"local_experts": -1}, {"kv_type": "q8"},
        {"backend": "gpu"}, {"daemons": ["tpu"]}, {"connect": ["here"]},
        {"device": 0}, {"device": ["cpu"]},
    ],
    ids=repr,
)  # fmt: skip
def test_a_wrong_option_of_open_is_refused(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Engine.open(model, **{"backend": "reference", **options})


def test_settings_say_what_the_caller_does_not(model: Path) -> None:
    settings = Settings(
        model=str(model), backend="reference", kv_type="f16", context=20, daemons=(),
        local_experts=None,
    )  # fmt: skip
    with Engine.open(settings=settings) as engine:
        assert (engine.model_path, engine.backend_name) == (model, "reference")
        assert (engine.kv_type, engine.num_positions) == (KvType.F16, 20)
    with Engine.open(model, settings=settings, kv_type="auto", context=30) as engine:
        assert (engine.kv_type, engine.num_positions) == (KvType.F32, 30)
    with pytest.raises(SettingsError, match=r"\bdaemon\b"):
        Engine.open(settings=replace(settings, local_experts=1))


def test_a_device_is_opened_or_refused_with_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = None
    for device in ("auto", "cpu", CPU, None):
        with Engine.open(model, device=device, backend="reference") as engine:
            found = engine.logits(PROMPT).tobytes()
            assert found == (expected := expected or found)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SettingsError, match=r"^device='gpu'.* auto, cpu, cuda:N or hip:N$"):
        Engine.open(model, device="gpu")
    wrong: Any = 0
    with pytest.raises(SettingsError, match=r"^device=0: must be auto, cpu, cuda:N or hip:N$"):
        Engine.open(model, device=wrong)
    with pytest.raises(SettingsError, match=r"^device hip:1\b.* -m pip install 'cupy-rocm"):
        Engine.open(model, settings=Settings(device=parse_device("hip:1")))
    with Engine.open(
        model, device="cpu", backend="reference", settings=Settings(device=parse_device("hip:1"))
    ) as engine:
        assert engine.logits(PROMPT).tobytes() == expected


def test_chunks_do_not_show_beyond_rounding(engine: Engine) -> None:
    ids = list(range(40))
    whole = engine.logits(ids)
    chunks: list[int | list[int]] = [1, 7, [3, 20, 1], [39, 1]]
    for chunk in chunks:
        assert np.abs(engine.logits(ids, chunk) - whole).max() <= 1e-4
    for wrong in (0, -1, [5, 0], 1.5):
        with pytest.raises(SettingsError, match="chunk"):
            engine.logits(ids, wrong)  # type: ignore[arg-type]


def test_a_prompt_may_fill_the_context_and_no_more(model: Path) -> None:
    with Engine.open(model, backend="reference", context=10) as engine:
        assert len(list(engine.generate(list(range(10)), 5, ignore_eos=True))) == 1
        assert engine.last_generation.finish_reason == "context"
        with pytest.raises(ContextExceeded, match=r"\(--context\).*\b256$") as caught:
            engine.generate(list(range(11)), 5)
        assert (caught.value.num_tokens, caught.value.num_positions) == (11, 10)


def test_a_context_that_is_the_largest_is_not_to_be_raised(engine: Engine) -> None:
    with pytest.raises(ContextExceeded) as caught:
        engine.generate([1] * 257, 5)
    assert caught.value.num_positions == 256
    assert "--context" not in str(caught.value)


def test_a_stop_token_ends_the_text_and_is_not_yielded(model: Path) -> None:
    with Engine.open(model, backend="reference") as engine:
        assert engine.tokenizer is not None
        free = token_ids(engine, 12)
        engine.tokenizer.stop_ids = frozenset({free[4]})
        first = free.index(free[4])
        assert [token.token_id for token in engine.generate(PROMPT, 12)] == free[:first]
        assert engine.last_generation.finish_reason == "stop"
        assert token_ids(engine, 12) == free


def test_an_interleaved_call_ends_the_generation_before_it_instead_of_corrupting_it(
    engine: Engine,
) -> None:
    expected = token_ids(engine, 20)
    first = engine.generate(PROMPT, 20, ignore_eos=True)
    assert [t.token_id for t in itertools.islice(first, 5)] == expected[:5]
    engine.logits([9, 9, 9, 9])
    with pytest.raises(SettingsError, match="another call"):
        next(first)
    assert token_ids(engine, 20) == expected


def test_closing_frees_memory_at_once(model: Path, request: pytest.FixtureRequest) -> None:
    """Nothing waits for the garbage collector: neither the mapping nor a captured step's memory."""
    with Engine.open(model, backend="cpu", context=64, threads=2) as first:
        token_ids(first, 2)  # compiles what the next one needs
    del first
    request.addfinalizer(gc.enable)
    gc.collect()
    gc.disable()
    engine = Engine.open(model, backend="cpu", context=64, threads=2)
    token_ids(engine, 2)
    captured = engine._steps._captured
    assert isinstance(captured, CpuStep)
    logits = weakref.ref(captured._recorded.logits.base)
    del captured
    engine.close()
    assert logits() is None
    assert str(model) not in Path("/proc/self/maps").read_text()


def test_a_closed_engine_says_so_and_may_be_closed_again(model: Path) -> None:
    engine = Engine.open(model, backend="reference")
    running = engine.generate(PROMPT, 20, ignore_eos=True)
    next(running)
    engine.close()
    engine.close()
    for use in (lambda: engine.logits(PROMPT), lambda: next(running)):
        with pytest.raises(SettingsError, match="closed"):
            use()


@pytest.fixture
def threads_before() -> set[threading.Thread]:
    """Threads of whatever else this process has done so far."""
    return set(threading.enumerate())


@pytest.mark.e2e
def test_a_dropped_engine_ends_its_daemons(
    model: Path, threads_before: set[threading.Thread]
) -> None:
    engine = Engine.open(model, daemons=["cpu"])
    assert len(own_children()) == 1
    assert set(threading.enumerate()) - threads_before
    del engine
    gc.collect()
    wait_until(lambda: not own_children(), "the daemon to end")
    assert set(threading.enumerate()) <= threads_before


@pytest.mark.e2e
def test_a_failure_late_in_opening_leaves_nothing_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch, threads_before: set[threading.Thread]
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ReferenceOps, "new_kv_cache", fail)
    with pytest.raises(MemoryError):
        Engine.open(model, daemons=["cpu"], backend="reference")
    assert own_children() == []
    assert set(threading.enumerate()) <= threads_before


def test_a_cache_larger_than_memory_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    shape = Qwen3MoeShape(num_layers=1, vocab_size=300, context_length=2**31 - 1)
    path = write_qwen3moe(tmp_path / "m.gguf", shape, seed=1)
    with pytest.raises(SettingsError, match=r"\bMiB\b.*keys and values"):
        Engine.open(path, daemons=["cpu"], context=2**31 - 1)


@pytest.mark.parametrize("address", ["tcp://*:5555", "tcp://no such host:5555"])
def test_an_address_that_cannot_be_tried_is_an_error_and_no_hang(model: Path, address: str) -> None:
    with pytest.raises((DaemonUnavailable, SettingsError)):
        Engine.open(model, connect=[address], backend="reference")


USES_GIVEN_CACHE = """
import sys
from dflash_protocol.settings import Settings
from dflash_runtime import Engine

if __name__ == "__main__":
    settings = Settings(cache_dir=sys.argv[2], run_dir=sys.argv[3])
    with Engine.open(sys.argv[1], backend="cpu", daemons=["cpu"], settings=settings) as engine:
        print(*(token.token_id for token in engine.generate([5, 6, 7], 3, ignore_eos=True)))
"""


@pytest.mark.e2e
def test_all_that_is_compiled_is_kept_where_its_settings_say(
    model: Path, run_dir: Path, tmp_path: Path
) -> None:
    """By engine, daemon, and the processes that compile for them; nowhere is anything else made."""
    compiled, given = cache_folder(None), tmp_path / "given"
    given.mkdir(mode=0o700)
    with Engine.open(model, backend="cpu", daemons=["cpu"]):
        pass  # so that kernels of this kind are there already
    for folder in (*compiled.glob("kernels-*"), *compiled.glob("ring-*")):
        shutil.copytree(folder, given / folder.name)
    done = subprocess.run(
        [sys.executable, "-c", USES_GIVEN_CACHE, model, given, run_dir],
        env=environment(XDG_CACHE_HOME=str(tmp_path / "home")),
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert (done.returncode, len(done.stdout.split())) == (0, 3), done.stderr
    assert list(given.glob("cpu-tier-*"))
    assert not (tmp_path / "home").exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_settings_that_are_given_hold_for_the_code_of_rings_of_parents_and_daemons(
    model: Path, tmp_path: Path
) -> None:
    """In a process that has compiled nothing; its daemon compiles the same."""
    code = (
        "import sys\n"
        "from dflash_protocol.settings import Settings\n"
        "from dflash_runtime import Engine\n"
        "settings = Settings(cache_dir=sys.argv[2], run_dir=sys.argv[3], ipc_transport='shared')\n"
        "with Engine.open(\n"
        "    sys.argv[1], daemons=['cpu'], backend='reference', settings=settings\n"
        ") as engine:\n"
        "    engine.logits([1, 2, 3])\n"
    )
    given, home, run_dir = tmp_path / "given", tmp_path / "home", tmp_path / "run"
    subprocess.run(
        [sys.executable, "-c", code, str(model), str(given), str(run_dir)],
        env=environment(XDG_CACHE_HOME=str(home)), timeout=120, check=True,
    )  # fmt: skip
    (folder,) = given.glob("ring-*")
    assert list(folder.glob("*.nbc"))
    assert not home.exists()


def test_text_is_never_cut_within_a_character(engine: Engine) -> None:
    """Random tokens make random bytes; the pieces together are the text of the whole."""
    tokens = list(engine.generate("é", 40, temperature=5.0, seed=3, ignore_eos=True))
    assert engine.tokenizer is not None
    whole = engine.tokenizer.decode(token.token_id for token in tokens)
    assert "".join(token.text for token in tokens) == whole
