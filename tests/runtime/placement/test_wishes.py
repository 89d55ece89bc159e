"""What was asked for is obeyed and priced; what contradicts is an error that names both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_protocol.device import CPU, parse_device
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import Settings
from dflash_protocol.settings.kinds import OneOf
from dflash_protocol.settings.table import KNOBS
from dflash_runtime.compute.half_lives import CachePolicy
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.plan import Plan, PlanRefused, RoomStatus
from dflash_runtime.placement.planner import UNPLANNED_CONTEXT, plan
from dflash_runtime.placement.situation import PlannedRequest
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, make_placement
from dflash_runtime.placement.wishes import ExpertWishes, MoeMode, Wishes, request_of, wishes_of
from support.planned_boxes import (
    CARD,
    CORES_16,
    GIB,
    MIB,
    BoxRow,
    DaemonRow,
    model_spec,
    moe_spec,
    situation,
    skewed,
)

SPEC = model_spec(moe_spec([3 * MIB] * 4, num_experts=8, num_used=2), context_length=65536)
SHARES = skewed(SPEC.moe)
GPU = parse_device("cuda:0")
DAEMON = DaemonRow("cuda:1", "cuda:1", CARD, 4 * GIB, link_s=5e-6)
ROOMY = situation(SPEC, BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB, daemons=(DAEMON,)), shares=SHARES)
TIGHT = situation(SPEC, BoxRow(CARD, 560 * MIB, CORES_16, 8 * GIB), shares=SHARES, chunks=(256,))


def planned(wishes: Wishes, at: object = ROOMY) -> Plan:
    found = plan(at, wishes)  # type: ignore[arg-type]
    assert isinstance(found, Plan), found
    return found


def counts(found: Plan, owner: str) -> list[int]:
    """How many experts of each layer an owner has."""
    names = found.placement.owner_names
    if owner not in names:
        return [0] * 4
    by_layer = found.placement.owners[names.index(owner)].by_layer
    return [len(by_layer.get(layer, ())) for layer in range(4)]


def test_settings_are_wishes() -> None:
    assert wishes_of(Settings()) == Wishes()
    assert request_of(Settings()) == PlannedRequest(1000, 400)
    asked = Settings(
        device=GPU, context=5, kv_type="q8_0", gpu_layers=99, expert_budget_mb=2,
        device_memory_mb=3, host_memory_mb=0, fit="off", moe_mode="cpu-moe", cpu_moe=True,
        prefill_offload="off", override_tensor=(("exps", "cpu"),), plan_for="7:9",
    )  # fmt: skip
    wishes = wishes_of(asked)
    assert (wishes.expert_budget_bytes, wishes.device_memory_bytes) == (2 * MIB, 3 * MIB)
    assert (wishes.host_memory_bytes, wishes.num_gpu_layers) == (0, 99)
    assert (wishes.kv_type, wishes.fits, wishes.offloads_prompts) == (KvType.Q8_0, False, False)
    assert wishes.experts.mode is MoeMode.CPU_MOE
    assert wishes.experts.overrides == (("exps", "cpu"),)
    assert request_of(asked) == PlannedRequest(7, 9)
    assert set(words_of("MOE_MODE")) == {"auto", *MoeMode}
    assert set(words_of("MOE_CACHE_POLICY")) == {*CachePolicy}


def words_of(name: str) -> tuple[str, ...]:
    """The words that a setting may be."""
    kind = next(knob.kind for knob in KNOBS if knob.name == name)
    assert isinstance(kind, OneOf)
    return kind.words


def test_setup_is_as_asked() -> None:
    asked = Wishes(device=CPU, context=1000, kv_type=KvType.Q8_0, chunk=256)
    setup = planned(asked).setup
    assert (setup.device, setup.context, setup.kv_type, setup.chunk) == (
        CPU, 1000, KvType.Q8_0, 256,
    )  # fmt: skip


def test_cpu_moe() -> None:
    found = planned(Wishes(experts=ExpertWishes(cpu_moe=True)))
    assert counts(found, HOST_OWNER) == [8] * 4
    assert found.mode is MoeMode.CPU_MOE
    assert found.setup.device == GPU
    never = planned(Wishes(device=GPU, experts=ExpertWishes(cpu_moe=False)), TIGHT)
    assert all(each.name != "CPU-MoE" for each in never.alternatives)
    assert never.mode is not MoeMode.CPU_MOE


def test_n_cpu_moe_counts_layers_of_the_model() -> None:
    found = planned(Wishes(experts=ExpertWishes(num_cpu_moe_layers=3)))
    assert counts(found, HOST_OWNER) == [8, 8, 8, 0]
    assert counts(found, LOCAL_OWNER) == [0, 0, 0, 8]
    refused = plan(TIGHT, Wishes(context=4096, experts=ExpertWishes(num_cpu_moe_layers=0)))
    assert isinstance(refused, PlanRefused)
    advised = int(refused.reason.split("--n-cpu-moe ")[1].split()[0])
    fitting = ExpertWishes(num_cpu_moe_layers=advised)
    assert counts(planned(Wishes(context=4096, experts=fitting), TIGHT), HOST_OWNER)[0] == 8
    too_few = replace(fitting, num_cpu_moe_layers=advised - 1)
    assert isinstance(plan(TIGHT, Wishes(context=4096, experts=too_few)), PlanRefused)
    full = situation(SPEC, BoxRow(CARD, MIB, CORES_16, 8 * GIB), shares=SHARES, chunks=(256,))
    refused = plan(full, Wishes(context=4096, device=GPU, experts=fitting))
    assert isinstance(refused, PlanRefused)
    assert "would fit" not in refused.reason


@pytest.mark.parametrize("owner", ["CPU", "cpu", "host"])
def test_overrides_name_owners_as_llama_cpp_does_or_as_here(owner: str) -> None:
    overrides = ((r"blk\.(0|2)\.ffn_.*_exps", owner), (r"blk\.1\..*_exps", "cuda:1"))
    found = planned(Wishes(device=GPU, experts=ExpertWishes(overrides=overrides)))
    assert counts(found, HOST_OWNER) == [8, 0, 8, 0]
    assert counts(found, "cuda:1") == [0, 8, 0, 0]
    here = ExpertWishes(overrides=((r"blk\.0\..*", "CUDA0"), ("exps", owner)))
    assert counts(planned(Wishes(device=GPU, experts=here)), LOCAL_OWNER) == [8, 0, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "owner", "named"),
    [
        ("exps", "cuda:9", "cuda:9"),
        ("nothing", "CPU", "nothing"),
        ("(", "CPU", "("),
        ("ffn_up_exps", "CPU", "ffn_up_exps"),
        ("e" * 300, "CPU", "200"),
    ],
)
def test_wrong_overrides(pattern: str, owner: str, named: str) -> None:
    with pytest.raises(SettingsError) as error:
        plan(ROOMY, Wishes(device=GPU, experts=ExpertWishes(overrides=((pattern, owner),))))
    assert named in str(error.value)


def test_local_experts_are_the_hottest_ones() -> None:
    found = planned(Wishes(device=GPU, experts=ExpertWishes(num_local=3)))
    assert counts(found, LOCAL_OWNER) == [3] * 4
    local = found.placement.owners[found.placement.owner_names.index(LOCAL_OWNER)]
    for layer_id, ids in local.by_layer.items():
        heat = SHARES.decode[layer_id]
        assert heat[ids].min() >= sorted(heat)[-3]
    assert found.room.asked == 12


def test_a_placement_is_priced_as_it_is() -> None:
    owned = {
        LOCAL_OWNER: OwnedExperts.from_lists({i: range(5) for i in range(4)}),
        "cuda:1": OwnedExperts.from_lists({i: range(5, 8) for i in range(4)}),
    }
    placement = make_placement(SPEC.moe, owned)
    found = planned(Wishes(device=GPU, experts=ExpertWishes(placement=placement)))
    assert counts(found, LOCAL_OWNER) == [5] * 4
    assert counts(found, "cuda:1") == [3] * 4
    assert isinstance(
        plan(TIGHT, Wishes(experts=ExpertWishes(placement=make_placement(
            SPEC.moe, {LOCAL_OWNER: OwnedExperts.from_lists({i: range(8) for i in range(4)})}
        )), device=GPU)),
        PlanRefused,
    )  # fmt: skip


def test_placements_of_strangers() -> None:
    every = OwnedExperts.from_lists({i: range(8) for i in range(4)})
    unknown = make_placement(SPEC.moe, {"elsewhere": every})
    few = OwnedExperts.from_lists({0: range(8)})
    other = Placement({0: 8}, (LOCAL_OWNER,), (few,))
    for placement, named in ((unknown, "elsewhere"), (other, "another model")):
        with pytest.raises(SettingsError, match=named):
            plan(ROOMY, Wishes(device=GPU, experts=ExpertWishes(placement=placement)))


def test_budgets() -> None:
    size = SPEC.moe.layers[0].expert_bytes
    found = planned(Wishes(device=GPU, expert_budget_bytes=5 * size))
    assert sum(counts(found, LOCAL_OWNER)) <= 5
    found = planned(Wishes(device=GPU, expert_budget_percent=50))
    assert 0 < sum(counts(found, LOCAL_OWNER)) <= 16
    small = planned(Wishes(device=GPU, context=4096, chunk=256, device_memory_bytes=560 * MIB))
    assert small.budgets[0].free_bytes == 560 * MIB
    refused = plan(ROOMY, Wishes(device=CPU, host_memory_bytes=100 * MIB))
    assert isinstance(refused, PlanRefused)


def test_modes() -> None:
    for mode in (MoeMode.RESIDENT, MoeMode.CPU_MOE, MoeMode.REMOTE):
        found = planned(Wishes(device=GPU, experts=ExpertWishes(mode=mode)))
        assert found.mode is mode
    refused = plan(TIGHT, Wishes(device=GPU, experts=ExpertWishes(mode=MoeMode.RESIDENT)))
    assert isinstance(refused, PlanRefused)


def test_without_a_plan() -> None:
    found = planned(Wishes(device=GPU, fits=False))
    assert found.setup.context == UNPLANNED_CONTEXT
    assert counts(found, "cuda:1") == [8] * 4
    alone = planned(Wishes(device=GPU, fits=False), TIGHT)
    assert counts(alone, LOCAL_OWNER) == [8] * 4


PLACED = ExpertWishes(
    placement=make_placement(
        SPEC.moe, {LOCAL_OWNER: OwnedExperts.from_lists({i: range(8) for i in range(4)})}
    )
)


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        (ExpertWishes(cpu_moe=True, num_cpu_moe_layers=2), ("--cpu-moe", "--n-cpu-moe")),
        (ExpertWishes(cpu_moe=True, mode=MoeMode.HOT), ("--cpu-moe", "--moe-mode")),
        (ExpertWishes(cpu_moe=False, mode=MoeMode.CPU_MOE), ("--cpu-moe", "--moe-mode")),
        (ExpertWishes(num_local=2, overrides=(("exps", "CPU"),)), ("-ot", "--local-experts")),
        (replace(PLACED, num_local=2), ("--placement", "--local-experts")),
        (Wishes(expert_budget_bytes=1, expert_budget_percent=2),
         ("--expert-budget-mb", "--expert-budget-pct")),
        (Wishes(num_gpu_layers=99, device=CPU), ("-ngl", "--device")),
        (Wishes(num_gpu_layers=0, device=GPU), ("-ngl", "--device")),
        (Wishes(num_gpu_layers=3), ("-ngl", "--n-cpu-moe 1")),
        (Wishes(expert_budget_bytes=-1), ("--expert-budget-mb",)),
        (ExpertWishes(num_local=9), ("9",)),
        (ExpertWishes(num_cpu_moe_layers=-1), ("--n-cpu-moe",)),
        (Wishes(device=parse_device("cuda:7")), ("cuda:7", "cuda:0")),
    ],
)  # fmt: skip
def test_contradictions(wishes: Wishes | ExpertWishes, named: tuple[str, ...]) -> None:
    if isinstance(wishes, ExpertWishes):
        wishes = Wishes(experts=wishes)
    with pytest.raises(SettingsError) as error:
        plan(ROOMY, wishes)
    assert all(each in str(error.value) for each in named)


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        (Wishes(expert_budget_bytes=2 * MIB, experts=ExpertWishes(num_local=8)),
         ("--expert-budget-mb 2", "--n-cpu-moe")),
        (Wishes(expert_budget_percent=10, experts=ExpertWishes(mode=MoeMode.RESIDENT)),
         ("--expert-budget-pct 10", "--moe-mode=resident")),
        (Wishes(device_memory_bytes=100 * MIB, context=65536),
         ("--device-memory-mb 100", "65,536")),
        (Wishes(device=CPU, host_memory_bytes=100 * MIB), ("--host-memory-mb 100",)),
        (Wishes(experts=ExpertWishes(mode=MoeMode.REMOTE)), ("--moe-mode=remote", "no daemon")),
        (Wishes(host_memory_bytes=MIB), ("--host-memory-mb 1", "cuda:0")),
        (Wishes(experts=ExpertWishes(overrides=(("exps", "cuda:3"),))), ("cuda:0, cpu",)),
    ],
)  # fmt: skip
def test_a_refusal_names_the_settings_that_are_the_reason(
    wishes: Wishes, named: tuple[str, ...]
) -> None:
    try:
        refused = plan(TIGHT, replace(wishes, device=wishes.device or GPU))
    except SettingsError as error:
        reason = str(error)
    else:
        assert isinstance(refused, PlanRefused)
        assert refused.status is RoomStatus.BUDGET_EXHAUSTED
        reason = refused.reason
    assert all(each in reason for each in named), reason
    is_context = wishes.context is not None or wishes.device == CPU
    assert ("no context" in reason or "--context" in reason) == is_context


def test_all_of_the_experts_bytes_are_all_experts() -> None:
    row = BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB)
    at = situation(SPEC, row, shares=SHARES, granule=2 * MIB)
    found = planned(Wishes(expert_budget_percent=100), at)
    assert found.mode is MoeMode.RESIDENT
    assert found.setup.device == GPU


def test_a_budget_is_of_a_gpu() -> None:
    """Nothing is said of the processor as parent, which it does not bound."""
    found = planned(Wishes(expert_budget_bytes=0))
    assert found.setup.device == GPU
    assert all(each.device == str(GPU) for each in found.alternatives)


def test_all_layers_or_none_on_the_device() -> None:
    for asked in (4, 5, 99):
        assert planned(Wishes(num_gpu_layers=asked)).setup.device == GPU
    assert planned(Wishes(num_gpu_layers=0)).setup.device == CPU
