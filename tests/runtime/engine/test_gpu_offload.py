"""Chunks whose experts others own, computed by the parent's GPU with weights that are copied for
them. Emulated here."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeLayer
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceOutOfMemory,
    DeviceUnavailable,
    ModelFileError,
)
from dflash_protocol.ids import F32Array, Phase
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.experts import offload_room
from dflash_runtime.compute.gpu.experts.offload import ExpertOffload, OffloadedChunk
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertPrefill
from dflash_runtime.compute.gpu.model.ffns import RoutedFfnLayer
from dflash_runtime.compute.gpu.ops.chunks import ChunkExperts
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns, Transfer
from dflash_runtime.compute.gpu.transfers.host_rows import HostChoices, PendingChoice
from dflash_runtime.experts.offload import OffloadMode
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.placement.split import LOCAL_OWNER
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, EmulatedGpus
from support.gpu_splits import Layers, Split
from support.processes import running_daemon
from support.random_models import write_qwen3moe

SHAPE = replace(TINY, num_layers=3)
CHUNKS = [16, 9, 1]
IDS = np.random.default_rng(1).integers(0, SHAPE.vocab_size, sum(CHUNKS)).astype(np.int32)
NUM_STEPS = 1
"""Of the chunks: tokens by themselves."""
REST: Layers = {0: [0, 1, 2, 4], 1: range(5), 2: [1, 2, 3, 4]}
WHOLE: Layers = dict.fromkeys(range(SHAPE.num_layers), range(SHAPE.num_experts))
PAIRS_OF_TOKEN = SHAPE.num_layers * SHAPE.num_experts_used


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, SHAPE, seed=4, tensor_type="Q8_0")


@pytest.fixture(scope="module")
def resident(model: Path) -> F32Array:
    """Logits with all experts on one GPU."""
    with contextlib.ExitStack() as undo:
        return opened(undo, model, {LOCAL_OWNER: WHOLE}, OffloadMode.OFF).logits()


def moe_layer(path: Path) -> MoeLayer:
    with GgufFile.open(path) as file:
        return read_spec(file).moe.layers[0]


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every transfer that is begun."""
    sizes: list[int] = []
    begin = FileCopier.begin

    def noted(copier: FileCopier, runs: FileRuns, **options: Any) -> Transfer:
        transfer = begin(copier, runs, **options)
        sizes.append(transfer.num_bytes)
        return transfer

    monkeypatch.setattr(FileCopier, "begin", noted)
    return sizes


@pytest.fixture
def unpredicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer predicts what the next one chooses."""
    monkeypatch.setattr(RoutedFfnLayer, "following", property(lambda _: None, lambda *_: None))


def noting(events: list[str], kind: type, name: str) -> Callable[..., Any]:
    """A method that notes its name when it is called."""
    method = getattr(kind, name)

    def noted(*arguments: Any, **named: Any) -> Any:
        events.append(name)
        return method(*arguments, **named)

    return noted


def opened(
    undo: contextlib.ExitStack,
    path: Path,
    owners: Mapping[str, Layers],
    offload: OffloadMode = OffloadMode.ON,
) -> Split:
    return Split(undo, path, owners, ids=IDS, chunks=CHUNKS, offload=offload)


def of_many_experts(tmp_path: Path, undo: contextlib.ExitStack) -> tuple[F32Array, Split]:
    """Nine tokens, which choose few of the 40 experts of each layer: logits with all experts on one
    GPU, and a run for which all are copied."""
    shape = replace(SHAPE, num_experts=40)
    path = write_qwen3moe(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")
    whole: Layers = dict.fromkeys(range(3), range(40))
    ids, chunks = IDS[:9], [9]
    expected = Split(undo, path, {LOCAL_OWNER: whole}, ids=ids, chunks=chunks).logits()
    split = Split(undo, path, {"gpu1": whole}, ids=ids, chunks=chunks, offload=OffloadMode.ON)
    return expected, split


def test_bits_are_those_of_a_resident_run(
    model: Path, resident: F32Array, undo: contextlib.ExitStack, copied: list[int]
) -> None:
    of_chunks = (IDS.size - NUM_STEPS) * PAIRS_OF_TOKEN
    remote = opened(undo, model, {"gpu1": WHOLE})
    copied.clear()
    assert (remote.logits() == resident).all()
    hits = remote.runtime.hits
    assert (hits.offloaded, hits.remote) == (of_chunks, NUM_STEPS * PAIRS_OF_TOKEN)
    assert hits.layers == len(CHUNKS) * SHAPE.num_layers
    assert hits.layers_hot_only == 0
    assert sum(map(sum, remote.runtime.selections().values())) == IDS.size * PAIRS_OF_TOKEN
    # Layers are on their way before it is known what was chosen, but for the first one of a chunk.
    # Each has a place of its own here: what was copied for the first chunk is there in the second.
    layer = remote.steps._model.spec.moe.layers[0]
    whole = SHAPE.num_experts * layer.expert_bytes
    assert copied[1:3] == [whole, whole]
    assert whole - layer.expert_bytes <= copied[0] <= copied[0] + sum(copied[3:]) <= whole


def test_experts_that_are_here_are_launched_before_the_choice_has_come(
    model: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the device computes while the host begins copies and launches what they bring."""
    split = opened(undo, model, {LOCAL_OWNER: {0: [3], 1: [], 2: [0]}, "gpu1": REST})
    events: list[str] = []
    for kind, name in (
        (RoutedFfnLayer, "predict"),
        (HostChoices, "begin"),
        (ChunkExperts, "local_sums"),
        (PendingChoice, "wait"),
    ):
        monkeypatch.setattr(kind, name, noting(events, kind, name))
    split.logits()
    text = " ".join(events)
    awaited = re.findall(r"begin (?:predict begin )?(local_sums )?wait", text)
    num_chunks = len(CHUNKS) - 1
    assert [bool(each) for each in awaited] == [True, False, True] * num_chunks
    # Layers 1 and 2 of the first chunk: of the second one nearly all experts are foreseen.
    assert text.count("predict begin") == 2


def test_rows_of_which_nothing_is_asked_are_not_copied(
    model: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a device's experts are asked all the same, so that some chunks need theirs."""
    given: list[bool] = []
    begin = MoeExpertComputeRuntime.begin

    def begun(runtime: Any, layer_id: int, hidden: Any, *choice: Any, **how: Any) -> Any:
        if how["phase"] is Phase.PREFILL:
            given.append(hidden is not None)
        return begin(runtime, layer_id, hidden, *choice, **how)

    monkeypatch.setattr(MoeExpertComputeRuntime, "begin", begun)
    rest: Layers = {0: [1, 2, 4], 2: [1, 2, 3, 4]}
    owners: dict[str, Layers] = {
        LOCAL_OWNER: {0: [3], 2: [0]},
        "cpu1": {0: [0], 1: range(5)},
        "gpu1": rest,
    }
    split = opened(undo, model, owners, OffloadMode.AUTO)
    split.runtime._owners[2].stats.device = "cuda:1"
    split.logits()
    num_chunks = len(CHUNKS) - 1
    assert given == [True, False, True] * num_chunks


@pytest.mark.parametrize("experts_of_part", [1, 2])
def test_bits_where_layers_are_copied_in_parts(
    model: Path,
    resident: F32Array,
    undo: contextlib.ExitStack,
    copied: list[int],
    monkeypatch: pytest.MonkeyPatch,
    experts_of_part: int,
) -> None:
    """More parts than places: each place is used by several parts of each layer."""
    size = moe_layer(model).expert_bytes
    monkeypatch.setattr(offload_room, "_PLACE_BYTES", (experts_of_part + 1) * size - 1)
    split = opened(undo, model, {LOCAL_OWNER: {0: [3], 1: [], 2: [0]}, "gpu1": REST})
    offload = split._backend._offload
    assert offload is not None
    assert len(offload._places) == offload_room.NUM_PLACES
    assert max(place.memory.size for place in offload._places) < (experts_of_part + 0.5) * size
    copied.clear()
    for _ in range(2):
        assert (split.logits() == resident).all()
    assert max(copied) <= experts_of_part * size
    assert len(copied) > 4 * SHAPE.num_layers


def test_every_kind_of_layer_is_tried_out_whatever_its_place(
    undo: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types of experts may differ from layer to layer; here all parts have few places."""
    shape = replace(
        SHAPE, num_layers=4, hidden_size=256, ffn_size=256, num_experts=3, num_experts_used=2
    )

    def type_of(name: str) -> str:
        is_odd = name.endswith("ffn_down_exps.weight") and int(name.split(".")[1]) % 2
        return "Q6_K" if is_odd else "Q8_0"

    path = write_qwen3moe(tmp_path / "m.gguf", shape, seed=4, tensor_type=type_of)
    every: Layers = dict.fromkeys(range(4), range(3))
    ids, chunks = IDS[:25], [16, 9]
    expected = Split(undo, path, {LOCAL_OWNER: every}, ids=ids, chunks=chunks).logits()
    monkeypatch.setattr(offload_room, "_PLACE_BYTES", 1)
    split = Split(undo, path, {"gpu1": every}, ids=ids, chunks=chunks, offload=OffloadMode.ON)
    offload = split._backend._offload
    assert offload is not None
    kinds = {known.layer.down.tensor_type for known in offload._layers.values()}
    assert len(kinds) == 2
    for _ in range(2):
        assert (split.logits() == expected).all()
        assert split.runtime.hits.offloaded


def test_what_the_next_layers_router_chooses_is_copied_ahead(
    tmp_path: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """For the rows of the layer before; what it chooses besides comes later."""
    expected, split = of_many_experts(tmp_path, undo)
    device: Any = split._backend.device
    predict, begin = RoutedFfnLayer.predict, HostChoices.begin
    predicted: list[tuple[int, Any, Any]] = []
    chosen: list[set[int]] = []

    def noted(ffn: RoutedFfnLayer, x: Any) -> Any:
        choice = predict(ffn, x)
        found = device.download(choice.ids)
        predicted.append((ffn._layer_id, device.download(x.array), found))
        return choice

    def begun(choices: HostChoices, chosen_ids: Any, *weights: Any, **sizes: Any) -> PendingChoice:
        chosen.append(set(device.download(chosen_ids).reshape(-1).tolist()))
        return begin(choices, chosen_ids, *weights, **sizes)

    monkeypatch.setattr(RoutedFfnLayer, "predict", noted)
    monkeypatch.setattr(HostChoices, "begin", begun)
    copied.clear()
    assert (split.logits() == expected).all()
    with GgufFile.open(tmp_path / "m.gguf") as file:
        for layer_id, x, found in predicted:
            squares = x.astype(np.float64) ** 2
            normed = x / np.sqrt(squares.mean(axis=1, keepdims=True) + SHAPE.rms_eps)
            normed *= file.floats(f"blk.{layer_id}.ffn_norm.weight")
            logits = normed @ file.floats(f"blk.{layer_id}.ffn_gate_inp.weight").T
            assert (np.sort(np.argsort(logits)[:, -2:]) == np.sort(found)).all()
    assert [layer_id for layer_id, *_ in predicted] == [1, 2]
    first, ahead_1, second, ahead_2, third = chosen
    late_1, late_2 = second - ahead_1, third - ahead_2
    assert late_1 or late_2  # residuals have changed
    num = [len(each) for each in (first, ahead_1, late_1, ahead_2, late_2)]
    size = split.steps._model.spec.moe.layers[0].expert_bytes
    assert copied == [each * size for each in num if each]
    assert sum(map(sum, split.runtime.selections().values())) == 9 * PAIRS_OF_TOKEN


def test_what_the_last_chunk_chose_is_copied_ahead_of_routers_that_cannot_predict(
    tmp_path: Path, undo: contextlib.ExitStack, unpredicted: None, copied: list[int]
) -> None:
    """Though that is a small part of a layer's experts; what one token chose is not."""
    _, split = of_many_experts(tmp_path, undo)
    offload = split._backend._offload
    assert offload is not None
    split.logits()
    num_chosen = [np.count_nonzero(each) for each in split.runtime.selections().values()]
    shares = [known.shares for known in offload._layers.values()]
    num_often = [np.count_nonzero(each is not None and each * 9 > 1.5) for each in shares]
    for place in offload._places:
        place.clear()
    copied.clear()
    split.logits()
    size = split.steps._model.spec.moe.layers[0].expert_bytes
    assert 0 < num_often[1] < 9 * 2 / 2 + 1  # nine tokens, two experts each
    expected = [num_chosen[0]]
    for often, chosen in zip(num_often[1:], num_chosen[1:], strict=True):
        expected += [often, chosen - often]
    assert copied == [num * size for num in expected if num]


def test_a_choice_is_not_awaited_where_nearly_all_experts_are_expected(
    tmp_path: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """One of 20 was not chosen by the last group, and is computed all the same. All is counted in
    the end."""
    path = write_qwen3moe(
        tmp_path / "m.gguf", replace(SHAPE, num_experts=20), seed=4, tensor_type="Q8_0"
    )
    whole: Layers = dict.fromkeys(range(3), range(20))
    ids, chunks = IDS[:19], [19]
    expected = Split(undo, path, {LOCAL_OWNER: whole}, ids=ids, chunks=chunks).logits()
    split = Split(undo, path, {"gpu1": whole}, ids=ids, chunks=chunks, offload=OffloadMode.ON)
    offload, events = split._backend._offload, list[str]()
    assert offload is not None
    wait, sums = PendingChoice.wait, ChunkExperts.local_sums

    def waited(pending: PendingChoice) -> Any:
        events.append("choice")
        return wait(pending)

    def launched(experts: ChunkExperts, *what: Any, **how: Any) -> Any:
        events.append("products")
        return sums(experts, *what, **how)

    monkeypatch.setattr(PendingChoice, "wait", waited)
    monkeypatch.setattr(ChunkExperts, "local_sums", launched)
    assert (split.logits() == expected).all()
    assert events[0] == "choice"
    counts = split.runtime.selections()
    for known in offload._layers.values():
        known.shares = np.ones(20)
        known.shares[7] = 0.0
        for place in known.places:
            place.clear()
    copied.clear()
    events.clear()
    assert (split.logits() == expected).all()
    assert events[0] == "products"
    assert events[-1] == "choice"
    size = split.steps._model.spec.moe.layers[0].expert_bytes
    assert copied == [20 * size] * 3
    for layer_id, each in split.runtime.selections().items():
        assert (np.array(each) == 2 * np.array(counts[layer_id])).all()
    hits = split.runtime.hits
    assert (hits.layers, hits.offloaded) == (2 * 3, 2 * 3 * 19 * 2)


@pytest.mark.parametrize("num_parts", range(1, 8))
def test_a_group_that_is_given_up_leaves_no_part_behind(
    model: Path,
    resident: F32Array,
    undo: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    num_parts: int,
) -> None:
    """Though parts of its layer and of the next one are in places, and due."""
    monkeypatch.setattr(offload_room, "_PLACE_BYTES", moe_layer(model).expert_bytes)
    split = opened(undo, model, {"gpu1": WHOLE})
    calls = iter(range(1, 99))
    arrive = ExpertOffload._await

    def fails(offload: ExpertOffload, part: Any) -> None:
        if next(calls) == num_parts:
            raise DeviceUnavailable("cuda:0: the GPU has fallen off the bus")
        arrive(offload, part)

    with monkeypatch.context() as patched:
        patched.setattr(ExpertOffload, "_await", fails)
        with pytest.raises(DeviceUnavailable):
            split.logits()
    assert (split.logits() == resident).all()


def test_a_part_that_was_not_wanted_ahead_has_its_place_all_the_same(
    model: Path,
    resident: F32Array,
    undo: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another part of its layer, which comes later, is in it."""
    monkeypatch.setattr(offload_room, "_PLACE_BYTES", moe_layer(model).expert_bytes)
    split = opened(undo, model, {"gpu1": WHOLE})
    offload = split._backend._offload
    assert offload is not None
    parts = offload._parts(offload._layers[0])
    assert parts[0].place is parts[3].place
    parts[3].place.take(parts[3])
    parts[3].place.is_due = True
    assert (split.logits() == resident).all()


@pytest.mark.parametrize("tensor_type", [pytest.param("F32", marks=pytest.mark.slow), "Q8_0"])
def test_bits_with_experts_here_and_in_two_daemons(
    undo: contextlib.ExitStack, tmp_path: Path, tensor_type: str
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=4, tensor_type=tensor_type)
    expected = opened(undo, path, {LOCAL_OWNER: WHOLE}, OffloadMode.OFF).logits()
    here: Layers = {0: [4, 0, 2], 1: WHOLE[1]}
    there: Layers = {0: [3], 2: [0, 4]}
    rest: Layers = {0: [1], 2: [2, 1, 3]}
    some = opened(undo, path, {LOCAL_OWNER: here, "gpu1": there, "gpu2": rest})
    assert (some.logits() == expected).all()
    hits = some.runtime.hits
    assert hits.hot + hits.offloaded + hits.remote == IDS.size * PAIRS_OF_TOKEN
    assert hits.layers_hot_only >= len(CHUNKS)


def test_owners_on_devices_are_asked_all_the_same(
    model: Path,
    resident: F32Array,
    undo: contextlib.ExitStack,
) -> None:
    """By plan only what a CPU would compute is."""
    slow: Layers = {layer: [0, 3] for layer in WHOLE}
    rest: Layers = {layer: [1, 2, 4] for layer in WHOLE}
    split = opened(undo, model, {"cpu1": slow, "gpu1": rest}, OffloadMode.AUTO)
    on_cpu, on_gpu = split.runtime._owners
    on_gpu.stats.device = "cuda:1"
    found = split.logits()
    assert (found[:-NUM_STEPS] == resident[:-NUM_STEPS]).all()
    selections = split.runtime.selections()
    of_slow = sum(counts[each] for counts in selections.values() for each in (0, 3))
    assert split.runtime.hits.offloaded + on_cpu.stats.pairs == of_slow
    assert split.runtime.hits.offloaded > 0.5 * of_slow
    assert on_gpu.stats.pairs == split.runtime.hits.remote - on_cpu.stats.pairs > 0


def test_only_chosen_experts_are_copied(
    tmp_path: Path, undo: contextlib.ExitStack, unpredicted: None, copied: list[int]
) -> None:
    expected, split = of_many_experts(tmp_path, undo)
    layer = split.steps._model.spec.moe.layers[0]
    copied.clear()
    assert (split.logits() == expected).all()
    chosen = [np.count_nonzero(counts) for counts in split.runtime.selections().values()]
    assert max(chosen) < 30
    assert copied == [num * layer.expert_bytes for num in chosen]


def test_how_matrices_are_read_follows_from_the_pairs_of_the_experts_that_were_chosen(
    model: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are elsewhere are the cold ones: a chunk has fewer pairs of each of them."""
    means: list[float] = []
    run = ExpertPrefill.run

    def noted(prefill: ExpertPrefill, *what: Any, **how: Any) -> None:
        means.append(how["mean_rows"])
        run(prefill, *what, **how)

    split = opened(undo, model, {"gpu1": WHOLE})
    monkeypatch.setattr(ExpertPrefill, "run", noted)
    split.steps.forward(split.steps.begin(), IDS[:16], 0)
    counts = np.array([*split.runtime.selections().values()])
    assert means == [16 * SHAPE.num_experts_used / np.count_nonzero(each) for each in counts]


def test_a_file_that_has_become_shorter_is_not_read(
    undo: contextlib.ExitStack, tmp_path: Path, copied: list[int]
) -> None:
    """Its mapped bytes may be gone."""
    path = write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=4, tensor_type="Q8_0")
    split = opened(undo, path, {"gpu1": WHOLE})
    offload, wanted = split._backend._offload, np.ones(SHAPE.num_experts, np.bool_)
    assert offload is not None
    copied.clear()
    os.truncate(path, path.stat().st_size - 1)
    unread: Any = None
    chunk = OffloadedChunk(unread, unread, wanted)
    offload.add(1, chunk)
    with pytest.raises(ModelFileError):
        offload.sums_of(chunk, split.runtime)
    assert copied == []


def test_a_lost_daemon_is_not_missed_by_prompts(
    model: Path, resident: F32Array, undo: contextlib.ExitStack
) -> None:
    split = opened(undo, model, {"lost1": WHOLE})
    run = split.steps.begin()
    hidden = split.steps.forward(run, IDS[:16], 0)
    assert (split.steps.head(hidden) == resident[:16]).all()
    with pytest.raises(DaemonUnavailable, match=r"gone; .*required"):
        split.steps.forward(run, IDS[16:17], 16)


def logits(engine: Engine) -> F32Array:
    return engine.logits(IDS[:25].tolist(), [16, 9])


def engine_of(path: Path, mode: str, **options: Any) -> Engine:
    settings = replace(load_settings(), prefill_offload=mode)
    if "tolerates_absent" in options:  # which are not waited for
        settings = replace(settings, connect_timeout_ms=100)
    return Engine.open(
        path, device="cuda:0", context=48, local_experts=0, threads=1, settings=settings, **options
    )


@pytest.fixture
def absent(run_dir: Path) -> dict[str, Any]:
    """Of a daemon that never comes: its experts are cold."""
    return {"connect": [f"ipc://{run_dir}/absent"], "tolerates_absent": True}


def test_cold_experts_of_prompts_are_brought_to_the_device(
    model: Path,
    resident: F32Array,
    gpus: EmulatedGpus,
    absent: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = resident[:25]
    caplog.set_level(logging.INFO)
    with engine_of(model, "on", **absent) as engine:
        assert (logits(engine) == expected).all()
        asked = iter([False] * 2 + [True] * 99)
        cancelled = engine.generate(IDS[:16].tolist(), 2, is_cancelled=lambda: next(asked))
        assert list(cancelled) == []  # with a layer's experts on their way
        assert (logits(engine) == expected).all()
        hits = engine.stats().hits
        assert hits.cold == 0
        list(engine.generate(IDS[:16].tolist(), 3, ignore_eos=True))
        hits = engine.stats().hits
        assert hits.cold == 2 * PAIRS_OF_TOKEN
    told = [record.args for record in caplog.records if record.module == "offload"]
    assert told == [("the fallback",)]
    place = [
        text for text in caplog.messages if re.search(r"weights of prompts.* GiB on host:0\b", text)
    ]
    assert len(place) == 1
    for device in gpus.opened:
        assert not device.num_bytes
        assert not device._range_bytes  # nothing is mapped any more


def test_short_prompts_stay_with_their_owners(
    model: Path, gpus: EmulatedGpus, absent: dict[str, Any]
) -> None:
    with engine_of(model, "auto", **absent) as engine:
        logits(engine)
        assert engine.stats().hits.cold == 25 * PAIRS_OF_TOKEN
        assert engine.stats().hits.offloaded == 0


def test_without_room_on_the_device_owners_are_asked(
    model: Path,
    gpus: EmulatedGpus,
    absent: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine_of(model, "off", **absent) as engine:
        used_bytes = gpus.opened[-1].num_bytes
        expected = logits(engine)

    def check(words: str) -> None:
        caplog.clear()
        with engine_of(model, "on", **absent) as engine:
            assert words in caplog.text
            assert gpus.opened[-1].num_bytes == used_bytes
            assert (logits(engine) == expected).all()
            assert engine.stats().hits.cold == 25 * PAIRS_OF_TOKEN
        assert not gpus.opened[-1].num_bytes
        assert not gpus.opened[-1]._range_bytes

    gpus.free_bytes = 200 << 20
    check("GiB weights of prompts")
    gpus.free_bytes = 1 << 40

    def fails(error: Callable[[], DeviceUnavailable]) -> Callable[..., Any]:
        def method(*_: Any) -> Any:
            raise error()

        return method

    with monkeypatch.context() as patched:
        patched.setattr(EmulatedDevice, "new_stream", fails(lambda: DeviceUnavailable("no more")))
        check(": no more")

    def lacking() -> DeviceOutOfMemory:
        return DeviceOutOfMemory("host:0", num_bytes=9, free_bytes=1, total_bytes=8)

    with monkeypatch.context() as patched:
        patched.setattr(
            "dflash_runtime.compute.gpu.experts.offload.ExpertOffload._copy", fails(lacking)
        )
        check(": host:0")


@pytest.mark.e2e
def test_a_daemon_that_is_killed_between_prompts(
    model: Path, resident: F32Array, gpus: EmulatedGpus, run_dir: Path
) -> None:
    expected = resident[:25]
    endpoint = f"ipc://{run_dir}/cpu.sock"
    options = ["--device", "cpu", "--threads", "1"]
    with (
        running_daemon(model, endpoint, options) as daemon,
        engine_of(model, "on", connect=[endpoint]) as engine,
    ):
        assert (logits(engine) == expected).all()
        prompt = IDS[:16].tolist()
        written = [token.token_id for token in engine.generate(prompt, 4, ignore_eos=True)]
        assert engine.stats().hits.remote == 3 * PAIRS_OF_TOKEN
        daemon.kill()
        daemon.wait()
        assert (logits(engine) == expected).all()
        again = [token.token_id for token in engine.generate(prompt, 4, ignore_eos=True)]
        assert again == written
        hits = engine.stats().hits
        assert (hits.remote, hits.cold) == (3 * PAIRS_OF_TOKEN, 3 * PAIRS_OF_TOKEN)
    for left in run_dir.glob("cpu.sock*"):  # what is killed cannot clean up
        left.unlink()
