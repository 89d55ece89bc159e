"""A device's memory is the same after a load as before, however often one is loaded, and wherever a
load fails. What is in use after each is logged: ``pytest -m gpu --log-cli-level=INFO``."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.errors import (
    DeviceOutOfMemory,
    DflashError,
    KernelCompileError,
    ModelFileError,
    UnsupportedModel,
)
from dflash_runtime import Engine
from support.emulated_gpu import (
    TINY,
    EmulatedGpus,
    RealGpu,
    install_emulated_gpus,
    install_real_gpu,
)
from support.gpu_devices import EMULATED, EMULATED_AND_GPU
from support.random_models import Qwen3MoeShape, write_qwen3moe

CONTEXT = 48

_LOG = logging.getLogger(__name__)


@pytest.fixture(params=EMULATED_AND_GPU)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus | RealGpu:
    install = install_emulated_gpus if request.param == EMULATED else install_real_gpu
    return install(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


class Loads:
    """Loads of one device, and what it has in use after two: what drivers load once stays."""

    def __init__(self, gpus: EmulatedGpus | RealGpu, path: Path) -> None:
        self._gpus = gpus
        self._path = path
        self.tokens = self._generated()
        assert self._generated() == self.tokens
        self._held = gpus.held()
        """By other tests too."""
        self._num_checked = 0
        self._used_bytes = self._most_bytes = self._seen_bytes = gpus.used_bytes()

    def may_keep(self) -> None:
        """A driver that has been left in ways that it has not been before may keep something of
        what it took, once and for all of them."""
        self._most_bytes = self._used_bytes + self._gpus.kept_bytes

    def may_keep_no_more(self) -> None:
        """However often it is left in those ways again."""
        self._most_bytes = self._seen_bytes

    def succeeds(self) -> None:
        assert self._generated() == self.tokens
        self._check_used()

    def fails(self, kind: type[DflashError], path: Path | None = None) -> str:
        """What is told in the end."""
        try:
            self._generated(path)
        except kind as error:
            words = str(error)
        else:
            pytest.fail(f"no {kind.__name__}")
        self._check_used()
        return words

    def _generated(self, path: Path | None = None) -> list[int]:
        with Engine.open(
            path or self._path, device=str(self._gpus.device), context=CONTEXT
        ) as engine:
            prompt = list(range(12))  # a chunk, then steps
            tokens = [token.token_id for token in engine.generate(prompt, 4, ignore_eos=True)]
            assert self._gpus.used_bytes() > getattr(self, "_used_bytes", 0)
            return tokens

    def _check_used(self) -> None:
        gc.collect()  # of what an error's traceback holds
        assert self._gpus.held() == self._held
        used_bytes = self._gpus.used_bytes()
        self._num_checked += 1
        _LOG.info("load %d keeps %d bytes", self._num_checked, used_bytes - self._used_bytes)
        assert used_bytes <= self._most_bytes
        self._seen_bytes = max(self._seen_bytes, used_bytes)


class FailingCall:
    """A method of a device raises, the `last`-th time that it is called."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gpus: EmulatedGpus | RealGpu, name: str
    ) -> None:
        self._monkeypatch, self._device, self._name = monkeypatch, gpus.kernel_device, name

    def each(
        self, lasts: tuple[int, ...], error: Callable[[], DflashError], check: Callable[[], None]
    ) -> None:
        method: Any = getattr(self._device, self._name)
        for last in lasts:
            num_calls = 0

            def failing(*args: Any, last: int = last, **options: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                if num_calls == last:
                    raise error()
                return method(*args, **options)

            with self._monkeypatch.context() as patched:
                patched.setattr(self._device, self._name, failing)
                check()
            assert num_calls >= last


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_loads_give_back_every_byte(gpus: EmulatedGpus | RealGpu, model: Path, count: int) -> None:
    loads = Loads(gpus, model)
    for _ in range(count):
        loads.succeeds()


@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_failed_loads_give_back_every_byte(
    gpus: EmulatedGpus | RealGpu,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounds: int,
) -> None:
    loads = Loads(gpus, model)

    def no_memory() -> DflashError:
        return DeviceOutOfMemory("cuda:0", num_bytes=1, free_bytes=2, total_bytes=3)

    def check_memory() -> None:
        assert "cuda:0" in loads.fails(DeviceOutOfMemory)

    def no_kernel() -> DflashError:
        return KernelCompileError("a bracket is missing")

    def check_kernel() -> None:
        assert loads.fails(KernelCompileError) == "a bracket is missing"

    loads.may_keep()
    # A round is nine failures: after the first, 27 leave no more on a GPU.
    for number in range(max(rounds, gpus.least_rounds)):
        if number == 1:
            loads.may_keep_no_more()
        # While it is loaded, tried and captured, and while it writes text.
        FailingCall(monkeypatch, gpus, "empty").each((1, 5, 25, 50, 75), no_memory, check_memory)
        FailingCall(monkeypatch, gpus, "module").each((1, 3, 9, 17), no_kernel, check_kernel)
    damaged = tmp_path / "damaged.gguf"
    for size in (100, 5000, model.stat().st_size - 100):
        damaged.write_bytes(model.read_bytes()[:size])
        loads.fails(ModelFileError, damaged)
    odd = write_qwen3moe(tmp_path / "odd.gguf", Qwen3MoeShape("odd", hidden_size=52), seed=1)
    assert " 52 " in loads.fails(UnsupportedModel, odd)
    loads.succeeds()
