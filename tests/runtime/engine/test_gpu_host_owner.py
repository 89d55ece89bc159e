"""A parent on a GPU, emulated here, whose processor has experts too: the same bits as with these
experts in a CPU daemon, in steps of compiled code and of Python, in chunks, and in trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array, I32Array
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import DaemonSetting
from dflash_runtime import Engine
from dflash_runtime.compute.cpu.captured.mail_thread import MailThread
from dflash_runtime.compute.gpu.run import host_path, path_choice
from dflash_runtime.compute.gpu.transfers.host_rows import HostRows, LentRows
from dflash_runtime.engine import opening
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.arena_rig import read_from
from support.disk_engines import arena_of, stats_of
from support.emulated_gpu import TINY, TINY_GPT_OSS, EmulatedGpus, install_emulated_gpus
from support.mailbox_rig import Rings
from support.random_gguf import RandomShape, write_model
from support.random_models import write_qwen3moe
from support.undisturbed import settings_with

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 10
ARENA_BYTES = (TINY.num_experts - 2 + 1) * 3 * 8192
"""For experts of the processor beside two of a layer on the GPU: not for those of both layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


def opened(
    model: Path,
    *,
    daemons: Sequence[str] = (),
    offload: str = "off",
    transport: str = "auto",
    **options: Any,
) -> Engine:
    settings = replace(settings_with(check_replies=0), context=48, prefill_offload=offload)
    settings = replace(settings, ipc_transport=transport)
    return Engine.open(model, device="cuda:0", daemons=daemons, settings=settings, **options)


def tokens_of(engine: Engine, **wish: Any) -> list[int]:
    options = {"ignore_eos": True, **wish}
    return [each.token_id for each in engine.generate(PROMPT, NUM_TOKENS, **options)]


def results_of(engine: Engine) -> tuple[list[int], F32Array]:
    tokens = [*tokens_of(engine), *tokens_of(engine, temperature=2.0, seed=3)]
    return tokens, engine.logits([*PROMPT, *tokens], 12)


@pytest.mark.parametrize("local_experts", [0, 2])
def test_bits_are_those_with_the_experts_in_a_cpu_daemon(
    model: Path, gpus: EmulatedGpus, local_experts: int
) -> None:
    found = []
    for daemons in (["cpu"], []):
        with opened(model, daemons=daemons, local_experts=local_experts) as engine:
            found.append(results_of(engine))
            times = opening._asked_in_steps(engine._owners.runtime)
    assert times is not None  # of the last, without a daemon
    (expected_tokens, expected), (tokens, logits) = found
    assert tokens == expected_tokens
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("local_experts", [0, 2])
def test_a_mailbox_and_compiled_steps_have_tokens_and_counts_of_those_that_python_runs(
    model: Path, gpus: EmulatedGpus, local_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_host, by_mail, found = 0, 0, []
    ask = host_path._Exchange.__call__

    def counted(exchange: host_path._Exchange) -> None:
        nonlocal by_host
        by_host += 1
        ask(exchange)

    rung = MailThread.ask

    def counted_ring(thread: MailThread, num_tokens: int) -> None:
        nonlocal by_mail
        by_mail += 1
        rung(thread, num_tokens)

    monkeypatch.setattr(host_path._Exchange, "__call__", counted)
    monkeypatch.setattr(MailThread, "ask", counted_ring)
    for way in ("mailbox", "compiled", "Python"):
        with monkeypatch.context() as patch:
            if way != "mailbox":
                patch.setattr(path_choice, "own_banks", lambda remote: {})
            if way == "Python":
                patch.setattr(MoeExpertComputeRuntime, "ask_routes", lambda self: None)
            with opened(model, local_experts=local_experts) as engine:
                tokens = tokens_of(engine)
                stats = engine.stats()
        pairs = {name: (owner.kind, owner.pairs) for name, owner in stats.owners.items()}
        found.append((tokens, pairs, stats.hits, stats.selections))
        if way != "Python":
            assert by_host == 0
        assert by_mail == NUM_TOKENS - 1
    assert by_host >= (NUM_TOKENS - 1) * TINY.num_layers
    assert found[0] == found[1] == found[2]
    _, pairs, hits, selections = found[0]
    num_chosen = sum(map(sum, selections.values()))
    assert sum(num_pairs for _, num_pairs in pairs.values()) == num_chosen == hits.hot
    assert pairs[HOST_OWNER][0] is OwnerKind.LOCAL
    assert pairs[HOST_OWNER][1] > 0
    assert (LOCAL_OWNER in pairs) == (local_experts > 0)


def test_only_used_rows_of_chunks_come_to_the_host(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in mapped memory, all of which is given back."""
    lent: list[tuple[int, int]] = []
    lend = HostRows.lend

    def noted(rows: HostRows, array: Any, indices: I32Array | None, mark: Any) -> LentRows:
        found = lend(rows, array, indices, mark)
        lent.append((array.shape[0], found.hidden.shape[0]))
        return found

    monkeypatch.setattr(HostRows, "lend", noted)
    with opened(model, local_experts=TINY.num_experts - 1) as engine:
        engine.logits(PROMPT, 11)
        pairs = engine.stats().owners[HOST_OWNER].pairs
    assert {whole for whole, _ in lent} == {len(PROMPT)}
    assert 0 < sum(used for _, used in lent) == pairs  # one expert of each layer
    assert not any(device._range_bytes for device in gpus.opened)


def test_a_daemon_may_have_some_as_well(model: Path, gpus: EmulatedGpus) -> None:
    with opened(model, daemons=["cpu"], local_experts=2) as engine:
        expected, placement = results_of(engine), engine.placement
    names = [*placement.owner_names, HOST_OWNER]
    here, theirs = (owned.by_layer for owned in placement.owners)
    halves = [
        {layer: ids[part] for layer, ids in theirs.items()} for part in (slice(1), slice(1, 9))
    ]
    owners = tuple(type(placement.owners[0])(each) for each in (here, *halves))
    mixed = replace(placement, owner_names=tuple(names), owners=owners)
    with opened(model, daemons=["cpu"], placement=mixed, transport="shared") as engine:
        tokens, logits = results_of(engine)
        owners_of = engine.stats().owners
        times = opening._asked_in_steps(engine._owners.runtime)
    assert times is None  # of steps that the host asks: not those of a device's mailbox
    assert tokens == expected[0]
    np.testing.assert_array_equal(logits, expected[1])
    assert all(owners_of[name].pairs > 0 for name in names)


def test_drafts_are_verified(model: Path, gpus: EmulatedGpus) -> None:
    with opened(model, local_experts=2) as engine:
        expected = tokens_of(engine)
        first = engine.prefill(PROMPT)
        found = engine.verify(expected[:4], [-1, 0, 1, 2])
        assert [int(first.next_token_ids[-1]), *found.next_token_ids.tolist()] == expected[:5]


def test_a_parent_on_the_cpu_has_no_such_owner(model: Path, gpus: EmulatedGpus) -> None:
    with opened(model, local_experts=2) as engine:
        placement = engine.placement
    with pytest.raises(SettingsError, match="unknown owners"):
        Engine.open(model, placement=placement)


@pytest.mark.parametrize("name", [LOCAL_OWNER, HOST_OWNER])
def test_a_daemon_cannot_have_the_parents_name(model: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="rename it"):
        Engine.open(model, daemons=[DaemonSetting("cpu", name=name)])


def swapped(placement: Placement, random: np.random.Generator) -> Placement:
    """The same with some experts of each layer exchanged between its two owners."""
    owners = [
        {layer: ids.copy() for layer, ids in each.by_layer.items()} for each in placement.owners
    ]
    for layer_id, first in owners[0].items():
        second = owners[1][layer_id]
        for _ in range(random.integers(0, 3)):
            here, there = random.integers(0, first.size), random.integers(0, second.size)
            first[here], second[there] = second[there], first[here]
    return replace(placement, owners=tuple(map(OwnedExperts, owners)))


@pytest.mark.parametrize(
    ("shape", "tensor_type", "offload"),
    [
        (TINY, "Q8_0", "off"),
        pytest.param(TINY, "F16", "on", marks=pytest.mark.slow),
        pytest.param(TINY_GPT_OSS, "MXFP4", "on", marks=pytest.mark.slow),
    ],
    ids=["asked", "copied", "biases"],
)
def test_texts_after_experts_moved_are_those_of_a_new_engine(
    gpus: EmulatedGpus, tmp_path: Path, shape: RandomShape, tensor_type: str, offload: str
) -> None:
    def type_of(name: str) -> str:
        is_router = "ffn_gate_inp." in name
        return "F32" if is_router else tensor_type if "_exps" in name else "Q8_0"

    path = write_model(tmp_path / "m.gguf", shape, seed=5, tensor_type=type_of)
    random = np.random.default_rng(5)
    with opened(path, local_experts=2, offload=offload) as engine:
        results_of(engine)
        held = None
        for turn in range(6):
            placement = swapped(engine.placement, random)
            engine.replace_experts(placement)
            found = results_of(engine)
            if turn in (0, 5):
                with opened(path, placement=placement, offload=offload) as fresh:
                    expected = results_of(fresh)
                assert found[0] == expected[0]
                np.testing.assert_array_equal(found[1], expected[1])
            if turn == 2:
                held = gpus.opened[0].num_bytes
        assert gpus.opened[0].num_bytes == held


def test_prefixes_are_reused_after_moves_within_a_class_and_not_across(
    model: Path, gpus: EmulatedGpus
) -> None:
    def reused(engine: Engine) -> int:
        tokens.append(tokens_of(engine, reuse_prefix=True))
        return engine.last_generation.num_reused_tokens

    tokens: list[list[int]] = []
    with opened(model, local_experts=2) as engine:
        assert reused(engine) == 0
        most = reused(engine)
        assert most > 0
        before = engine.placement
        turned = [
            {layer_id: ids[::-1] for layer_id, ids in owned.by_layer.items()}
            for owned in before.owners
        ]
        within = replace(before, owners=tuple(map(OwnedExperts, turned)))
        assert engine._owners.runtime.keeps_classes(within)
        engine.replace_experts(within)
        assert reused(engine) == most
        assert tokens[1:] == tokens[:-1]
        across = swapped(within, np.random.default_rng(1))
        assert not engine._owners.runtime.keeps_classes(across)
        engine.replace_experts(across)
        assert reused(engine) == 0
        assert reused(engine) == most
        engine.replace_experts(within)
        assert reused(engine) == 0
        assert tokens[-1] == tokens[0]


def test_a_placement_that_needs_more_than_that_changes_nothing(
    model: Path, gpus: EmulatedGpus
) -> None:
    with opened(model, local_experts=2) as engine:
        expected, before = results_of(engine), engine.placement
        with opened(model, local_experts=3) as other:
            placement = other.placement
        with pytest.raises(ValueError, match="room for 2 experts"):
            engine.replace_experts(placement)
        assert engine.placement is before
        found = results_of(engine)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("offload", ["off", "on"])
def test_experts_of_the_processor_come_from_the_disk_with_the_same_bits(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    found, disks, rings = [], [], Rings(monkeypatch)
    for way in ("in memory", "mailbox", "host"):
        with monkeypatch.context() as patch:
            given = None if way == "in memory" else ARENA_BYTES
            patch.setattr(opening, "_arena_bytes", lambda *_, given=given: given)
            if way == "host":
                patch.setattr(path_choice, "own_banks", lambda remote: {})
            rings.count = 0
            with opened(model, local_experts=2, offload=offload) as engine:
                found.append(results_of(engine))
                if (disk := engine.stats().disk) is not None:
                    disks.append(disk)
                    with pytest.raises(SettingsError, match="read from the disk"):
                        engine.replace_experts(engine._owners.runtime.placement)
        assert (rings.count > 0) == (way != "host")
    (expected_tokens, expected), *others = found
    for tokens, logits in others:
        assert tokens == expected_tokens
        np.testing.assert_array_equal(logits, expected)
    for disk in disks:
        assert disk.failed == 0
        assert disk.num_slots < TINY.num_layers * (TINY.num_experts - 2)
        assert disk.missed > disk.num_slots
    by_mail, by_host = (disk.look_ahead for disk in disks)
    # Predictions from rows that are rounded to int8 are nearly those from the rows.
    assert by_mail.checked == by_host.checked > 0
    assert by_mail.predicted == pytest.approx(by_host.predicted, rel=0.2)
    assert by_mail.predicted > 0


def test_reads_that_fail_cost_a_step_time_alone(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used then is the mapped file."""
    with opened(model, local_experts=2) as engine:
        expected = tokens_of(engine)
    monkeypatch.setattr(opening, "_arena_bytes", lambda *_: ARENA_BYTES)
    with opened(model, local_experts=2) as engine:
        text = engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
        found = [next(text).token_id for _ in range(2)]
        read_from(arena_of(engine), "/dev/null")
        found += [each.token_id for each in text]
        assert found == expected
        assert stats_of(engine).failed > 0
