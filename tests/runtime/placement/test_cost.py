"""What assignments cost: each law of the model by an example small enough to compute by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array, I64Array
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.box import AskedSpeed, Curve, DeviceSpeed, OffloadSpeed, Together
from dflash_runtime.placement.cost import CostModel
from dflash_runtime.placement.expectation import chosen_by_prompt
from dflash_runtime.placement.options import ParentOptions
from dflash_runtime.placement.situation import Situation
from dflash_runtime.placement.speeds import (
    ChunkParts,
    Side,
    StepSlots,
    TrunkTimes,
    along,
    at_rows,
    chunk_sizes,
)
from dflash_runtime.placement.wishes import Wishes
from support.planned_boxes import (
    CARD,
    CORES_16,
    GIB,
    MIB,
    BoxRow,
    DaemonRow,
    line,
    model_spec,
    moe_spec,
    situation,
)

SPEC = model_spec(moe_spec([3 * MIB] * 2, num_experts=4, num_used=2))
HERE, HOST, DAEMON = 0, 1, 2


def at(*, stop_s: float = 60e-6, by_device: bool = True, bus: float = 25e9) -> Situation:
    daemon = DaemonRow("cuda:1", "cuda:1", CARD, 8 * GIB, link_s=30e-6, by_device=by_device)
    row = BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB, stop_s=stop_s, bus=bus, daemons=(daemon,))
    return situation(SPEC, row)


def model_of(at: Situation, wishes: Wishes | None = None) -> CostModel:
    wishes = Wishes() if wishes is None else wishes
    return ParentOptions(at, at.parents[0], replace(wishes, kv_type=KvType.F16)).model(512)


def rows(*owners: int) -> I64Array:
    return np.tile(np.array(owners), (2, 1))


def test_a_whole_layer_needs_no_stop() -> None:
    model = model_of(at())
    expected = CARD.fixed_s + 2 * SPEC.moe.layers[0].expert_bytes / CARD.reads
    assert model.step_layers_s(rows(HERE, HERE, HERE, HERE)) == pytest.approx(expected)
    slower = model_of(at(stop_s=1.0))
    assert slower.step_layers_s(rows(HERE, HERE, HERE, HERE)) == pytest.approx(expected)


@pytest.mark.parametrize("others", [(DAEMON, DAEMON), (HOST, HOST), (HOST, DAEMON)])
def test_only_daemons_without_mailboxes_need_a_stop(others: tuple[int, int]) -> None:
    layer = rows(HERE, HERE, *others)
    without, by_mail = (model_of(at(stop_s=stop)).step_layers_s(layer)[0] for stop in (0.0, 1.0))
    assert by_mail == without
    asked = model_of(at(stop_s=1.0, by_device=False)).step_layers_s(layer)[0]
    assert asked == pytest.approx(by_mail + (DAEMON in others))


def test_if_nothing_elsewhere_is_chosen_only_the_stop_remains() -> None:
    situation_ = at(stop_s=1.0, by_device=False)
    certain = {each.layer_id: np.array([1.0, 1.0, 0.0, 0.0]) for each in SPEC.moe.layers}
    shares = replace(situation_.shares, decode=certain)
    model = model_of(replace(situation_, shares=shares))
    whole = model.step_layers_s(rows(HERE, HERE, HERE, HERE))
    assert model.step_layers_s(rows(HERE, HERE, DAEMON, DAEMON)) == pytest.approx(whole + 1.0)


def test_steps_take_what_asking_the_processor_was_measured_to_take() -> None:
    size, gpu = SPEC.moe.layers[0].expert_bytes, "cuda:0"
    beyond = Curve(((size, 1.0), (2 * size, 1.5)))
    asked = AskedSpeed(beyond, computing=beyond)
    situation_ = at(stop_s=0.25)
    box = replace(situation_.box, host_asked={gpu: asked})
    model, before = model_of(replace(situation_, box=box)), model_of(situation_)
    assert model.step_times[HOST][0].tolist() == [0.0, 1.0, 1.5]
    # Of 4 equal experts 2 are chosen: in 1 of 6 cases both of the two here.
    found = model.step_layers_s(rows(HERE, HERE, HOST, HOST))[0] - model.step_times[HERE][0][2] / 6
    assert found == pytest.approx((4 * 1.0 + 1.5) / 6)
    pairs = np.array([8.0, 8.0])
    sizes = model.arrays.file_bytes
    for each in (64, 512):
        chunk = model.sides[HOST].chunk_s(each, pairs, sizes)
        np.testing.assert_array_equal(chunk, before.sides[HOST].chunk_s(each, pairs, sizes))


def test_layers_that_might_ask_the_processor_take_longer_and_so_does_the_step() -> None:
    size = SPEC.moe.layers[0].expert_bytes
    curve = Curve(((size, 1.0), (2 * size, 1.5)))
    situation_, gpu = at(stop_s=0.0), "cuda:0"

    def priced(asked: AskedSpeed) -> CostModel:
        return model_of(replace(situation_, box=replace(situation_.box, host_asked={gpu: asked})))

    plain = priced(AskedSpeed(curve, curve))
    model = priced(AskedSpeed(curve, curve, layer_s=0.25, step_s=8.0))
    both, here, there = (HERE, HERE, HERE, HOST), (HERE,) * 4, (HOST,) * 4
    for owners, layer_s, step_s in ((both, 0.25, 8.0), (here, 0.0, 0.0), (there, 0.0, 8.0)):
        whole = np.stack([rows(*owners)[0] for _ in SPEC.moe.layers])
        more_s = model.step_layers_s(whole) - plain.step_layers_s(whole)
        np.testing.assert_allclose(more_s, layer_s)
        found = model.price(whole).step_s - plain.price(whole).step_s
        assert found == pytest.approx(step_s + more_s.sum())


def test_two_owners_take_as_long_as_the_slower_one() -> None:
    model = model_of(at(stop_s=0.0))
    here, host = (model.step_times[index][0] for index in (HERE, HOST))
    # Of 4 equal experts 2 are chosen: both, one or none of the two here.
    expected = (
        max(here[2], host[0]) + 4 * max(here[1], host[1]) + max(here[0], host[2])
    ) / 6  # fmt: skip
    assert model.step_layers_s(rows(HERE, HERE, HOST, HOST))[0] == pytest.approx(expected)


def test_more_experts_here_are_never_slower_beside_a_slow_processor() -> None:
    model = model_of(at())
    assignments = [rows(*[HERE] * n, *[HOST] * (4 - n)) for n in range(5)]
    steps = [model.step_layers_s(each)[0] for each in assignments]
    prompts = [np.minimum(*model.prompt_of(each, 1000))[0] for each in assignments]
    assert steps == sorted(steps, reverse=True)
    assert prompts == sorted(prompts, reverse=True)


def test_prompts_are_copied_over_a_fast_bus_and_asked_over_a_slow_one() -> None:
    owners = rows(HERE, HOST, HOST, HOST)
    for bus, is_copied in ((25e9, True), (1e6, False)):
        price = model_of(at(bus=bus)).price(owners)
        assert price.offloaded.all() == is_copied
    refused = model_of(at(), Wishes(offloads_prompts=False)).price(owners)
    assert not refused.offloaded.any()


def copies_of(
    at: Situation, copies: Curve, single: Curve, grouped: Curve, *, after: Curve | None = None
) -> Situation:
    """The same, whose prompts with copies were timed. `after`: by default as `single`."""
    curves = copies, single if after is None else after, single, grouped
    offload = {"cuda:0": OffloadSpeed("cuda:0", *curves)}
    return replace(at, box=replace(at.box, offload=offload))


def test_prompts_take_what_copies_in_prompts_were_measured_to_take() -> None:
    at_, owners = at(bus=1e6), rows(HERE, HOST, HOST, HOST)
    size, gb_s, single_s = SPEC.moe.layers[0].expert_bytes, 25.0, 2e-3
    after_s = 5e-4
    after = Curve(((512.0, after_s),))
    curves = [[Curve(((512.0, each),)) for each in (of, single_s, 0.0)] for of in (0.0, gb_s)]
    fast, slow = (model_of(copies_of(at_, *each, after=after)) for each in curves)
    here, _ = model_of(at_).prompt_of(rows(HERE, HERE, HERE, HERE), 512)
    _, copied = fast.prompt_of(owners, 512)
    assert copied == pytest.approx(here + single_s)
    _, copied = slow.prompt_of(owners, 512)
    chosen = chosen_by_prompt(slow.arrays.prefill, 512)[:, 1:].sum(axis=1)
    copies = chosen + 0.3 * np.minimum(chosen, 3 - chosen)  # some of them in vain
    # As long as they take, less what is done while the next layer's trunk is computed, and what
    # the last ones take then.
    ahead_s = slow.trunk.chunk_layer_s(512)
    assert copied == pytest.approx(copies * size * gb_s / 1e9 - ahead_s + after_s)


def test_what_a_chunk_chooses_anew_is_waited_for() -> None:
    """Though all copies together take less than products: what the chunk before chose is copied
    ahead, the rest when it is known."""
    at_, owners = at(bus=1e6), rows(HERE, HOST, HOST, HOST)
    nothing, size = Curve(((512.0, 0.0),)), SPEC.moe.layers[0].expert_bytes
    copied = {}
    for gb_s in (0.0, 1e-6):
        model = model_of(copies_of(at_, Curve(((512.0, gb_s),)), nothing, nothing))
        copied[gb_s] = model.prompt_of(owners, 64)[1]
    chosen = chosen_by_prompt(model.arrays.prefill, 64)[:, 1:]
    late = (chosen * (1.0 - chosen)).sum(axis=1)
    assert (late > 0.0).all()
    assert copied[1e-6] - copied[0.0] == pytest.approx(late * size * 1e-15, rel=1e-3)


def test_a_group_takes_what_the_host_needs_to_launch_it() -> None:
    """If that is more than products and copies take: three chunks, with two parts of a layer."""
    spec = model_spec(moe_spec([70 * MIB], num_experts=8, num_used=2))  # one to a part
    nothing, row = Curve(((512.0, 0.0),)), BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB)
    model = model_of(copies_of(situation(spec, row), nothing, nothing, Curve(((512.0, 1.0),))))
    assert model.copies is not None
    group = 3 * model.chunk
    launched = replace(model, copies=replace(model.copies, group=group, part_s=0.1))
    owners = np.array([[HERE] * 6 + [HOST] * 2])
    _, copied = launched.prompt_of(owners, group)
    assert copied == pytest.approx(3 * 1.1)
    # A chunk that is computed alone waits for copies, and all that it takes was timed with them.
    for alone in (model.chunk, 64):
        _, copied = launched.prompt_of(owners, alone)
        assert copied == pytest.approx(model.prompt_of(owners, alone)[1])


@given(
    gb_s=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2),
    single_s=st.lists(st.floats(0.0, 1e-2), min_size=2, max_size=2),
    grouped_s=st.lists(st.floats(0.0, 1e-2), min_size=2, max_size=2),
    num_rows=st.integers(1, 9000),
)
def test_prompts_with_more_missing_experts_are_never_faster(
    gb_s: list[float], single_s: list[float], grouped_s: list[float], num_rows: int
) -> None:
    spec = model_spec(moe_spec([70 * MIB], num_experts=8, num_used=2))  # one to a part
    row = BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB)
    copies, single, grouped = (
        Curve(tuple(zip((512.0, 2048.0), each, strict=True)))
        for each in (gb_s, single_s, grouped_s)
    )
    model = model_of(copies_of(situation(spec, row), copies, single, grouped))
    times = [
        float(model.prompt_of(np.array([[HERE] * (8 - n) + [HOST] * n]), num_rows)[1].sum())
        for n in range(9)
    ]
    assert all(later >= before * (1 - 1e-9) for before, later in pairwise(times))
    for (rows_, of_gb), (_, alone_s) in zip(copies.points, single.points, strict=True):
        assert model.copies is not None
        gigabytes = np.array([1e9, 2e9])
        assert model.copies.seconds(int(rows_), gigabytes) == pytest.approx([of_gb, 2 * of_gb])
        assert model.copies.single_s(int(rows_)) == pytest.approx(alone_s)


def test_what_runs_together_is_slower() -> None:
    situation_ = at()
    slowed = Together("experts of cpu", "steps of cuda:0", 2.0, 3.0)
    both = model_of(replace(situation_, box=replace(situation_.box, together=(slowed,))))
    alone = model_of(situation_)
    all_host, all_here = rows(HOST, HOST, HOST, HOST), rows(HERE, HERE, HERE, HERE)
    assert (both.step_layers_s(all_host) > 1.5 * alone.step_layers_s(all_host)).all()
    assert both.step_layers_s(all_here) == pytest.approx(alone.step_layers_s(all_here))
    assert both.local_factor == 3.0


def test_an_arena_reads_beside_computing() -> None:
    """Of the parent's processor: at the best depth, less of what follows the text; a prompt's
    experts once for a group of chunks, but for the first layer's while others are computed."""
    disk, owners = Curve(((1.0, 1e9), (8.0, 4e9), (32.0, 2e9))), rows(HERE, HERE, HERE, HERE)
    model = replace(model_of(at()), disk=disk)
    model = replace(model, sides=(replace(model.sides[0], is_cpu=True),))
    size, computed = SPEC.moe.layers[0].expert_bytes, model.price(owners)
    price = replace(model, ram_bytes=6.0 * size).price(owners)
    assert price.disk_bytes == 2 * size
    read_s = 0.7 * 2 * 0.5 * size / 4e9
    beside_s = min(0.6 * read_s, 0.7 * computed.step_s)
    assert price.step_s == pytest.approx(computed.step_s + read_s - beside_s)
    for length in (512, 4096):
        whole_s = computed.prompt_s[length]
        chosen = chosen_by_prompt(model.arrays.prefill, length)[1, 2:].sum()
        read_s = chosen * size / 4e9
        expected_s = max(whole_s, read_s) + read_s / 2
        assert price.prompt_s[length] == pytest.approx(expected_s)
    slow = replace(model, ram_bytes=6.0 * size, disk=Curve(((1.0, 1e5),))).price(owners)
    assert slow.prompt_s[4096] > 1.0 > computed.prompt_s[4096]


def test_experts_without_room_in_memory_are_read_from_the_disk() -> None:
    """As a whole without daemons; steps then have no slots, which nothing is fetched into."""
    beside_daemons = replace(model_of(at()), disk=Curve(((1.0, 1e9),)))
    assert len(beside_daemons.sides) > 2
    model = replace(beside_daemons, sides=beside_daemons.sides[:2])
    owners = rows(HERE, HERE, HOST, HOST)
    in_memory = model.price(owners)
    assert in_memory.disk_bytes == 0
    size = SPEC.moe.layers[0].expert_bytes
    read_s = 2 * 0.5 * size / 1e9
    price = replace(beside_daemons, ram_bytes=2.0 * size).price(owners)
    assert price.disk_bytes == 2 * size
    assert price.step_s == pytest.approx(in_memory.step_s + read_s)
    beside_s = min(0.6 * 0.7 * read_s, 0.7 * in_memory.step_s)
    expected_s = in_memory.step_s + 0.7 * read_s - beside_s
    price = replace(model, ram_bytes=2.0 * size).price(owners)
    assert price.step_s == pytest.approx(expected_s)
    slots = StepSlots(8, 1e9)
    sides = tuple(replace(side, slots=slots) for side in model.sides)
    price = replace(model, ram_bytes=2.0 * size, sides=sides).price(owners)
    assert price.step_s == pytest.approx(expected_s)
    shared = replace(model, ram_bytes=6.0 * size, shares_memory=True).price(owners)
    assert shared.disk_bytes == 2 * size


def test_experts_that_a_layer_does_not_have_take_no_shared_memory() -> None:
    layers = (SPEC.moe.layers[0], replace(SPEC.moe.layers[1], num_experts=2))
    situation_ = situation(
        replace(SPEC, moe=replace(SPEC.moe, layers=layers)),
        BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB),
    )
    size = layers[0].expert_bytes
    model = replace(model_of(situation_), ram_bytes=6.0 * size, shares_memory=True)
    owners = np.array([[HERE, HERE, HOST, HOST], [HERE, HOST, HERE, HERE]])
    assert model.price(owners).disk_bytes == 0  # six experts in all


def test_curves_are_lines_between_points_and_never_fall() -> None:
    curve = Curve(((1.0, 2.0), (3.0, 1.0), (5.0, 4.0)))
    found = along(curve, np.array([0.0, 1.0, 2.0, 3.0, 4.0, 7.0]))
    assert found.tolist() == [2.0, 2.0, 2.0, 2.0, 3.0, 6.0]
    assert along(Curve(((1.0, 5.0),)), np.array([0.0, 9.0])).tolist() == [5.0, 5.0]


def test_rows_between_those_measured_take_times_between_theirs() -> None:
    curves = {1: line(1.0, 1e9), 4: line(4.0, 1e9)}
    one = np.array([0.0])
    assert at_rows(curves, 1, one)[0] == 1.0
    assert at_rows(curves, 2, one)[0] == pytest.approx(2.0)
    assert at_rows(curves, 8, one)[0] == pytest.approx(8.0)
    assert at_rows({}, 8, one)[0] == 0.0


def test_only_rows_with_pairs_cross_a_link() -> None:
    side = Side("host", {}, chunk_link=Curve(((0, 0.0), (4096, 4.096))))
    pairs = np.array([0.0, 41.0, 4096.0, 8 * 4096.0])
    expected = 4.096 * -np.expm1(-pairs / 4096)
    assert side.chunk_s(4096, pairs, np.ones(4)) == pytest.approx(expected, abs=1e-9)


def test_chunks() -> None:
    assert list(chunk_sizes(1000, 512)) == [(512, 1), (488, 1)]
    assert list(chunk_sizes(1024, 512)) == [(512, 2)]
    assert list(chunk_sizes(100, 512)) == [(100, 1)]


def test_a_prompts_chunks_attend_to_those_before_them() -> None:
    per_layer = SPEC.kv_layers[0]
    row_bytes = per_layer.num_heads * (per_layer.key_dim + per_layer.value_dim) * 2
    speed = DeviceSpeed("cuda:0", {}, attention={512: line(0.0, 1e9)})
    trunk = TrunkTimes(speed, [0, 0], SPEC, head_bytes=0, kv_type=KvType.F16)
    of_one_before = SPEC.num_layers * 512 * row_bytes / 1e9
    times = [trunk.prompt_s(num_tokens, 512) for num_tokens in (512, 1024, 2048)]
    assert times == pytest.approx([0.0, of_one_before, (1 + 2 + 3) * of_one_before])


@given(st.floats(0, 1e-9), st.floats(0, 1e-10), st.integers(1, 4096), st.floats(0, 8), st.data())
def test_chunks_of_a_processor_read_each_chosen_expert_once(
    read_s: float, pair_s: float, rows: int, pairs_of_row: float, data: st.DataObject
) -> None:
    moe = moe_spec([3 * MIB], num_experts=64, num_used=8)
    size = float(moe.layers[0].expert_bytes)

    def seconds(pairs: float, distinct: float) -> float:
        return size * (read_s * distinct + pair_s * pairs)

    def measured(num_rows: int) -> Curve:
        pairs = [num_rows * used for used in (2, 4, 8)]
        times = [seconds(each, 64 * -math.expm1(-each / 64)) for each in pairs]
        amounts = [size * each for each in pairs]
        return Curve(((0.0, 0.0), *zip(amounts, times, strict=True)))

    found = ChunkParts.of({1: line(0.0, 1e9), 64: measured(64), 512: measured(512)}, moe)
    assert found is not None
    pairs = rows * pairs_of_row
    distinct = data.draw(st.floats(0, min(64.0, pairs)))
    side = Side("host", {512: measured(512)}, is_cpu=True, chunks=found)
    told = side.chunk_s(rows, np.array([pairs]), np.array([size]), distinct=np.array([distinct]))
    most = seconds(pairs, distinct) * -math.expm1(-pairs)
    assert told == pytest.approx(most, rel=1e-6, abs=1e-12)


def test_a_processors_chunks_without_two_numbers_of_pairs_are_not_told_apart() -> None:
    assert ChunkParts.of({1: line(0.0, 1e9), 512: line(0.0, 1e9)}, SPEC.moe) is None
    assert ChunkParts.of({}, SPEC.moe) is None


def grouped(num_experts: int, missing: int, group: int) -> tuple[CostModel, F64Array]:
    """A model without daemons whose prompts take copies of `missing` experts, on a slow bus."""
    spec = model_spec(moe_spec([3 * MIB] * 2, num_experts=num_experts, num_used=8))
    row = BoxRow(CARD, 8 * GIB, CORES_16, 8 * GIB, bus=25e9)
    at_ = copies_of(
        situation(spec, row),
        Curve(((512.0, 0.1),)),
        Curve(((512.0, 1e-5),)),
        Curve(((512.0, 1e-5),)),
    )
    model = model_of(at_)
    assert model.copies is not None
    model = replace(model, copies=replace(model.copies, group=group))
    owners = np.full((2, num_experts), HERE)
    owners[:, num_experts - missing :] = HOST
    return model, np.asarray(model.prompt_of(owners, 4096)[1])


@pytest.mark.parametrize(("num_experts", "missing"), [(64, 30), (256, 200)])
def test_chunks_of_a_group_take_the_same_copies(num_experts: int, missing: int) -> None:
    """All are copied for each chunk of 512, or once: in one part, and in more than have places."""
    (model, alone), (_, once) = (grouped(num_experts, missing, group) for group in (0, 4096))
    size = float(model.arrays.file_bytes[0])
    copied_s = missing * size * 0.1 / 1e9
    assert (once >= copied_s / 2).all()
    assert (alone - once > 5 * copied_s).all()


def test_a_prompt_of_one_chunk_takes_as_long_in_a_group() -> None:
    model, _ = grouped(64, 30, 4096)
    owners = np.full((2, 64), HERE)
    owners[:, 34:] = HOST
    for length in (64, 512):
        assert model.copies is not None
        alone = replace(model, copies=replace(model.copies, group=0))
        one, other = (each.prompt_of(owners, length)[1] for each in (model, alone))
        np.testing.assert_allclose(one, other)
