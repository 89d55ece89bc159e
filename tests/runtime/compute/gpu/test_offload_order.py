"""In which order parts of layers are copied and computed, whatever tokens choose.

Device, copies and products are stubs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.experts import offload
from dflash_runtime.compute.gpu.experts.offload import ExpertOffload, OffloadedChunk

NUM_EXPERTS = 6


@dataclass
class Runs:
    """Of one part. Implements file_copier.FileRuns."""

    layer_id: int
    experts: list[int]

    def chosen(self, mask: Any) -> tuple[int, list[int]]:
        return self.layer_id, [
            each for each, is_chosen in zip(self.experts, mask, strict=True) if is_chosen
        ]


@dataclass
class Rig:
    """An ExpertOffload whose copies arrive when they are awaited; what is computed is noted."""

    parts_of: list[list[list[int]]]
    """By layer, the experts of each part."""
    num_places: int
    fail_at: int = 0
    """The wait that fails."""
    computed: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    """By layer, expert and chunk."""
    counted: list[tuple[int, str]] = field(default_factory=list)
    """By layer and chunk."""
    arrived: set[tuple[int, int]] = field(default_factory=set)
    num_waits: int = 0

    def __post_init__(self) -> None:
        made = self.offload = ExpertOffload.__new__(ExpertOffload)
        stubs: Any = made
        device = SimpleNamespace(mark=lambda: None, zeros=lambda *_: "zeros")
        experts = SimpleNamespace(local_sums=self.compute)
        stubs._ops = SimpleNamespace(chunk_experts=experts, device=device)
        stubs._file = SimpleNamespace(require_unwritten=lambda: None)
        stubs._copier = SimpleNamespace(begin=self.copy, close=lambda: None)
        nothing: Any = None
        stubs._places = [offload._Place(nothing) for _ in range(self.num_places)]
        stubs._group, stubs._layers, stubs._unsettled, number = None, {}, None, 0
        stubs._copied_next, stubs._laid_out_of = deque(), None
        for layer_id, parts in enumerate(self.parts_of):
            missing = mask_of([each for part in parts for each in part])
            places = tuple(
                stubs._places[(number + index) % self.num_places] for index in range(len(parts))
            )
            number += len(parts)
            known = stubs._layers[layer_id] = offload._Layer(nothing, missing, places)
            known.parts = tuple(
                self.part(layer_id, experts, place)
                for experts, place in zip(parts, places, strict=True)
            )
        stubs._following = dict(pairwise(stubs._layers))

    def part(self, layer_id: int, experts: list[int], place: Any) -> Any:
        def only(_: object, wanted: Any) -> tuple[Any, list[tuple[int, int]]]:
            return place, [(layer_id, each) for each in experts if wanted[each]]

        weights: Any = (object(),)
        resident, runs = SimpleNamespace(only=only), Runs(layer_id, experts)
        stubs: Any = {"layer": None, "resident": resident, "runs": runs}
        return offload._Part(
            experts=mask_of(experts), place=place, native=weights, weights=weights, **stubs
        )

    def copy(self, runs: tuple[int, list[int]], *, after: object, into: list[Any]) -> None:
        layer_id, experts = runs
        assert experts

        def wait() -> None:
            self.num_waits += 1
            if self.num_waits == self.fail_at:
                raise DeviceUnavailable("cuda:0: the GPU has fallen off the bus")
            self.arrived.update((layer_id, each) for each in experts)

        into.append(SimpleNamespace(wait=wait, cancel=lambda: None))

    def compute(self, resident: Any, routed: Any, before: Any, *, mean_rows: float) -> str:
        place, experts = resident
        assert mean_rows > 0.0
        for layer_id, expert in experts:
            if routed.counts[expert]:
                assert place.part.runs.layer_id == layer_id
                assert place.loaded[expert]
                assert (layer_id, expert) in self.arrived
            self.computed[layer_id, expert, routed.name] += 1
        return "sums"


def mask_of(experts: list[int]) -> Any:
    mask = np.zeros(NUM_EXPERTS, np.bool_)
    mask[experts] = True
    return mask


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    parts_of = []
    for _ in range(draw(st.integers(1, 3))):
        missing = draw(st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, unique=True))
        size = draw(st.integers(1, 3))
        parts_of.append([sorted(missing)[at : at + size] for at in range(0, len(missing), size)])
    return Rig(parts_of, draw(st.integers(1, 3)), fail_at=draw(st.integers(0, 12)))


COUNTS = st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
WANTED = st.lists(st.booleans(), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)


class Remote:
    """Wants all."""

    def to_offload(self, layer_id: int, num_tokens: int) -> Any:
        return np.ones(NUM_EXPERTS, np.bool_)


def chunk_of(name: str, counts: list[int], wanted: Any, note: Callable[[], None]) -> OffloadedChunk:
    ids = np.zeros((max(1, sum(counts)), 1), np.int32)
    routed: Any = SimpleNamespace(
        name=name,
        counts=counts,
        choice=SimpleNamespace(ids=ids),
        x=SimpleNamespace(rows=SimpleNamespace(array=ids)),
    )
    pending: Any = SimpleNamespace(counts=lambda: np.array(counts), num_tokens=len(ids))
    return OffloadedChunk(routed, pending, wanted, note=note)


@given(rig=rigs(), data=st.data())
def test_what_was_chosen_is_there_and_computed_once(rig: Rig, data: st.DataObject) -> None:
    """With any number of places, groups that are given up before or while they are computed, and
    chunks that want some of the experts."""
    remote: Any = Remote()
    for number in range(data.draw(st.integers(1, 4))):
        num_chunks = data.draw(st.integers(1, 3))
        for layer_id, known in rig.offload._layers.items():
            chunks, names = [], [f"{number}, {each}" for each in range(num_chunks)]
            for name in names:
                wanted = known.missing & np.array(data.draw(WANTED))
                if not wanted.any():
                    wanted = known.missing
                counts = data.draw(COUNTS)
                note = lambda each=(layer_id, name): rig.counted.append(each)  # noqa: E731
                chunks.append(chunk_of(name, counts, wanted, note))
                rig.offload.add(layer_id, chunks[-1])
            if data.draw(st.integers(0, 9)) == 0:
                rig.offload.abandon()
                with pytest.raises(RuntimeError, match="given up"):
                    rig.offload.sums_of(chunks[0], remote)
                break
            try:
                for chunk in chunks:
                    rig.offload.sums_of(chunk, remote)
            except DeviceUnavailable:
                rig.offload.abandon()
                break
            for name, chunk in zip(names, chunks, strict=True):
                for expert in np.flatnonzero(known.missing):
                    num = rig.computed[layer_id, int(expert), name]
                    assert num <= 1
                    if chunk.wanted[expert] and chunk.pending.counts()[expert]:
                        assert num == 1
        else:
            of_pass = [each for each in rig.counted if each[1].startswith(f"{number}, ")]
            assert len(set(of_pass)) == len(of_pass) == num_chunks * len(rig.offload._layers)


def test_what_a_failed_pass_chose_is_not_noted_after_experts_have_moved() -> None:
    """A note counts with the placement that its experts had."""
    rig, remote = Rig([[[0, 1]], [[2, 3]]], num_places=2), Remote()

    def computed(name: str) -> None:
        note = partial(rig.counted.append, (0, name))
        chunk = chunk_of(name, [1] * NUM_EXPERTS, mask_of([0, 1]), note)
        rig.offload.add(0, chunk)
        rig.offload.sums_of(chunk, cast(Any, remote))

    computed("failed")  # its pass ends before the next layer
    rig.offload.follow({0: mask_of([0, 4]), 1: mask_of([2, 3])})
    known = rig.offload._layers[0]
    known.parts = (rig.part(0, [0, 4], known.places[0]),)
    computed("next")
    rig.offload._settle()
    assert rig.counted == [(0, "next")]


def test_a_place_whose_copies_cannot_be_cancelled_has_nothing() -> None:
    def fails() -> None:
        raise DeviceUnavailable("copies have not ended")

    rig = Rig([[[0, 1]]], num_places=1)
    place = rig.offload._places[0]
    [part] = rig.offload._layers[0].parts
    place.take(part)
    stubs: Any = SimpleNamespace(cancel=fails)
    place.transfers.append(stubs)
    for _ in range(2):  # it is tried again
        with pytest.raises(DeviceUnavailable):
            place.clear()
        assert place.part is None
    place.transfers[:] = [cast(Any, SimpleNamespace(cancel=lambda: None))]
    place.take(part)
    assert not place.loaded.any()
