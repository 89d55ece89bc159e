"""Experts of a random model in memory and in an arena, which reads them from the disk: to compare
both, and to spoil what the arena holds between batches."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.ids import F64Array, I32Array, I64Array, Phase, U8Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.host_arena import HostArena
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.routers_ahead import routers_ahead
from dflash_runtime.compute.expert_arena import ArenaOptions
from dflash_runtime.compute.half_lives import CachePolicy
from support.plain_arena import EMPTY
from support.random_models import Qwen3MoeShape

SHAPE = Qwen3MoeShape(
    "of several layers",
    num_layers=3,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_experts=8,
    num_experts_used=2,
    ffn_size=96,
    vocab_size=300,
    context_length=64,
)
E, K, LAYERS = SHAPE.num_experts, SHAPE.num_experts_used, SHAPE.num_layers

_SPOILT = 0xFF
"""Each byte of memory that holds no expert: NaNs as floats and as scales of blocks."""


@dataclass(frozen=True)
class Rig:
    """Banks of all layers, in memory and brought from the disk, with the arena of these."""

    file: GgufFile
    there: list[CpuExpertBank]
    brought: list[CpuExpertBank]
    arena: HostArena

    def check(self, layer: int, batch: RoutedBatch) -> None:
        expected, found = (result(banks[layer], batch) for banks in (self.there, self.brought))
        np.testing.assert_array_equal(found, expected)


def result(bank: CpuExpertBank, batch: RoutedBatch) -> F64Array:
    out = np.zeros(batch.hidden.shape)
    bank.accumulate(batch, out)
    return out


def batch_of(
    chosen: I32Array,
    seed: int = 0,
    phase: Phase = Phase.DECODE,
    *,
    hidden_size: int = SHAPE.hidden_size,
) -> RoutedBatch:
    """Shapes: chosen [T, K]."""
    rng, num_tokens = np.random.default_rng(seed), chosen.shape[0]
    return group_by_expert(
        rng.standard_normal((num_tokens, hidden_size)).astype(np.float32),
        np.repeat(np.arange(num_tokens, dtype=np.int32), chosen.shape[1]),
        chosen.reshape(-1),
        weights=rng.random(chosen.size).astype(np.float32),
        phase=phase,
    )


def tokens(num_tokens: int, seed: int) -> I32Array:
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(E, K, replace=False) for _ in range(num_tokens)]).astype(np.int32)


@contextlib.contextmanager
def rig_of(
    path: Path,
    backend: CpuBackend,
    num_slots: int,
    *,
    looks_ahead: bool = False,
    policy: CachePolicy = CachePolicy.AUTO,
    shares: Mapping[int, F64Array] | None = None,
) -> Iterator[Rig]:
    """`num_slots`: experts that there is room for; others: see ArenaOptions."""
    with GgufFile.open(path) as file:
        layers = read_spec(file).moe.layers
        ids = np.arange(layers[0].num_experts, dtype=np.int32)
        there, brought = (
            [backend.load_experts(file, layer, ids) for layer in layers] for _ in range(2)
        )
        routers = routers_ahead(
            file,
            {bank.layer.layer_id: bank for bank in brought},
            most_bytes=1 << 20 if looks_ahead else 0,
        )
        assert len(routers) == (len(layers) - 1 if looks_ahead else 0)
        num_bytes = num_slots * slot_bytes_of(file)
        num_bytes += sum(each.num_bytes for each in routers.values())
        options = ArenaOptions(num_bytes, policy=policy, shares=shares or {})
        with contextlib.closing(HostArena(file, brought, options, routers=routers)) as arena:
            yield Rig(file, there, brought, arena)


def slot_bytes_of(file: GgufFile) -> int:
    """What an expert takes in an arena."""
    return max(
        sum(-(-each.num_bytes // w.BLOCK) * w.BLOCK + w.BLOCK for each in layer.projections)
        for layer in read_spec(file).moe.layers
    )


def slots_of(arena: HostArena) -> I64Array:
    """Their words, which change. Shapes: [slots, SLOT_WORDS]."""
    return arena._slots


def memory_of(arena: HostArena) -> U8Array:
    """Shapes: [slots, bytes]."""
    return np.frombuffer(arena._memory, np.uint8).reshape(slots_of(arena).shape[0], -1)


def held_by(arena: HostArena) -> list[tuple[int, int]]:
    """Layer and expert of each slot, by places in the order of banks; `EMPTY`."""
    numbers = {layer.words.ctypes.data: number for number, layer in enumerate(arena._layers)}
    return [
        (numbers[words[w.LAYER]], words[w.EXPERT]) if words[w.LAYER] else EMPTY
        for words in slots_of(arena).tolist()
    ]


def empty_some(arena: HostArena, rng: np.random.Generator, share: float) -> int:
    """Have experts leave at random, as if others had come, and spoil all memory that holds none;
    how many have left. No batch may be running."""
    slots, memory, num_left = slots_of(arena), memory_of(arena), 0
    for slot, held in enumerate(held_by(arena)):
        if slots[slot, w.NUM_PENDING]:
            continue  # the system may still write there
        if held != EMPTY and rng.random() < share:
            layer, expert = arena._layers[held[0]], held[1]
            addresses = _addresses(arena, held[0])
            addresses[expert] = layer.mapped[expert]
            layer.slot_of[expert] = -1
            slots[slot, w.LAYER] = 0
            held, num_left = EMPTY, num_left + 1
        if held == EMPTY:
            memory[slot] = _SPOILT
    return num_left


def check_whole(arena: HostArena) -> None:
    """All parts of an arena say the same. No batch may be running."""
    words, slots, layers = arena._words, slots_of(arena), arena._layers
    assert words[w.LOCK] == 0
    free = arena._arrays[3][: words[w.NUM_FREE]].tolist()
    assert len({*free}) == len(free)
    assert all(0 <= each < w.MOST_PENDING for each in free)
    assert slots[:, w.NUM_PENDING].min() >= 0
    assert slots[:, w.NUM_PENDING].sum() == w.MOST_PENDING - words[w.NUM_FREE]
    held = {each: slot for slot, each in enumerate(held_by(arena)) if each != EMPTY}
    memory = memory_of(arena)
    for number, layer in enumerate(layers):
        addresses = _addresses(arena, number)
        for expert, slot in enumerate(layer.slot_of.tolist()):
            assert held.pop((number, expert), -1) == slot
            if slot < 0:
                np.testing.assert_array_equal(addresses[expert], layer.mapped[expert])
            else:
                first = memory[slot].ctypes.data
                assert (addresses[expert] >= first).all()
                assert (addresses[expert] < first + memory.shape[1]).all()
    assert not held


def _addresses(arena: HostArena, layer: int) -> I64Array:
    """The bank's own, where experts are now. Shapes: [E, 3]."""
    words = arena._layers[layer].words
    shape = int(words[w.NUM_EXPERTS]), 3
    kind = ctypes.c_int64 * (shape[0] * shape[1])
    return np.ctypeslib.as_array(kind.from_address(int(words[w.ADDRESSES]))).reshape(shape)


def read_from(arena: HostArena, path: Path | str, flags: int = os.O_RDONLY) -> None:
    """From now on, instead of the model's file."""
    [descriptor] = arena._descriptors.values()
    other = os.open(path, flags)
    os.dup2(other, descriptor)
    os.close(other)
