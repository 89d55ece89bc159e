"""The planner against all assignments of small models: it may lose a few percent, by its own
prediction (options within 3 % of the fastest are equal). The same models each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.device import parse_device
from dflash_runtime.placement.cost import LOCAL
from dflash_runtime.placement.options import ParentOptions
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.planner import plan
from dflash_runtime.placement.situation import Situation
from dflash_runtime.placement.wishes import Wishes
from support.examples import examples
from support.planned_boxes import (
    CARD,
    CORES_2,
    CORES_16,
    GIB,
    H100,
    MIB,
    SMALL_CARD,
    BoxRow,
    DaemonRow,
    model_spec,
    moe_spec,
    situation,
    skewed,
)

CONTEXT, CHUNK = 2048, 512
DEVICE = parse_device("cuda:0")
ASKED = Wishes(device=DEVICE, context=CONTEXT, chunk=CHUNK)


def patterns(num_sides: int, num_experts: int) -> Iterator[tuple[int, ...]]:
    """Every way to give a layer's experts to owners."""
    return product(range(num_sides), repeat=num_experts)


def best_of_all(options: ParentOptions) -> float:
    """The least time of the request over all assignments that fit, the fixed part included."""
    model, arrays = options.model(CHUNK), options.arrays
    num_layers, num_experts = arrays.decode.shape
    costs, sizes = [], []
    for pattern in patterns(len(options.sides), num_experts):
        owners = np.tile(np.array(pattern), (num_layers, 1))
        costs.append(model.layers_s(owners))
        counts = np.bincount(pattern, minlength=len(options.sides))
        sizes.append([count * options.expert_bytes[i] for i, count in enumerate(counts)])
    cost, size = np.array(costs), np.array(sizes)  # [patterns, L], [patterns, sides, L]
    others = range(1, len(options.sides))
    limits = np.array([options.expert_limit(CONTEXT, CHUNK, others)] + [
        options.limit_of(index, CHUNK) for index in others
    ])  # fmt: skip
    total, used = cost[:, 0], size[:, :, 0]
    for layer in range(1, num_layers):
        total = (total[:, None] + cost[None, :, layer]).reshape(-1)
        used = (used[:, None, :] + size[None, :, :, layer]).reshape(total.size, -1)
        fits = (used <= limits).all(axis=1)
        total, used = total[fits], used[fits]
    anywhere = np.full(arrays.decode.shape, LOCAL)
    fixed = options.priced(anywhere, CONTEXT, CHUNK).price.request_s
    fixed -= float(model.layers_s(anywhere).sum())
    return float(total.min()) + fixed


def regret(at: Situation) -> float:
    """How many times longer than necessary the plan's request takes."""
    found = plan(at, ASKED)
    assert isinstance(found, Plan)
    options = ParentOptions(at, at.parents[0], replace(ASKED, kv_type=found.setup.kv_type))
    owners = np.zeros(options.arrays.decode.shape, np.int64)
    index_of = {side.name: index for index, side in enumerate(options.sides)}
    for row, layer_id in enumerate(options.arrays.layer_ids.tolist()):
        names = np.array([index_of[name] for name in found.placement.owner_names])
        owners[row] = names[found.placement.routing[layer_id].owner_index]
    return options.priced(owners, CONTEXT, CHUNK).price.request_s / best_of_all(options)


SPEEDS = (H100, CARD, SMALL_CARD)
CPUS = (CORES_2, CORES_16)


@st.composite
def small_boxes(draw: st.DrawFn, num_daemons: int = 0) -> Situation:
    num_layers = draw(st.integers(2, 3 if num_daemons else 4))
    num_experts = 4 if num_daemons else draw(st.integers(4, 6 if num_layers < 4 else 5))
    sizes = [draw(st.sampled_from((2, 3))) * MIB for _ in range(num_layers)]
    spec = model_spec(moe_spec(sizes, num_experts=num_experts, num_used=2))
    every = spec.moe.expert_bytes_total
    # Ends, scratch, trunk and cache, and a part of the experts.
    free = (400 + 128 + 1 + 24 * num_layers) * MIB + int(draw(st.floats(0.0, 1.1)) * every)
    daemons = tuple(
        DaemonRow(
            f"cuda:{1 + each}",
            f"cuda:{1 + each}",
            draw(st.sampled_from(SPEEDS)),
            128 * MIB + int(draw(st.floats(0.2, 1.0)) * every),
            link_s=draw(st.sampled_from((5e-6, 50e-6, 200e-6))),
            by_device=draw(st.booleans()),
        )
        for each in range(num_daemons)
    )
    row = BoxRow(
        draw(st.sampled_from(SPEEDS)),
        free,
        draw(st.sampled_from(CPUS)),
        8 * GIB,
        stop_s=draw(st.sampled_from((5e-6, 60e-6, 200e-6))),
        bus=draw(st.sampled_from((2e9, 25e9))),
        daemons=daemons,
    )
    shares = skewed(
        spec.moe, exponent=draw(st.sampled_from((0.0, 0.7, 1.5))), seed=draw(st.integers(0, 99))
    )
    return situation(spec, row, shares=shares, chunks=(CHUNK,), trunk=20 * MIB, ends=400 * MIB)


@hypothesis.settings(examples(60), derandomize=True)
@given(small_boxes())
def test_a_device_and_a_processor(at: Situation) -> None:
    assert regret(at) <= 1.05


@pytest.mark.parametrize("num_daemons", [1])
@hypothesis.settings(examples(30), derandomize=True)
@given(st.data())
def test_a_device_a_processor_and_daemons(num_daemons: int, data: st.DataObject) -> None:
    assert regret(data.draw(small_boxes(num_daemons))) <= 1.05
