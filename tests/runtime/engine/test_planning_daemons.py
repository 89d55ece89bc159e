"""Placements of a parent on the processor: even, unless daemons are unlike, or slower than it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ModelSpec
from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.wire.messages import Offer
from dflash_runtime import Engine
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.engine import planning
from dflash_runtime.engine.daemon_offers import OwnProcessor, with_daemon_prices, with_daemons
from dflash_runtime.engine.planning import Planned, Planning
from dflash_runtime.experts.speed_trial import own_step_s
from dflash_runtime.placement.box import CopySpeed, Curve, LinkSpeed
from dflash_runtime.placement.heat import HalfLives, Heat, layers_of
from dflash_runtime.placement.moves import OwnerPrice
from dflash_runtime.placement.split import LOCAL_OWNER, even_split
from support.planned_gpu import made_up_box
from support.random_models import Qwen3MoeShape, write_qwen3moe

GIB = 1 << 30
SHAPE = Qwen3MoeShape(num_experts=20, hidden_size=64, ffn_size=96)
OURS_S = 1e-3
"""Of the parent's processor, for a layer of a step."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    with GgufFile.open(write_qwen3moe(path, SHAPE, seed=4)) as file:
        yield file


@pytest.fixture
def spec(file: GgufFile) -> ModelSpec:
    return read_spec(file)


def offer_of(spec: ModelSpec, used_s: float, free_bytes: int = GIB) -> Offer:
    layer = spec.moe.layers[0]
    return Offer(
        device="cpu",
        device_name="it",
        numeric_class="cpu",
        free_bytes=free_bytes,
        total_bytes=2 * GIB,
        held_bytes=0,
        num_threads=1,
        can_mail=False,
        layer_ids=(layer.layer_id,),
        expert_bytes=(layer.expert_bytes,),
        one_s=(used_s / layer.num_experts_used,),
        used_s=(used_s,),
        chunk_tokens=512,
        chunk_pairs_per_s=(layer.num_experts_used / used_s,),
    )


class OneProcessor:
    """A machine without a GPU, whose processor takes OURS_S for a layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: GgufFile, spec: ModelSpec) -> None:
        layer = spec.moe.layers[0]
        self.s_per_byte = OURS_S / (layer.num_experts_used * layer.expert_bytes)
        self.num_measured, self._file, self._spec = 0, file, spec
        self.own, self.links = OwnProcessor(lambda: OURS_S, 1), dict[str, LinkSpeed]()
        monkeypatch.setattr(planning, "gpus_of_machine", list)
        monkeypatch.setattr(planning, "box_of_machine", self._box)

    def _box(self, *args: Any, **options: Any) -> Any:
        self.num_measured += 1
        gpu = Device(DeviceKind.CUDA, 0)
        return made_up_box(gpu, cpu_s_per_byte=self.s_per_byte)

    def planned(self, offers: Mapping[str, Offer], names: list[str], **wishes: Any) -> Planned:
        settings: Settings = replace(load_settings(), **wishes)
        heat = Heat(layers_of(self._spec.moe), HalfLives())
        found = Planning(
            self._file, self._spec, settings, heat=heat, on_progress=lambda *progress: None
        )
        before = found.before_daemons(names)
        return found.with_daemons(before, offers, self.links, numeric_class="", own=self.own)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, file: GgufFile, spec: ModelSpec) -> OneProcessor:
    return OneProcessor(monkeypatch, file, spec)


def numbers(planned: Planned) -> dict[str, int]:
    assert planned.placement is not None
    placement = planned.placement
    pairs = zip(placement.owner_names, placement.owners, strict=True)
    return {name: owned.num_experts for name, owned in pairs}


def test_daemons_that_are_alike_are_not_planned_for(machine: OneProcessor, spec: ModelSpec) -> None:
    for times in ((1e-3, 1.9e-3), (1e-6, 9e-6), (1e-3,)):
        offers = {f"d{index}": offer_of(spec, used_s) for index, used_s in enumerate(times)}
        planned = machine.planned(offers, [*offers])
        assert (planned.placement, planned.plan) == (None, None)
    assert machine.num_measured == 0


def test_a_daemon_that_is_slower_than_the_parent_gets_less(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    """It was given all experts, being like all daemons there are."""
    found = numbers(machine.planned({"slow": offer_of(spec, 12 * OURS_S)}, ["slow"]))
    assert found.get("slow", 0) < 0.2 * found[LOCAL_OWNER]


def test_daemons_on_the_parents_cores_get_nothing_unless_memory_is_short(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    """What they compute takes as long from the parent."""
    offers = {"fast": offer_of(spec, OURS_S), "slow": offer_of(spec, 40 * OURS_S)}
    machine.own = OwnProcessor(lambda: OURS_S, 4096, ["fast", "slow"])
    planned = machine.planned(offers, [*offers])
    assert numbers(planned)[LOCAL_OWNER] == SHAPE.num_layers * SHAPE.num_experts
    assert planned.plan is not None
    assert {each.limit_bytes for each in planned.plan.budgets} == {None}
    apart = {name: replace(each, device="cuda:0") for name, each in offers.items()}
    assert machine.own.sharing(apart) == []
    few = OwnProcessor(lambda: OURS_S, -4096, ["fast", "slow"])
    assert few.sharing(offers) == []


@pytest.mark.parametrize(("own_s", "their_s"), [(OURS_S, 1.9 * OURS_S), (1e-6, 4e-4)])
def test_a_daemon_that_is_little_slower_than_the_parent_is_not_planned_for(
    machine: OneProcessor, spec: ModelSpec, own_s: float, their_s: float
) -> None:
    machine.own = OwnProcessor(lambda: own_s, 1)
    planned = machine.planned({"d": offer_of(spec, their_s)}, ["d"])
    assert (planned.placement, machine.num_measured) == (None, 0)


def test_the_parent_times_itself_as_daemons_do(file: GgufFile, spec: ModelSpec) -> None:
    backend = make_backend(BackendName.CPU, num_threads=1)
    try:
        found_s = own_step_s(backend, file, spec.moe, limit_s=0.2)
        assert 0 < found_s < 0.2
    finally:
        backend.close()


def test_a_daemon_that_was_not_timed_is_like_any_other(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    timed = offer_of(spec, 1e-3)
    offers = {"timed": timed, "not": replace(timed, one_s=(0.0,), used_s=(0.0,))}
    planned = machine.planned(offers, [*offers])
    assert (planned.placement, planned.plan) == (None, None)
    assert machine.num_measured == 0


def test_a_daemon_may_have_the_name_of_a_device(spec: ModelSpec) -> None:
    box = made_up_box(Device(DeviceKind.CUDA, 0))
    found = with_daemons(box, spec, {"cpu": offer_of(spec, 40 * OURS_S)}, timed={}, mails=True)
    assert found.devices == box.devices
    assert found.daemons["cpu"].experts[1].points[-1][1] == 40 * OURS_S


@pytest.mark.parametrize("can_mail", [False, True])
def test_a_link_that_was_measured_another_way_is_not_used(spec: ModelSpec, can_mail: bool) -> None:
    measured = LinkSpeed("d", Curve(((1, 0.5),)), Curve(((1, 0.5),)))
    box = replace(made_up_box(Device(DeviceKind.CUDA, 0)), links={"d": measured})
    offers = {"d": replace(offer_of(spec, OURS_S), can_mail=can_mail)}
    link = with_daemons(box, spec, offers, timed={}, mails=True).links["d"]
    assert link.by_device is can_mail
    assert (link == measured) is not can_mail


def test_a_gpu_daemon_that_its_host_is_asked_for_takes_longer(spec: ModelSpec) -> None:
    """It starts its device, and rows cross to its memory too."""
    box = made_up_box(Device(DeviceKind.CUDA, 0))
    copies = CopySpeed("cuda:0", to_host=50e9, kernel_reads=40e9)
    box = replace(box, copies={"cuda:0": copies}, links={})
    near = replace(offer_of(spec, OURS_S), can_mail=True)
    offers = {"cpu": near, "gpu": replace(near, device="cuda:1")}
    mailed = with_daemons(box, spec, offers, timed={}, mails=True).links["gpu"]
    asked = with_daemons(box, spec, offers, timed={}, mails=False).links
    assert mailed.by_device
    assert not asked["gpu"].by_device
    assert mailed.step.at(1) < asked["cpu"].step.at(1) < asked["gpu"].step.at(1)
    row_s = spec.hidden_size * (4 / 50e9 + 8 / 40e9)
    for name, num in (("cpu", 1), ("gpu", 2)):
        points = asked[name].chunk.points
        assert points[1][1] - points[0][1] == pytest.approx(4095 * num * row_s)


def test_a_processor_that_a_gpu_asks_by_mailbox_is_asked_for_prompts_by_its_host(
    spec: ModelSpec,
) -> None:
    box = replace(made_up_box(Device(DeviceKind.CUDA, 0)), links={})
    offers = {"cpu": replace(offer_of(spec, OURS_S), can_mail=True)}
    mailed, asked = (
        with_daemons(box, spec, offers, timed={}, mails=mails).links["cpu"]
        for mails in (True, False)
    )
    assert mailed.by_device
    assert mailed.step.at(1) < asked.step.at(1)
    assert mailed.chunk == asked.chunk


def test_a_link_that_was_timed_is_used(spec: ModelSpec) -> None:
    other, timed = link_of("d", 0.5), link_of("d", 0.2)
    box = replace(made_up_box(Device(DeviceKind.CUDA, 0)), links={"d": other})
    offers = {"d": offer_of(spec, OURS_S)}
    assert with_daemons(box, spec, offers, timed={"d": timed}, mails=True).links["d"] == timed


def link_of(name: str, seconds: float) -> LinkSpeed:
    return LinkSpeed(name, Curve(((1, seconds),)), Curve(((1, seconds), (64, 4 * seconds))))


def test_a_far_daemon_that_computes_as_fast_gets_less_than_a_near_one(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    """They were given equal shares, and the parent nothing."""
    offers = {"near": offer_of(spec, OURS_S), "far": offer_of(spec, OURS_S)}
    machine.links = {"near": link_of("near", 1e-4)}
    assert machine.planned(offers, [*offers]).placement is None
    machine.links["far"] = link_of("far", 20 * OURS_S)
    found = numbers(machine.planned(offers, [*offers]))
    assert found.get("far", 0) < 0.2 * found["near"]
    assert sum(found.values()) == SHAPE.num_layers * SHAPE.num_experts


def test_a_far_daemon_alone_gets_less_than_the_parent(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    machine.links = {"far": link_of("far", 20 * OURS_S)}
    found = numbers(machine.planned({"far": offer_of(spec, OURS_S)}, ["far"]))
    assert found.get("far", 0) < 0.2 * found[LOCAL_OWNER]


def test_a_daemon_of_this_machine_keeps_its_share_though_it_answers_late(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    """On busy cores a round trip takes a millisecond; such a daemon then got no experts."""
    offers = {"here": offer_of(spec, OURS_S)}
    machine.links = {"here": link_of("here", 20 * OURS_S)}
    machine.own = replace(machine.own, neighbours=["here"])
    assert machine.planned(offers, [*offers]).placement is None
    assert machine.num_measured == 0


def test_a_slow_daemon_gets_less_than_a_fast_one(machine: OneProcessor, spec: ModelSpec) -> None:
    offers = {"fast": offer_of(spec, OURS_S), "slow": offer_of(spec, 40 * OURS_S)}
    planned = machine.planned(offers, [*offers])
    assert planned.plan is not None
    found = numbers(planned)
    assert found.get("slow", 0) < found["fast"]
    assert found[LOCAL_OWNER] > 0
    assert planned.settings.context is None  # it was chosen before
    assert sum(found.values()) == SHAPE.num_layers * SHAPE.num_experts


def test_a_daemon_with_little_memory_is_planned_for(machine: OneProcessor, spec: ModelSpec) -> None:
    """The even split was not priced, as it needs more: it was kept whatever it costs."""
    offers = {
        "fast": offer_of(spec, OURS_S, free_bytes=2 << 20),
        "slow": offer_of(spec, 40 * OURS_S),
    }
    found = numbers(machine.planned(offers, [*offers]))
    assert found.get("slow", 0) + found.get("fast", 0) < found[LOCAL_OWNER]


@pytest.mark.parametrize("wishes", [{"fit": "off"}, {"local_experts": 3}])
def test_what_is_asked_for_is_not_planned(
    machine: OneProcessor, spec: ModelSpec, wishes: dict[str, Any]
) -> None:
    offers = {"fast": offer_of(spec, OURS_S), "slow": offer_of(spec, 40 * OURS_S)}
    assert machine.planned(offers, [*offers], **wishes).placement is None


def test_a_daemon_that_offers_nothing_keeps_its_share(
    machine: OneProcessor, spec: ModelSpec
) -> None:
    offers = {"fast": offer_of(spec, OURS_S), "slow": offer_of(spec, 40 * OURS_S)}
    assert machine.planned(offers, [*offers, "older"]).placement is None


def test_without_measurements_shares_are_even(
    machine: OneProcessor, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise DeviceUnavailable("gone")

    monkeypatch.setattr(planning, "box_of_machine", failing)
    offers = {"fast": offer_of(spec, OURS_S), "slow": offer_of(spec, 40 * OURS_S)}
    assert machine.planned(offers, [*offers]).placement is None


def prices_of(spec: ModelSpec, offers: Mapping[str, Offer]) -> Mapping[str, OwnerPrice]:
    placement = even_split(spec.moe, [*offers], None)
    return with_daemon_prices(None, offers, placement=placement, moe=spec.moe).owners


def test_moves_are_priced_by_what_daemons_have_timed(spec: ModelSpec) -> None:
    used = spec.moe.layers[0].num_experts_used
    offers = {"one": offer_of(spec, 1e-3), "slow": offer_of(spec, 4e-3)}
    untimed = replace(offer_of(spec, 1.0), one_s=(0.0,), used_s=(0.0,))
    prices = prices_of(spec, {**offers, "untimed": untimed})
    assert {*prices} == {*offers}
    np.testing.assert_allclose(prices["one"].selection_s, 1e-3 / used)
    np.testing.assert_allclose(prices["slow"].selection_s, 4e-3 / used)
    assert all(not each.arrival_s.any() and each.most_layers is None for each in prices.values())


def test_daemons_of_a_class_that_are_nearly_alike_are_taken_for_alike(spec: ModelSpec) -> None:
    """Trials are noisy."""
    one, other = offer_of(spec, 1e-3), offer_of(spec, 1.2e-3)
    prices = prices_of(spec, {"one": one, "other": other})
    np.testing.assert_array_equal(prices["one"].selection_s, prices["other"].selection_s)
    elsewhere = replace(other, numeric_class="another")
    prices = prices_of(spec, {"one": one, "other": elsewhere})
    assert (prices["one"].selection_s < prices["other"].selection_s).all()


@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_gpu_without_memory_for_a_layer_more_keeps_its_experts(
    spec: ModelSpec, num_layers: int
) -> None:
    num_experts = SHAPE.num_experts // 2
    layer_bytes = num_experts * max(each.expert_bytes for each in spec.moe.layers)
    held = num_experts * sum(each.expert_bytes for each in spec.moe.layers)
    on_gpu = replace(
        offer_of(spec, 1e-3, held + num_layers * layer_bytes), device="cuda:0", numeric_class="gpu"
    )
    prices = prices_of(spec, {"gpu": on_gpu, "cpu": offer_of(spec, 1e-3)})
    assert ("gpu" in prices) == (num_layers > 0)
    if num_layers:
        assert prices["gpu"].most_layers == num_layers
        assert (prices["gpu"].arrival_s > 0.0).all()


@pytest.mark.parametrize(
    "wishes",
    [{"swap_max": 0}, {"local_experts": 1}, {"override_tensor": (("exps", "cpu0"),)}],
    ids=str,
)
def test_what_daemons_were_told_to_have_stays(file: GgufFile, wishes: dict[str, Any]) -> None:
    settings = replace(load_settings(), **wishes)
    with Engine.open(file.path, daemons=["cpu", "cpu"], settings=settings) as engine:
        assert engine._mover is None
        placement = engine.placement
    if "swap_max" in wishes:
        with Engine.open(file.path, daemons=["cpu", "cpu"], placement=placement) as engine:
            assert engine._mover is None
        with Engine.open(file.path, daemons=["cpu", "cpu"]) as engine:
            assert engine._mover is not None
