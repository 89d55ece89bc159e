"""The context of a parent on the processor: within its memory, with its daemons'."""

from __future__ import annotations

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.host_room import LEAST_PROCESS_BYTES
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import Room
from dflash_runtime.placement import host_context
from dflash_runtime.placement.footprint import Memory, Request, footprint
from dflash_runtime.placement.host_context import context_on_host, require_daemon_room
from support.random_gguf import write_model
from support.random_models import Qwen3MoeShape

MIB = 1 << 20
CONTEXT = 8192
SHAPE = Qwen3MoeShape(
    num_heads=8, num_kv_heads=8, head_dim=64, num_layers=2, context_length=CONTEXT
)
"""4 KiB of keys and values for a position."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Room:
    path = write_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, seed=1)
    with GgufFile.open(path) as file:
        return footprint(file, read_spec(file), Memory.HOST)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    room = {"bytes": 0}
    monkeypatch.setattr(host_context, "process_room", lambda: room["bytes"])
    return room


def chosen(found: Room, *, is_asked: bool = False, num_daemons: int = 0) -> int:
    return context_on_host(
        found,
        Request(KvType.F16, 512),
        num_positions=CONTEXT,
        most=CONTEXT,
        is_asked=is_asked,
        num_daemons=num_daemons,
    )


def test_a_context_that_fits_is_taken_and_one_that_was_asked_for_is_not_changed(
    found: Room, room: dict[str, int]
) -> None:
    assert chosen(found) == CONTEXT  # the system says nothing
    room["bytes"] = LEAST_PROCESS_BYTES + 80 * MIB
    assert chosen(found, is_asked=True) == CONTEXT
    room["bytes"] = LEAST_PROCESS_BYTES + 40 * MIB
    fits = chosen(found)
    assert 2000 < fits < CONTEXT
    with pytest.raises(SettingsError, match=rf"a context of {fits // 1024},\d+ fits"):
        chosen(found, is_asked=True)
    room["bytes"] = LEAST_PROCESS_BYTES
    with pytest.raises(SettingsError, match="no context fits"):
        chosen(found)


def test_daemons_that_are_started_take_memory_too(found: Room, room: dict[str, int]) -> None:
    room["bytes"] = LEAST_PROCESS_BYTES + 80 * MIB
    with pytest.raises(SettingsError, match="beside its daemons"):
        chosen(found, num_daemons=2)
    room["bytes"] += 2 * (LEAST_PROCESS_BYTES + 8 * MIB)
    assert chosen(found, num_daemons=2) == CONTEXT


def test_a_daemon_needs_a_process(found: Room, room: dict[str, int]) -> None:
    require_daemon_room(found, 512)
    room["bytes"] = LEAST_PROCESS_BYTES + 8 * MIB
    require_daemon_room(found, 512)
    room["bytes"] = LEAST_PROCESS_BYTES - MIB
    with pytest.raises(SettingsError, match="a daemon needs"):
        require_daemon_room(found, 512)
