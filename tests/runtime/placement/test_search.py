"""Numbers of local experts, against all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.placement.search import Shape, SplitProblem, solve, topped_up
from support.examples import examples


def is_allowed(shape: Shape, n: int, num_experts: int) -> bool:
    if shape is Shape.WHOLE:
        return n in (0, num_experts)
    return shape is Shape.ANY or n < num_experts


@st.composite
def problems(draw: st.DrawFn) -> SplitProblem:
    num_layers, most = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_experts = np.array([draw(st.integers(1, most)) for _ in range(num_layers)])
    times = np.full((most + 1, num_layers), np.inf)
    for layer, count in enumerate(num_experts):
        steps = sorted((draw(st.floats(0.0, 1.0)) for _ in range(count + 1)), reverse=True)
        times[: count + 1, layer] = steps
        times[count, layer] *= draw(st.sampled_from((1.0, 0.3)))
    here = np.array([float(draw(st.integers(1, 3))) for _ in range(num_layers)])
    total = float((here * num_experts).sum())
    limit = draw(st.floats(0.0, 1.1)) * total
    there = draw(st.sampled_from((np.inf, total)))
    return SplitProblem(times, num_experts, here, here, limit, there)


@examples(120)
@given(problems(), st.sampled_from(list(Shape)))
def test_it_is_close_to_the_optimum(problem: SplitProblem, shape: Shape) -> None:
    ranges = [
        [n for n in range(e + 1) if is_allowed(shape, n, e)] for e in problem.num_experts.tolist()
    ]
    possible = [np.array(n) for n in product(*ranges) if problem.is_possible(np.array(n))]
    found = solve(problem, shape)
    if not possible:
        assert found is None
        return
    assert found is not None
    assert problem.is_possible(found)
    assert all(n in allowed for n, allowed in zip(found.tolist(), ranges, strict=True))
    best = min(problem.seconds(each) for each in possible)
    worst = max(problem.seconds(each) for each in possible)
    # The times of these layers have no structure; those of models are met far closer. What one
    # layer saves may be lost, where it needs the room of several others.
    most = np.where(np.isfinite(problem.times), problem.times, 0.0).max(axis=0)
    one_layer = float((most - problem.times.min(axis=0)).max())
    assert problem.seconds(found) <= best + max(0.25 * (worst - best), one_layer) + 1e-12


def test_what_others_have_no_room_for_stays() -> None:
    times = np.array([[0.0], [1.0], [2.0]])
    problem = SplitProblem(times, np.array([2]), np.ones(1), np.ones(1), 2.0, 1.0)
    found = solve(problem)
    assert found is not None
    assert found.tolist() == [1]


def test_nothing_is_found_where_nothing_fits() -> None:
    times = np.array([[1.0], [0.0]])
    assert (
        solve(SplitProblem(times, np.ones(1, np.int64), np.ones(1), np.ones(1), 0.5, 0.5)) is None
    )


@pytest.mark.parametrize("num_layers", [48])
def test_large_models_leave_little_memory_unused(num_layers: int) -> None:
    n = np.arange(129)[:, None]
    times = np.tile(1.0 - (n / 128) ** 0.5, (1, num_layers))
    limit = 0.4 * 128 * num_layers
    problem = SplitProblem(
        times, np.full(num_layers, 128), np.ones(num_layers), np.ones(num_layers), limit, np.inf
    )
    found = solve(problem)
    assert found is not None
    assert found.sum() >= 0.99 * limit


@examples(60)
@given(problems(), st.sampled_from((Shape.PART, Shape.ANY)), st.floats(0.0, 8.0), st.data())
def test_what_rounding_leaves_free_is_filled(
    problem: SplitProblem, shape: Shape, room: float, data: st.DataObject
) -> None:
    """Nothing more fits that would save time."""
    sizes = [
        data.draw(st.lists(st.integers(0, 3), min_size=5, max_size=5)) for _ in problem.here_bytes
    ]
    first = np.zeros_like(problem.num_experts)
    found = topped_up(
        problem, shape, first, room=room, more_bytes=lambda row, n: float(sizes[row][n])
    )
    numbers = enumerate(found.tolist())
    left = room - sum(sum(sizes[row][:number]) for row, number in numbers)
    assert left >= 0.0
    for row, number in enumerate(found.tolist()):
        is_last = number == problem.num_experts[row] - (shape is Shape.PART)
        assert (
            is_last
            or sizes[row][number] > left
            or problem.times[number + 1, row] >= problem.times[number, row]
        )
