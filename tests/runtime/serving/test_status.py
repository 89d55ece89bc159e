"""What the status page is told: owners as they are, counts that add up."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from typing import Any

import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import Phase
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.slot_stats import SlotStats
from dflash_runtime.engine.engine import Engine, EngineStats
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.events import Event, EventKind
from dflash_runtime.experts.telemetry import MoveStats, OwnerKind, OwnerStats
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.plan_record import as_record
from dflash_runtime.placement.planner import plan as planned
from dflash_runtime.serving import worker
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.status import expert_types, owner_status
from support.planned_boxes import (
    CARD,
    CORES_16,
    GIB,
    MIB,
    BoxRow,
    model_spec,
    moe_spec,
    situation,
)
from support.processes import ROOT
from support.routed_batches import moe_layer

Serve = Callable[..., AbstractAsyncContextManager[Any]]
NUM_USED = 2
PLANNED = planned(
    situation(
        model_spec(moe_spec([3 * MIB] * 3, num_experts=8, num_used=2)),
        BoxRow(CARD, 550 * MIB, CORES_16, 8 * GIB),
        chunks=(256,),
    )
)
assert isinstance(PLANNED, Plan)
PLAN: Plan = PLANNED
EVENTS = [
    Event(1.0, EventKind.DAEMON_LOST, "cpu0", "no heartbeat"),
    Event(2.0, EventKind.BREAKER_OPEN, "cpu1", "3 requests in a row failed"),
    Event(3.0, EventKind.DAEMON_LOST, "cpu0", "the process has ended"),
    Event(4.0, EventKind.DAEMON_BACK, "cpu0", "away for 1.0 s"),
]


@pytest.mark.asyncio
async def test_status_says_what_was_done(serve: Serve) -> None:
    async with serve() as served:
        before = (await served.client.get("/status")).json()
        await served.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        after = (await served.client.get("/status")).json()
    assert before["schema_version"] == 1
    assert before["model"] == {
        "id": "small",
        "name": "random qwen3moe, default",
        "architecture": "qwen3moe",
        "expert_types": ["F32"],
        "num_moe_layers": 2,
        "num_experts": 4,
        "num_experts_used": NUM_USED,
        "num_positions": 512,
        "has_chat_template": True,
        "backend": "reference",
    }
    assert before["tokens"] == {"prompt": 0, "generated": 0}
    assert after["tokens"] == {"prompt": 4, "generated": 4}
    assert after["queue"] == {
        "capacity": 64, "waiting": 0, "running": 0, "reading": None, "stalled_s": None
    }  # fmt: skip
    assert after["is_well"]
    assert after["time_s"] > before["time_s"]
    [owner] = after["owners"]
    assert (owner["name"], owner["kind"], owner["device"]) == ("local", "local", "reference")
    assert (owner["state"], owner["num_experts"]) == ("ready", 8)
    assert owner["decode_round_trip_s"] is None
    # Four tokens of the prompt and the first three written ones, in each of two layers.
    assert owner["pairs"] == 2 * NUM_USED * 7


def rows_of_status() -> dict[str, str]:
    """What the document says of each field."""
    table = (ROOT / "docs/serving.md").read_text().partition("| `GET /status` | |")[2]
    return dict(re.findall(r"^\| (`.*?) \| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE))


@pytest.mark.asyncio
async def test_the_fields_are_those_of_the_document(serve: Serve) -> None:
    async with serve() as served:
        found, rows = (await served.client.get("/status")).json(), rows_of_status()
    assert {"schema_version", *re.findall(r"`(\w+)`", " ".join(rows))} == found.keys()
    [owner] = found["owners"]
    values = {"local", "daemon", "fallback", "ready", "lost", "paused", "probed"}
    for name, fields, others in (
        ("model", found["model"], set()),
        ("owners", owner, values),
        ("queue", found["queue"], {"done", "total"}),
        ("tokens", found["tokens"], set()),
    ):
        assert {*re.findall(r"`(\w+)`", rows[f"`{name}`"])} - others == fields.keys()


@pytest.mark.asyncio
async def test_slots_of_steps_are_told_where_there_are_some(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = SlotStats(num_slots=8, found=50, fetched=7, kept=2, fetched_bytes=7000)
    async with serve() as served:
        before = (await served.client.get("/status")).json()
        metrics = (await served.client.get("/metrics")).text
        stats = Engine.stats
        monkeypatch.setattr(Engine, "stats", lambda engine: replace(stats(engine), slots=slots))
        await served.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        after = (await served.client.get("/status")).json()
        lines = (await served.client.get("/metrics")).text.splitlines()
    assert before["slots"] is None
    assert "slot" not in metrics
    assert after["slots"] == asdict(slots)
    for name, value in (
        ("expert_slots", 8),
        ("selections_in_slots_total", 50),
        ('experts_fetched_total{outcome="kept"}', 2),
        ('experts_fetched_total{outcome="dropped"}', 5),
        ("experts_fetched_bytes_total", 7000),
    ):
        assert f"dflash_moe_{name} {value}.0" in lines
    hits = after["hits"]
    assert f"dflash_moe_layers_total {hits['layers']}.0" in lines
    assert f"dflash_moe_layers_hot_only_total {hits['layers_hot_only']}.0" in lines
    assert {*re.findall(r"`(\w+)`", rows_of_status()["`slots`"])} == after["slots"].keys()
    assert {*re.findall(r"`(\w+)`", rows_of_status()["`hits`"])} == hits.keys()


@pytest.mark.asyncio
async def test_the_plan_is_told_with_what_is_measured(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = MoveStats(rounds=2, rounds_not_applied=1, experts_moved=6, last_reason="it pays")
    stats = Engine.stats
    monkeypatch.setattr(Engine, "stats", lambda engine: replace(stats(engine), moves=moves))
    async with serve() as served:
        assert (await served.client.get("/status")).json()["plan"] is None
        plan_of = property(lambda engine: PLAN)
        monkeypatch.setattr(Engine, "plan", plan_of, raising=False)
        before = (await served.client.get("/status")).json()
        await served.post("/v1/completions", prompt="x" * 300, max_tokens=4, ignore_eos=True)
        after = (await served.client.get("/status")).json()
        metrics = (await served.client.get("/metrics")).text.splitlines()
    plan = before["plan"]
    assert plan.pop("measured") == dict.fromkeys(plan["forecast"])
    assert plan == {
        key: value for key, value in as_record(PLAN).items() if key not in ("owners", "answering")
    }
    measured = after["plan"]["measured"]
    assert measured["decode"] > 0
    assert measured["prompt_512"] > 0
    assert measured["prompt_4096"] is None
    assert after["moves"] == asdict(moves)
    table = (ROOT / "docs/serving.md").read_text()
    for name, keys in (("plan", after["plan"].keys()), ("moves", after["moves"].keys())):
        [row] = re.findall(rf"^\| `{name}` \| (.*) \|$", table, re.MULTILINE)
        assert keys <= {*re.findall(r"`(\w+)`", row)}
    assert f'dflash_moe_predicted_tokens_per_second{{work="decode"}} {PLAN.forecast.decode}' in (
        metrics
    )
    found = [each for each in metrics if each.startswith("dflash_moe_measured_tokens_per_second{")]
    assert len(found) == 2
    free = PLAN.budgets[0].free_bytes
    assert any(
        each.startswith('dflash_moe_plan_device_bytes{device="cuda:0",use="free"}')
        and float(each.split()[-1]) == free
        for each in metrics
    )
    assert 'dflash_moe_expert_move_rounds_total{outcome="applied"} 2.0' in metrics
    assert "dflash_moe_experts_moved_total 6.0" in metrics


@pytest.mark.asyncio
async def test_status_says_how_far_a_prompt_is_and_that_it_gets_on_no_more(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunking = replace(ReferenceBackend.chunking, preferred=8)
    monkeypatch.setattr(ReferenceBackend, "chunking", chunking)
    forward, may_go_on = Steps.forward, threading.Event()

    def slow(steps: Any, run: Any, token_ids: Any, first_position: int, *more: Any) -> Any:
        if first_position == 16:
            assert may_go_on.wait(10)
        return forward(steps, run, token_ids, first_position, *more)

    monkeypatch.setattr(Steps, "forward", slow)
    async with serve() as served:
        asked = asyncio.create_task(served.post("/v1/completions", prompt="x" * 40, max_tokens=2))
        async with asyncio.timeout(10):
            while True:
                found = (await served.client.get("/status")).json()
                if found["queue"]["reading"] == {"done": 16, "total": 40}:
                    break
                await asyncio.sleep(0.005)
        stalled_s = found["queue"]["stalled_s"]
        assert stalled_s >= 0
        assert found["is_well"]
        later = (await served.client.get("/status")).json()
        assert later["queue"]["stalled_s"] > stalled_s
        monkeypatch.setattr(worker, "_HUNG_S", stalled_s)
        assert not (await served.client.get("/status")).json()["is_well"]
        assert (await served.client.get("/health")).status_code == 503
        may_go_on.set()
        assert (await asked).status_code == 200
        found = (await served.client.get("/status")).json()
        assert (found["queue"]["reading"], found["queue"]["stalled_s"]) == (None, None)
        assert found["is_well"]


@pytest.mark.asyncio
async def test_only_the_engines_thread_reads_its_counters(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read what it has published, which nothing changes any more."""
    readers: set[str] = set()
    stats = Engine.stats

    def noted(engine: Engine) -> EngineStats:
        readers.add(threading.current_thread().name)
        return stats(engine)

    monkeypatch.setattr(Engine, "stats", noted)
    async with serve() as served:
        before = served.state.worker.stats
        await served.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        for path in ("/status", "/status/experts", "/metrics", "/props"):
            assert (await served.client.get(path)).status_code == 200
        assert served.state.worker.stats.owners["local"].requests > 0
        assert before.owners["local"].requests == 0
    assert readers == {"dflash-engine"}


@pytest.mark.asyncio
async def test_an_idle_server_tells_what_has_changed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_PUBLISH_S", 0.01)
    async with serve() as served:
        engine = served.state.engine
        engine._owners.events.add(EventKind.DAEMON_LOST, "cpu0", "it was ended")
        async with asyncio.timeout(10):
            while not served.state.worker.stats.events:
                await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_the_map_holds_every_pair_that_was_computed(serve: Serve) -> None:
    async with serve() as served:
        before = (await served.client.get("/status/experts")).json()
        await served.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        after = (await served.client.get("/status/experts")).json()
    assert [set(each) for each in (before, *before["layers"])] == [
        {"schema_version", "owner_names", "layers"},
        *[{"layer_id", "owners", "selections"}] * 2,
    ]
    assert after["owner_names"] == ["local"]
    for layer_id, layer in enumerate(after["layers"]):
        assert layer["layer_id"] == layer_id
        assert layer["owners"] == [0] * 4
        assert sum(layer["selections"]) == NUM_USED * 7
    assert all(layer["selections"] == [0] * 4 for layer in before["layers"])


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/status", "/status/experts"])
async def test_it_is_for_those_who_may_use_the_server(serve: Serve, path: str) -> None:
    async with serve() as served:
        strange = {"origin": "https://evil.example"}
        assert (await served.client.get(path, headers=strange)).status_code == 403
        served.state.is_draining = True
        refused = await served.client.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    key = "a-key-of-32-characters-or-so-----"
    async with serve(keys=ApiKeys([key.encode()])) as served:
        assert (await served.client.get(path)).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert (await served.client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("is_lost", "breaker", "state", "reason"),
    [
        (False, "", "ready", ""),
        (False, "closed", "ready", ""),
        (True, "closed", "lost", "the process has ended"),
        (True, "open", "lost", "the process has ended"),
        (False, "open", "paused", "the process has ended"),
        (False, "half-open", "probed", "the process has ended"),
    ],
)
def test_an_owner_that_is_not_ready_says_why(
    is_lost: bool, breaker: str, state: str, reason: str
) -> None:
    stats = OwnerStats(OwnerKind.DAEMON, 4, device="hip:1", is_lost=is_lost, breaker=breaker)
    found = owner_status("cpu0", stats, EVENTS, parent_device="cpu")
    assert (found["state"], found["reason"], found["device"]) == (state, reason, "hip:1")
    assert json.loads(json.dumps(found)) == found


def test_a_round_trip_is_the_median_of_decode() -> None:
    stats = OwnerStats(OwnerKind.DAEMON, 4)
    stats.of_phase(Phase.PREFILL).round_trips.add(9.0)
    stats.of_phase(Phase.DECODE)
    assert owner_status("cpu0", stats, [], parent_device="cpu")["decode_round_trip_s"] is None
    for seconds in (1e-3, 2e-3, 3e-3):
        stats.of_phase(Phase.DECODE).round_trips.add(seconds)
    found = owner_status("cpu0", stats, [], parent_device="cpu")
    assert found["decode_round_trip_s"] == pytest.approx(2e-3, rel=0.125)
    assert found["device"] == ""  # it has not said it


def test_types_are_in_order_of_their_bytes() -> None:
    layer = moe_layer()
    large = replace(layer.gate, tensor_type=TensorType.Q4_0, rows=96, columns=32)
    small = replace(layer.down, tensor_type=TensorType.F32, rows=4, columns=32)
    layer = replace(layer, gate=large, up=large, down=small)
    assert expert_types(MoeSpec((layer, layer))) == ["Q4_0", "F32"]
