"""A parent on an emulated GPU that moves experts at random.

As a program: it does so while the limit of its memory cgroup falls to what it has and little more,
and prints each round's placement and text as JSON.

Example:
  python -m support.moving_parent model.gguf /sys/fs/cgroup/memory/mine/memory.limit_in_bytes
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.placement import Placement
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.memory import host_memory
from dflash_runtime.compute.room import staged_slots
from dflash_runtime.engine import replacing
from dflash_runtime.experts.telemetry import MoveStats
from support.planned_gpu import CONTEXT, OneGpu
from support.scripted_moves import ScriptedPolicy

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 6
NUM_ROUNDS = 20
_MOST = 6
_END_S = 30.0
_LITTLE = 3 << 20


def install_moving_gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> OneGpu:
    """With room for half of the experts, and for those that are about to move there."""
    monkeypatch.setattr(replacing, "MovePolicy", ScriptedPolicy)
    gpu = OneGpu(monkeypatch, model)
    gpu.copies_per_s = 1e12
    gpu.make_room_for(5)
    with GgufFile.open(model) as file:
        num_slots, slot_bytes = staged_slots(read_spec(file).moe.layers, _MOST)
    gpu.room_bytes += num_slots * slot_bytes
    return gpu


def opened(model: Path, placement: Placement | None = None) -> Engine:
    """With hot experts on the GPU, or where the placement says."""
    settings = replace(
        load_settings(),
        model=str(model),
        context=CONTEXT,
        kv_type="f16",
        heat="off",
        prefill_offload="off",
        swap_max=_MOST,
        moe_mode="hot" if placement is None else "auto",
    )
    return Engine.open(
        model,
        placement=placement,
        device=None if placement is None else "cuda:0",
        settings=settings,
    )


def text_of(engine: Engine, written: list[int] | None = None) -> list[int]:
    """Without moves. `written` gets the tokens as they come."""
    written = [] if written is None else written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_mover", None)
        for each in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
            written.append(each.token_id)
    return written


def next_round(engine: Engine) -> MoveStats:
    """Try to move experts until a round has ended one way or the other."""
    before = engine.stats().moves
    end_s = time.monotonic() + _END_S
    while (now := engine.stats().moves) == before:
        engine.move_experts()
        assert time.monotonic() < end_s
    return now


def main(arguments: Sequence[str]) -> None:
    model, limit = map(Path, arguments)
    rounds = []
    with pytest.MonkeyPatch.context() as patched:
        install_moving_gpu(patched, model)
        with opened(model) as engine:
            text_of(engine)
            next_round(engine)
            memory = host_memory()  # of the cgroup, without pages of files, which are given up
            limit.write_text(str(memory.total_bytes - memory.free_bytes + _LITTLE))
            for _ in range(NUM_ROUNDS):
                next_round(engine)
                owned = zip(engine.placement.owner_names, engine.placement.owners, strict=True)
                rounds.append({
                    "text": text_of(engine),
                    "owners": {
                        name: {layer: ids.tolist() for layer, ids in each.by_layer.items()}
                        for name, each in owned
                    },
                })  # fmt: skip
    print(json.dumps(rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
