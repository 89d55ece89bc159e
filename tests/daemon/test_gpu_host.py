"""What a daemon on a GPU holds, emulated here: placements come and go with their memory, batches
have the same bits in one piece and in several, and whoever is ready compiles nothing any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_daemon.host import ExpertHost
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.experts.speed_trial import measure_kinds
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import MAX_CHUNK, TINY, EmulatedGpus, install_emulated_gpus
from support.random_models import write_qwen3moe

FIRST = OwnedExperts.from_lists({0: [0, 1, 2, 3], 1: [4, 2]})
SECOND = OwnedExperts.from_lists({0: [0, 1, 2, 3], 1: [2, 4, 0]})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def host(tmp_path: Path, gpus: EmulatedGpus) -> Iterator[ExpertHost]:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    host = ExpertHost(path, gpus.open_first())
    yield host
    host.close()


def batch_of(bank: ExpertBank, phase: Phase, num_tokens: int) -> RoutedBatch:
    random = np.random.default_rng(num_tokens)
    num_used = min(TINY.num_experts_used, bank.num_experts)
    chosen = np.concatenate(
        [random.permutation(bank.num_experts)[:num_used] for _ in range(num_tokens)]
    )
    return group_by_expert(
        random.standard_normal((num_tokens, TINY.hidden_size), np.float32),
        np.repeat(np.arange(num_tokens, dtype=np.int32), num_used),
        chosen.astype(np.int32),
        weights=random.random(chosen.size, np.float32),
        phase=phase,
    )


def sums_of(bank: ExpertBank, batch: RoutedBatch) -> F64Array:
    out = np.zeros(batch.hidden.shape)
    bank.accumulate(batch, out)
    return out


def alone(bank: ExpertBank, batch: RoutedBatch) -> F64Array:
    """Each token in a batch of its own."""
    rows = []
    experts = np.repeat(batch.expert_ids, np.diff(batch.group_starts))
    for token in range(batch.num_tokens):
        mine = batch.token_indices == token
        one = group_by_expert(
            batch.hidden[token : token + 1],
            np.zeros(int(mine.sum()), np.int32),
            experts[mine],
            weights=batch.weights[mine],
            phase=batch.phase,
        )
        rows.append(sums_of(bank, one))
    return np.concatenate(rows)


def test_a_gpu_is_timed_without_its_host(host: ExpertHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and sums stay there: what its parent waits for, which asks by mailbox."""
    held = host.load(FIRST)
    bank, backend = held.banks[0], host.backend
    batches = [batch_of(bank, Phase.DECODE, 1), batch_of(bank, Phase.PREFILL, 40)]
    expected = [sums_of(bank, each) for each in batches]

    def download(*_: object) -> None:
        raise AssertionError("sums came back")

    with monkeypatch.context() as patched:
        patched.setattr(EmulatedDevice, "download", download)
        for batch in batches:
            seconds = backend.device_seconds([bank, bank], batch)
            assert seconds is not None
            assert seconds > 0.0
    for batch, sums in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(sums_of(bank, batch), sums)


def test_a_trial_gives_its_memory_back_and_leaves_what_is_held(
    host: ExpertHost, gpus: EmulatedGpus
) -> None:
    device = gpus.opened[0]
    host.warm_up()
    ready_bytes = device.num_bytes
    speeds = host.speeds()
    assert min(speeds[0].one_s, speeds[0].used_s, speeds[0].chunk_pairs_per_s) > 0.0
    trial_bytes = device.num_bytes
    one_bytes = host.memory().expert_bytes[0]
    bank_bytes = 2 * one_bytes  # at least: a trial loads several banks
    assert trial_bytes < ready_bytes + bank_bytes, "arrays of work may stay"
    measure_kinds(host.store, host.backend)
    assert device.num_bytes < trial_bytes + one_bytes
    held = host.load(FIRST)
    batch = batch_of(held.banks[0], Phase.DECODE, 1)
    expected, with_first = sums_of(held.banks[0], batch), device.num_bytes
    assert measure_kinds(host.store, host.backend)[0].used_s > 0.0
    assert device.num_bytes < with_first + one_bytes
    np.testing.assert_array_equal(sums_of(held.banks[0], batch), expected)


def test_memory_for_experts_is_what_computing_leaves(host: ExpertHost, gpus: EmulatedGpus) -> None:
    gpus.free_bytes = 2 << 30
    before = host.memory()
    assert 0 < before.free_bytes < gpus.free_bytes, "results of a chunk take some"
    host.warm_up()
    after = host.memory()
    assert after.free_bytes == gpus.free_bytes, "that memory is taken by now"
    gpus.free_bytes = 0
    assert host.memory().free_bytes == 0
    assert host.backend.device_name == "host:0"
    assert {*after.expert_bytes} == {0, 1}
    assert min(after.expert_bytes.values()) > 0


def test_placements_come_and_go_with_their_memory(host: ExpertHost, gpus: EmulatedGpus) -> None:
    device = gpus.opened[0]
    host.warm_up()
    ready_bytes = device.num_bytes
    first = host.load(FIRST)
    with_first = device.num_bytes
    assert with_first > ready_bytes
    layer_0 = first.banks[0]
    host.release(first)
    del first
    second = host.load(SECOND)
    assert second.banks[0] is layer_0  # it has the same local ids
    with_second = device.num_bytes
    for _ in range(3):
        host.release(second)
        del second
        host.release(host.load(FIRST))
        second = host.load(SECOND)
        assert device.num_bytes == with_second
    host.release(second)
    gpus.free_bytes = 1000
    with pytest.raises(DeviceOutOfMemory) as caught:
        host.load(OwnedExperts.from_lists({0: [1], 1: [1]}))
    assert caught.value.free_bytes == 1000
    del second, layer_0
    assert device.num_bytes < with_first  # what had to go for it has gone
    gpus.free_bytes = 1 << 40
    assert len(host.load(FIRST).banks) == 2


def test_what_is_within_a_kept_placement_takes_no_memory_and_has_the_same_bits(
    host: ExpertHost, gpus: EmulatedGpus
) -> None:
    host.keep(FIRST)
    kept = host.load(FIRST)
    host.release(kept)
    gpus.free_bytes = 1000
    within = OwnedExperts.from_lists({0: [2, 0], 1: [2]})
    held = host.load(within)
    assert (held.num_kept, held.num_loaded, held.num_dropped) == (3, 0, 0)
    for layer_id, bank in held.banks.items():
        whole = kept.banks[layer_id]
        assert isinstance(bank, CupyExpertBank)
        assert isinstance(whole, CupyExpertBank)
        assert bank.by_local.weights == whole.by_local.weights == bank.by_global.weights
    gpus.free_bytes = 1 << 40
    alone = ExpertHost(host.model_path, gpus.open_first())
    try:
        loaded = alone.load(within)
        for phase in Phase:
            for num_tokens in (1, 3, 30):
                for layer_id, bank in held.banks.items():
                    batch = batch_of(bank, phase, num_tokens)
                    expected = sums_of(loaded.banks[layer_id], batch)
                    assert (sums_of(bank, batch) == expected).all()
                    assert np.abs(expected).max() > 0
    finally:
        alone.close()
    host.release(held)
    gpus.free_bytes = 1000
    with pytest.raises(DeviceOutOfMemory, match="--placement"):
        host.load(SECOND)


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY, Phase.PREFILL])
def test_a_token_has_the_same_bits_in_every_batch(host: ExpertHost, phase: Phase) -> None:
    bank = host.load(FIRST).banks[0]
    for num_tokens in (1, 3, 5, 8, 11, 2 * MAX_CHUNK + 3):  # padded to kernels, and cut by them
        batch = batch_of(bank, phase, num_tokens)
        expected = alone(bank, batch)
        assert (sums_of(bank, batch) == expected).all()
        assert np.abs(expected).max() > 0


def test_ready_means_that_everything_is_compiled(
    host: ExpertHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.warm_up()
    bank = host.load(FIRST).banks[1]

    def compiles(*_: object) -> None:
        pytest.fail("a kernel is loaded when it is wanted")

    monkeypatch.setattr(EmulatedDevice, "module", compiles)
    for phase in Phase:
        for num_tokens in (1, 2, 3, 8, 30):
            sums_of(bank, batch_of(bank, phase, num_tokens))


def test_loading_is_in_nobodys_way(host: ExpertHost) -> None:
    bank = host.load(FIRST).banks[0]
    batches = [batch_of(bank, phase, 9) for phase in (Phase.DECODE, Phase.PREFILL)]
    expected = [sums_of(bank, batch) for batch in batches]
    loading = threading.Thread(target=host.load, args=(SECOND,))
    loading.start()
    while True:
        is_last = not loading.is_alive()
        for batch, sums in zip(batches, expected, strict=True):
            assert (sums_of(bank, batch) == sums).all()
        if is_last:
            break
    loading.join()
