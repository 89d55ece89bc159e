"""How threads share the panels of a phase: many at a time, and few near the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.compute.cpu.kernels import products


def of(helper: Any, *arguments: Any) -> Any:
    """What a helper of kernels returns."""
    return helper.py_func(*arguments)


def claims(num_panels: int, size: int, num_threads: int) -> list[range]:
    """The panels of each claim that has any."""
    shares = of(products.shares_of, num_panels, size, num_threads)
    taken: list[range] = []
    while (panels := range(*of(products.panels_of, len(taken), shares))).start < num_panels:
        taken.append(panels)
    # Other threads find nothing either, however often they ask.
    for index in range(len(taken), len(taken) + 2 * num_threads):
        assert of(products.panels_of, index, shares)[0] >= num_panels
    return taken


SIZES = st.integers(0, 6).map(lambda power: 1 << power)


@given(st.integers(0, 5000), SIZES, st.integers(1, 300))
def test_every_panel_is_taken_once(num_panels: int, size: int, num_threads: int) -> None:
    taken = claims(num_panels, size, num_threads)
    assert [panel for panels in taken for panel in panels] == list(range(num_panels))


@given(st.integers(0, 5000), SIZES, st.integers(1, 300))
def test_claims_never_grow(num_panels: int, size: int, num_threads: int) -> None:
    sizes = [len(panels) for panels in claims(num_panels, size, num_threads)]
    assert max(sizes, default=1) <= size
    assert sorted(sizes, reverse=True) == sizes


@given(st.integers(1, 5000), SIZES, st.sampled_from([1, 2]))
def test_two_threads_take_as_much_as_they_can(num_panels: int, size: int, num_threads: int) -> None:
    assert len(claims(num_panels, size, num_threads)) == -(-num_panels // size)


@pytest.mark.parametrize(("num_panels", "size"), [(128, 2), (384, 2), (9496, 16)])
def test_the_last_claims_of_many_threads_are_one_panel(num_panels: int, size: int) -> None:
    sizes = [len(panels) for panels in claims(num_panels, size, 16)]
    assert sizes[0] == size
    assert sizes[-2 * 16 :] == [1] * 2 * 16


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_panels_ahead_follow_in_the_order_of_reading(
    num_claimed: int, num_following: int, gap: int
) -> None:
    """Of a claim that begins at panel 3, and another one behind a gap that other threads took."""
    first, end = 3, 3 + num_claimed
    following = end + gap
    order = [*range(first, end), *range(following, following + num_following)]
    for place, panel in enumerate(order[:num_claimed]):
        near, far = of(products.panels_ahead, panel, end, following, following + num_following)
        known = [*order[place + 1 : place + 3]]
        if len(known) == 2:
            assert [near, far] == known
        else:
            assert {near, far} <= {*known, panel}
            assert [near] == known or not known


@pytest.mark.wide(2)
@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize("panel_bytes", [1 << 12, 1 << 15, 1 << 18])
@pytest.mark.parametrize("num_panels", [1, 61, 62, 128, 9496])
def test_threads_take_neighbouring_runs_where_there_are_many(
    num_panels: int, panel_bytes: int, num_threads: int
) -> None:
    size = of(products.panels_a_claim, num_panels, 2, panel_bytes, num_threads, 1)
    assert size == 2 or num_panels >= 16 * size * num_threads
    assert size == 2 or size * panel_bytes < 1 << 19
    assert num_panels < 32 * size * num_threads or size * panel_bytes >= 1 << 18
    assert of(products.panels_a_claim, num_panels, 2, panel_bytes, num_threads, 512) == 2
