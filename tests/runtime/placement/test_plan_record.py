"""Plans as JSON: what was written is read, anything else is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings.kinds import MOST_DAEMONS
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.plan_record import (
    PLAN_VERSION,
    RecordOf,
    as_json,
    as_record,
    from_json,
    from_record,
)
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.placement.planner import plan
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from dflash_runtime.placement.wishes import ExpertWishes, MoeMode, Wishes
from support.examples import examples
from support.planned_boxes import (
    CARD,
    CORES_16,
    GIB,
    MIB,
    BoxRow,
    model_spec,
    moe_spec,
    situation,
    skewed,
)

SPEC = model_spec(moe_spec([3 * MIB] * 3, num_experts=8, num_used=2))
AT = situation(
    SPEC,
    BoxRow(CARD, 550 * MIB, CORES_16, 8 * GIB),
    shares=skewed(SPEC.moe),
    chunks=(256,),
)
OF = RecordOf("model", {layer: 8 for layer in range(3)}, (LOCAL_OWNER, HOST_OWNER), "box")


def some_plan() -> Plan:
    found = plan(AT, Wishes(context=4096, experts=ExpertWishes(mode=MoeMode.HOT)))
    assert isinstance(found, Plan), found
    return found


PLAN = some_plan()


def test_what_was_written_is_read() -> None:
    again = from_json(as_json(PLAN).encode(), OF)
    assert as_record(again) == as_record(PLAN)
    assert (again.setup, again.forecast, again.room) == (PLAN.setup, PLAN.forecast, PLAN.room)
    assert again.budgets == PLAN.budgets
    assert again.alternatives == PLAN.alternatives
    assert again.placement.routing[1].owner_index.tolist() == (
        PLAN.placement.routing[1].owner_index.tolist()
    )
    assert plan_text(again) == plan_text(PLAN)


def test_a_limit_that_was_asked_for_is_read() -> None:
    for limit in (0, 5 * MIB):
        budgets = replace(PLAN.budgets[0], limit_bytes=limit), *PLAN.budgets[1:]
        found = replace(PLAN, budgets=budgets)
        assert from_json(as_json(found).encode(), OF).budgets == budgets
        assert f"(at most {limit // MIB} MiB were asked for)" in plan_text(found)
    assert "at most" not in plan_text(PLAN)


def test_an_option_with_as_many_daemons_as_there_may_be_is_read() -> None:
    name = "all experts in " + " + ".join(["d" * 32] * MOST_DAEMONS)
    found = replace(PLAN, name=name, reason=f"It writes twice as fast as {name}.")
    again = from_json(as_json(found).encode(), OF)
    assert (again.name, again.reason) == (found.name, found.reason)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(as_json(PLAN))
    change(record)
    return record


def ids(record: dict[str, Any]) -> list[Any]:
    found: list[Any] = record["owners"][0]["experts"]["0"]
    return found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.update(version=1), "version"),
        (lambda r: r.update(version=PLAN_VERSION + 1), "version"),
        (lambda r: r.update(version=True), "version"),
        (lambda r: r.update(model="other"), "another model"),
        (lambda r: r.update(box="other"), "another machine"),
        (lambda r: r.update(asked=3), "asked"),
        (lambda r: r.update(asked="x" * 5000), "asked"),
        (lambda r: r.pop("setup"), "setup"),
        (lambda r: r.update(more=1), "more"),
        (lambda r: r["setup"].update(context=-5), "context"),
        (lambda r: r["setup"].update(context=1 << 70), "context"),
        (lambda r: r["setup"].update(context=1.5), "context"),
        (lambda r: r["setup"].update(device="tpu:0"), "device"),
        (lambda r: r["setup"].update(kv_type="f8"), "kv_type"),
        (lambda r: r["owners"][0].update(name="cuda:1"), "cuda:1"),
        (lambda r: r["owners"][1].update(name=r["owners"][0]["name"]), "one name"),
        (lambda r: r["owners"].pop(), "no owner"),
        (lambda r: r["owners"][0]["experts"].pop("0"), "no owner"),
        (lambda r: r["owners"][0]["experts"].update({"7": [0]}), "7"),
        (lambda r: r["owners"][0]["experts"].update({"00": [0]}), "00"),
        (lambda r: r["owners"][0]["experts"].update({"0": 3}), "layer 0"),
        (lambda r: ids(r).append(8), "8"),
        (lambda r: ids(r).append(-1), "-1"),
        (lambda r: ids(r).append(True), "True"),
        (lambda r: ids(r).append(ids(r)[0]), "twice"),
        (lambda r: ids(r).extend(range(8)), "at most"),
        (lambda r: r.update(answering=[]), "answering"),
        (lambda r: r["answering"].update({"7": [0]}), "7"),
        (lambda r: r["answering"].update({"0": [0]}), "layer 0"),
        (lambda r: r["answering"].update({"0": [0] * 9}), "at most"),
        (lambda r: r["answering"].update({"0": [9] * 8}), "answering"),
        (lambda r: r["answering"].update({"0": [-2] * 8}), "answering"),
        (lambda r: r["answering"].update({"0": [0.0] * 8}), "answering"),
        (lambda r: r["answering"].update({"0": [0] * 8}), "its owner's"),
        (lambda r: r.update(prompts_here=[9]), "prompts_here"),
        (lambda r: r.update(prompts_here=[1, 0]), "prompts_here"),
        (lambda r: r.update(mode="fast"), "mode"),
        (lambda r: r["forecast"].update(decode=-1), "decode"),
        (lambda r: r["forecast"].update(decode=float("inf")), "decode"),
        (lambda r: r["forecast"].update(decode=1e300), "decode"),
        (lambda r: r["forecast"].update(decode=10**400), "decode"),
        (lambda r: r["forecast"].update(decode=0), "forecast"),
        (lambda r: r.update(share_here=2), "share_here"),
        (lambda r: r.update(reason="a\nb"), "reason"),
        (lambda r: r.update(reason="a" * 5000), "reason"),
        (lambda r: r["budgets"][0].update(free_bytes=-1), "free_bytes"),
        (lambda r: r["budgets"][0].update(num_replicas=-1), "num_replicas"),
        (lambda r: r["budgets"][0].update(limit_bytes=-1), "limit_bytes"),
        (lambda r: r["budgets"][0].update(limit_bytes="all"), "limit_bytes"),
        (lambda r: r["budgets"][0].pop("limit_bytes"), "limit_bytes"),
        (lambda r: r.update(budgets=[{}] * 100), "budgets"),
        (lambda r: r["room"].update(status="fine"), "status"),
        (lambda r: r.update(alternatives=[None]), "alternative"),
    ],
)
def test_bad_records(change: Callable[[dict[str, Any]], object], named: str) -> None:
    with pytest.raises(SettingsError) as error:
        from_record(changed(change), OF)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("record", [None, [], 3, "plan", {}, {"version": PLAN_VERSION}])
def test_records_of_other_types(record: object) -> None:
    with pytest.raises(SettingsError):
        from_record(record, OF)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": 1, "a": 2}',
        b'{"version": NaN}',
        b"[" + b"1," * (1 << 20) + b"1]",
        b" " * (9 << 20),
        b"1" * 5000,
    ],
)
def test_bad_text(content: bytes) -> None:
    with pytest.raises(SettingsError):
        from_json(content, OF)


@examples(60)
@given(st.integers(0, len(as_json(PLAN)) - 3))
def test_a_truncated_plan(length: int) -> None:
    with pytest.raises(SettingsError):
        from_json(as_json(PLAN).encode()[:length], OF)


@examples(100)
@given(st.integers(0, len(as_json(PLAN)) - 1), st.integers(32, 126))
def test_a_changed_character_is_refused_or_read(place: int, character: int) -> None:
    content = bytearray(as_json(PLAN).encode())
    content[place] = character
    try:
        found = from_json(bytes(content), OF)
    except SettingsError:
        return
    assert found.placement.experts_per_layer == OF.experts_per_layer


def test_text_names_devices_the_choice_and_what_was_not_chosen() -> None:
    lines = plan_text(PLAN).splitlines()
    assert lines[0].startswith("cuda:0")
    assert "4,096, f16" in lines[0]
    chosen = next(line for line in lines if line.startswith("chosen"))
    assert PLAN.name in chosen
    assert "heat of 1.2 M tokens" in chosen
    assert any("of 24" in line for line in lines)
