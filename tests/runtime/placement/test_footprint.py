"""What a model takes of memory, predicted from metadata, against what is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.batch import group_by_expert
from dflash_protocol.device import Device
from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, SettingsError
from dflash_protocol.ids import Phase
from dflash_runtime import Engine
from dflash_runtime.compute import devices
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.devices import CONTEXT_BYTES, DeviceMemory, allocated
from dflash_runtime.compute.gpu.experts.offload_room import offload_bytes
from dflash_runtime.compute.gpu.layers import matrix
from dflash_runtime.compute.gpu.layers.kv_rows import array_bytes
from dflash_runtime.compute.gpu.room import MODULES_BYTES
from dflash_runtime.compute.gpu.transfers import weight_copier
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import Room
from dflash_runtime.compute.sliding_window import MOST_KEPT
from dflash_runtime.experts import store
from dflash_runtime.placement import host_context
from dflash_runtime.placement.footprint import (
    Memory,
    Request,
    footprint,
    largest_context,
    what_fits,
)
from support.architectures import RANDOM
from support.counting_device import CountingDevice, PooledDevice
from support.emulated_gpu import TINY
from support.random_gguf import write_model
from support.sparse_models import REAL_SIZES, write_sparse
from support.undisturbed import settings_with

MIB = 1 << 20
CHAIN = [-1, *range(63)]


@cache
def footprint_of(path: Path, memory: Memory) -> Room:
    with GgufFile.open(path) as file:
        return footprint(file, read_spec(file), memory)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sparse")

    @cache
    def path_of(name: str) -> Path:
        return write_sparse(folder / f"{name}.gguf", *REAL_SIZES[name])

    return path_of


class Counted:
    """Engines on devices that count, with as much memory as `free_bytes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunk, self.free_bytes = 4096, 1 << 50
        self.kind: type[CountingDevice | PooledDevice] = CountingDevice
        self.opened: list[CountingDevice | PooledDevice] = []
        monkeypatch.setattr(devices, "why_unusable", lambda kind: None)
        monkeypatch.setattr(devices, "_open_gpu", self._open)
        # Files of real sizes have nothing to be read.
        monkeypatch.setattr(store, "_read_experts", lambda *args, **options: None)
        monkeypatch.setattr(
            weight_copier, "join", lambda sources, out: sum(x.size for x in sources)
        )

    def _open(self, device: Device, cache_dir: str | None = None) -> CupyBackend:
        self.opened.append(self.kind())
        return CupyBackend(self.opened[-1], max_chunk=self.chunk, memory=self._memory)

    def _memory(self) -> DeviceMemory:
        free = self.free_bytes - self.opened[-1].pool.total_bytes
        return DeviceMemory(free, 1 << 50, is_shared_with_host=False)

    @contextmanager
    def engine(self, path: Path, *, context: int, **options: Any) -> Iterator[Engine]:
        with Engine.open(path, device="cuda:0", context=context, threads=1, **options) as engine:
            yield engine


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def use(engine: Engine, *, longest: int) -> None:
    """Prompts of several lengths, greedy and sampled tokens, trees, logits."""
    prompt = [token % engine.spec.vocab_size for token in range(longest)]
    for length in (longest // 7 + 1, longest // 2 + 1, 20, longest):
        list(engine.generate(prompt[:length], 1, ignore_eos=True))
    for temperature in (0.0, 0.8):
        run = engine.generate(
            prompt, 8, temperature=temperature, ignore_eos=True, reuse_prefix=True
        )
        list(run)
    engine.prefill(prompt[: longest // 2])
    for num_tokens in (1, 8, 64):
        engine.verify(prompt[:num_tokens], CHAIN[:num_tokens])
        engine.accept([0])
    engine.logits(prompt[: min(longest, 600)])


def predicted(
    path: Path,
    *,
    context: int,
    kv_type: str,
    chunk: int,
    local: int = 1 << 20,
    num_daemons: int = 0,
) -> int:
    """Bytes of the device, without what the driver takes."""
    with GgufFile.open(path) as file:
        layers = read_spec(file).moe.layers
    found = footprint_of(path, Memory.GPU)
    num_remote = sum(local < layer.num_experts for layer in layers)
    needs = found.needs(
        num_positions=context,
        kv_type=KvType(kv_type),
        chunk=chunk,
        num_remote_layers=num_remote,
        num_daemons=num_daemons,
    )
    assert needs.driver == CONTEXT_BYTES + MODULES_BYTES
    experts = {layer.layer_id: min(local, layer.num_experts) for layer in layers}
    return needs.total - needs.driver + found.experts_bytes(experts)


def check(pool_bytes: int, prediction: int) -> None:
    """The contract, with the driver's part left out."""
    assert pool_bytes <= prediction <= 1.02 * pool_bytes + 192 * MIB


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("context", "chunk", "kv_type"),
    [
        (8192, 4096, "f16"),
        (3000, 4096, "q8_0"),
        pytest.param(32_768, 1024, "f16", marks=pytest.mark.slow),
        pytest.param(4096, 256, "f32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", REAL_SIZES)
def test_a_model_of_real_size_takes_what_is_predicted(
    counted: Counted,
    sparse: Callable[[str], Path],
    name: str,
    context: int,
    chunk: int,
    kv_type: str,
) -> None:
    path = sparse(name)
    context = min(context, REAL_SIZES[name][0].keys()["context_length"])
    counted.chunk = chunk
    with counted.engine(path, context=context, kv_type=kv_type) as engine:
        opened = counted.opened[0].pool.peak_bytes
        use(engine, longest=context - 100)
        peak = counted.opened[0].pool.peak_bytes
    prediction = predicted(path, context=context, kv_type=kv_type, chunk=chunk)
    check(peak, prediction)
    assert peak <= 1.01 * opened  # all of it is taken at the start


def test_weights_without_locked_memory_take_what_is_predicted(
    counted: Counted, sparse: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver copies them, through one stage."""

    def refused(*_: object) -> None:
        raise DeviceUnavailable("no memory can be locked")

    monkeypatch.setattr(matrix, "WeightCopier", refused)
    path = sparse("laguna")
    with counted.engine(path, context=3000, kv_type="q8_0") as engine:
        use(engine, longest=600)
    prediction = predicted(path, context=3000, kv_type="q8_0", chunk=counted.chunk)
    check(counted.opened[0].pool.peak_bytes, prediction)


@pytest.mark.parametrize("name", RANDOM)
def test_every_architecture_takes_what_is_predicted(
    counted: Counted, tmp_path: Path, name: str
) -> None:
    path = write_model(tmp_path / "m.gguf", RANDOM[name].SHAPE_ON_GPU, seed=1)
    context, counted.chunk = 200, 64
    with counted.engine(path, context=context) as engine:
        kv_type = engine.kv_type.value
        use(engine, longest=100)
    check(
        counted.opened[-1].pool.peak_bytes,
        predicted(path, context=context, kv_type=kv_type, chunk=counted.chunk),
    )


@pytest.mark.parametrize("local", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen35moe")),
    ],
)
def test_a_parent_with_remote_experts_takes_what_is_predicted(
    counted: Counted, tmp_path: Path, name: str, local: int
) -> None:
    """With emulated kernels, which choose experts, and a daemon."""
    counted.kind = PooledDevice
    shape = TINY if name == "qwen3moe" else RANDOM[name].SHAPE_ON_GPU
    path = write_model(tmp_path / "m.gguf", shape, seed=1)
    context, counted.chunk = 200, 64
    with counted.engine(path, context=context, local_experts=local, daemons=["cpu"]) as engine:
        kv_type = engine.kv_type.value
        use(engine, longest=100)
    check(
        counted.opened[-1].pool.peak_bytes,
        predicted(
            path,
            context=context,
            kv_type=kv_type,
            chunk=counted.chunk,
            local=local,
            num_daemons=1,
        ),
    )


MOST_COPIED = {("qwen3moe", 4096), ("laguna", 4096), ("glm4moe", 512)}
"""The largest chunks, and what is nearest to its prediction."""


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        pytest.param(name, chunk, marks=() if (name, chunk) in MOST_COPIED else pytest.mark.slow)
        for name in REAL_SIZES
        for chunk in (512, 1024, 2048, 4096)
        if name != "llama4"  # its prompts are asked of the processor
    ],
)
def test_a_model_of_real_size_whose_experts_are_copied_takes_what_is_predicted(
    counted: Counted, sparse: Callable[[str], Path], name: str, chunk: int
) -> None:
    path, counted.chunk = sparse(name), chunk
    context = min(8192, REAL_SIZES[name][0].keys()["context_length"])
    settings = replace(settings_with(), prefill_offload="on")
    with counted.engine(path, context=context, local_experts=0, settings=settings) as engine:
        kv_type = engine.kv_type.value
        prompt = [token % engine.spec.vocab_size for token in range(context - 200)]
        list(engine.generate(prompt, 1, ignore_eos=True))
        assert engine.stats().hits.offloaded == len(prompt) * engine.spec.moe.num_used_total
        copied = offload_bytes((layer, layer.num_experts) for layer in engine.spec.moe.layers)
    prediction = predicted(path, context=context, kv_type=kv_type, chunk=chunk, local=0)
    check(counted.opened[-1].pool.peak_bytes, prediction + copied)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "llama4"])
def test_a_daemon_takes_what_is_predicted(sparse: Callable[[str], Path], name: str) -> None:
    path, chunk, rng = sparse(name), 2048, np.random.default_rng(1)
    device = CountingDevice()
    backend = CupyBackend(device, max_chunk=chunk)
    with GgufFile.open(path) as file:
        layers = read_spec(file).moe.layers
        count = layers[0].num_experts // 2
        ids = np.arange(0, 2 * count, 2, dtype=np.int32)
        banks = [backend.load_experts(file, layer, ids) for layer in layers]
        for phase, num_tokens in ((Phase.DECODE, 1), (Phase.DECODE, 7), (Phase.PREFILL, chunk)):
            for bank in banks:
                used = bank.layer.num_experts_used
                batch = group_by_expert(
                    np.zeros((num_tokens, bank.layer.hidden_size), np.float32),
                    np.repeat(np.arange(num_tokens, dtype=np.int32), used),
                    np.concatenate(
                        [rng.permutation(count)[:used] for _ in range(num_tokens)]
                    ).astype(np.int32),
                    weights=np.ones(num_tokens * used, np.float32),
                    phase=phase,
                )
                bank.sums_of(batch)
    found = footprint_of(path, Memory.GPU)
    needs = found.needs(num_positions=0, kv_type=KvType.F16, chunk=chunk, is_parent=False)
    experts = found.experts_bytes({layer.layer_id: count for layer in layers})
    check(device.pool.peak_bytes, needs.total - needs.driver + experts)
    backend.close()


def test_layers_and_ends_are_all_of_a_file(sparse: Callable[[str], Path]) -> None:
    for name in REAL_SIZES:
        path = sparse(name)
        with GgufFile.open(path) as file:
            spec, left_out = read_spec(file), describe(file).left_out
            num_bytes = sum(
                tensor.num_bytes
                for tensor_name, tensor in file.tensors.items()
                if not tensor_name.startswith(left_out)
            )
            gpu, host = (footprint(file, spec, memory) for memory in Memory)
        for found, tolerance in ((host, 1.0), (gpu, 1.2)):
            experts = {each.layer_id: each.num_experts for each in found.layers}
            total = found.ends + sum(each.trunk for each in found.layers)
            total += found.experts_bytes({k: v for k, v in experts.items() if v})
            assert num_bytes <= total <= tolerance * num_bytes, (name, tolerance)
            assert [each.layer_id for each in found.layers] == [*range(spec.num_layers)]
        dense = [each for each in gpu.layers if not each.num_experts]
        assert len(dense) == spec.num_layers - len(spec.moe.layers)
        assert all(each.expert == 0 for each in dense)


@pytest.mark.parametrize("kv_type", KvType)
def test_the_hosts_cache_is_what_is_allocated(
    sparse: Callable[[str], Path], kv_type: KvType
) -> None:
    for name in ("qwen35moe", "gpt-oss"):
        path = sparse(name)
        with GgufFile.open(path) as file:
            spec = read_spec(file)
        for num_positions in (1, 500, 9000):
            cached = CpuKvCache(spec.kv_layers, num_positions, kv_type, spec.recurrent_layers)
            snapshots = MOST_KEPT * cached.snapshot(0).nbytes
            found = footprint_of(path, Memory.HOST)
            needs = found.needs(num_positions=num_positions, kv_type=kv_type, chunk=512)
            assert needs.cache == cached.nbytes + snapshots


@cache
def window_arrays(path: Path, kv_type: KvType) -> int:
    """Keys, values and scales of all layers with a sliding window."""
    with GgufFile.open(path) as file:
        windows = [kv for kv in read_spec(file).kv_layers if kv.mask.span is not None]
    return sum(len(array_bytes(kv, 1, kv_type)) for kv in windows)


SOME = st.sampled_from(["qwen3moe", "qwen35moe", "gpt-oss", "laguna"])


@given(data=st.data(), memory=st.sampled_from(Memory), kv_type=st.sampled_from(KvType), name=SOME)
def test_more_of_anything_never_needs_less(
    sparse: Callable[[str], Path],
    data: st.DataObject,
    memory: Memory,
    kv_type: KvType,
    name: str,
) -> None:
    found = footprint_of(sparse(name), memory)
    contexts, chunks = st.integers(1, 1 << 17), st.integers(1, 8192)
    context, chunk = data.draw(contexts), data.draw(chunks)

    def total(context: int, chunk: int, **more: Any) -> int:
        needs = found.needs(num_positions=context, kv_type=kv_type, chunk=chunk, **more)
        assert min(needs.as_record().values()) >= 0
        assert needs.as_record()["total"] == needs.total
        return needs.total

    least = total(context, chunk)
    # Slabs of the host are whole, and as full as each other. On a GPU windows become rings from
    # some length on (gpt-oss: 3,200 positions): their snapshots are not rounded to whole blocks.
    slack = window_arrays(sparse(name), kv_type) * 2 * MIB if memory is Memory.GPU else least // 100
    assert total(context + data.draw(contexts), chunk) >= least - slack
    assert total(context, chunk + data.draw(chunks)) >= least
    remote = data.draw(st.integers(1, 4))
    assert total(context, chunk, num_remote_layers=remote, num_daemons=remote) >= least
    assert total(context, chunk, is_parent=False) <= least
    layer = next(each for each in found.layers if each.num_experts)
    sizes = [found.experts_bytes({layer.layer_id: count}) for count in range(9)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert all(size >= count * layer.expert for count, size in enumerate(sizes))


@given(
    room_mib=st.integers(0, 40_000), kv_type=st.sampled_from(KvType), most=st.integers(1, 70_000)
)
def test_the_largest_context_fits_and_the_next_one_does_not(
    sparse: Callable[[str], Path], room_mib: int, kv_type: KvType, most: int
) -> None:
    found = footprint_of(sparse("qwen3moe"), Memory.GPU)
    request = Request(kv_type, 2048, num_experts={0: 128, 1: 7})
    room_bytes = room_mib * MIB
    context = largest_context(found, request, room_bytes=room_bytes, most=most)
    assert 0 <= context <= most
    if context:
        assert request.num_bytes(found, context) <= room_bytes
    if context < most:
        assert request.num_bytes(found, context + 1) > room_bytes
    offer = what_fits(found, request, room_bytes=room_bytes, num_positions=most, most=most)
    assert bool(offer) >= (context == most)


def test_errors_say_which_context_and_type_would_fit(
    counted: Counted, sparse: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, context = sparse("qwen3moe"), 40_000
    found = footprint_of(path, Memory.GPU)
    request = Request(KvType.F16, counted.chunk, num_experts={layer: 128 for layer in range(4)})
    counted.free_bytes = request.num_bytes(found, 20_000) - CONTEXT_BYTES
    with pytest.raises(DeviceOutOfMemory) as caught, counted.engine(path, context=context):
        pass
    offers = what_fits(
        found,
        request,
        room_bytes=caught.value.free_bytes + CONTEXT_BYTES,
        num_positions=context,
        most=40_960,
    )
    assert offers in caught.value.advice
    offered = re.fullmatch(r"a context of ([\d,]+) fits, or --kv-type q8_0 with ([\d,]+)", offers)
    assert offered is not None
    smaller, of_q8_0 = (int(each.replace(",", "")) for each in offered.groups())
    assert 16_000 < smaller <= 20_480 < of_q8_0 < context
    # What is offered can be opened.
    with counted.engine(path, context=of_q8_0, kv_type="q8_0"):
        pass
    with counted.engine(path, context=smaller) as engine:
        use(engine, longest=5000)
    assert counted.opened[-1].pool.peak_bytes <= counted.free_bytes
    monkeypatch.setattr(host_context, "process_room", lambda: 1400 * MIB)
    model = write_sparse(path.with_name("many.gguf"), *REAL_SIZES["glm4moe"])
    with pytest.raises(SettingsError, match=r"a context of [\d,]+ fits, or --kv-type q8_0"):
        Engine.open(model, context=131_000, kv_type="f16")


def test_a_driver_gives_whole_blocks() -> None:
    assert [allocated(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated(MIB - 1) == allocated(MIB) == MIB
    assert allocated(MIB + 1) == allocated(2 * MIB) == 2 * MIB
    assert allocated(2 * MIB + 1) == 4 * MIB


def test_a_context_that_no_backend_has_is_refused(sparse: Callable[[str], Path]) -> None:
    found = footprint_of(sparse("qwen3moe"), Memory.GPU)
    with pytest.raises(SettingsError):
        found.needs(num_positions=1 << 30, kv_type=KvType.F16, chunk=512)
