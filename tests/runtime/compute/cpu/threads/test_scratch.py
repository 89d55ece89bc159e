"""Scratch memory of calls."""

from __future__ import annotations

from dflash_runtime.compute.cpu.threads.scratch import Scratch

LINE = 64


def test_parts_start_on_lines_and_do_not_overlap() -> None:
    sizes = [1, 0, LINE, LINE + 1]
    _, (*parts, counter) = Scratch().take(sizes)
    assert all(place % LINE == 0 for place in (*parts, counter))
    ends = [counter + 8, *(part + size for part, size in zip(parts, sizes, strict=True))]
    assert all(end <= place for end, place in zip(ends, parts, strict=False))


def test_calls_at_once_have_memory_of_their_own() -> None:
    scratch = Scratch()
    (first, [a, _]), (second, [b, _]) = scratch.take([1000]), scratch.take([1000])
    assert abs(a - b) >= 1000
    for buffer in (first, second):
        scratch.give_back(buffer)
    again = {scratch.take([1000])[1][0], scratch.take([1000])[1][0]}
    assert again == {a, b}


def test_a_buffer_grows_when_a_call_needs_more() -> None:
    scratch = Scratch()
    small, _ = scratch.take([10])
    scratch.give_back(small)
    large, _ = scratch.take([1 << 20])
    assert large.num_bytes >= 1 << 20
    scratch.give_back(large)
    assert scratch.take([10])[0] is large
