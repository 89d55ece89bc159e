"""What is kept of launches belongs to one object and one key, whoever gets the object's memory."""

from __future__ import annotations

import weakref

import pytest

from dflash_runtime.compute.cupy import prepared_launch
from dflash_runtime.compute.cupy.prepared_launch import Kept, PreparedLaunch
from support.emulated_device import EmulatedDevice
from support.emulated_device.device_checks import CASES, SumArgs


class Layer:
    """Equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_what_is_kept_is_of_the_same_object_and_key() -> None:
    kept: Kept[str] = Kept()
    first, second = Layer(), Layer()
    assert kept.get(first, 1) is None
    assert kept.put(first, 1, "one") == "one"
    assert (kept.get(first, 1), kept.get(first, 2), kept.get(second, 1)) == ("one", None, None)
    assert (kept.has(first), kept.has(second)) == (True, False)
    kept.put(first, 2, "two")
    assert (kept.get(first, 1), kept.get(first, 2)) == (None, "two")
    kept.clear()
    assert not kept.has(first)


def test_an_object_that_has_gone_is_not_taken_for_another() -> None:
    kept: Kept[int] = Kept()
    for number in range(100):  # memory of one is given to the next
        layer = Layer()
        assert not kept.has(layer)
        kept.put(layer, None, number)


def test_an_object_may_go() -> None:
    kept: Kept[int] = Kept()
    layer = Layer()
    kept.put(layer, None, 1)
    left = weakref.ref(layer)
    del layer
    assert left() is None


def test_no_more_is_kept_than_a_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_launch, "_MOST_KEPT", 3)
    kept: Kept[int] = Kept()
    layers = [Layer() for _ in range(7)]
    for number, layer in enumerate(layers):
        kept.put(layer, None, number)
        assert sum(map(kept.has, layers)) <= 3
        assert kept.get(layer, None) == number


def test_arguments_are_those_of_the_moment() -> None:
    device, launched = EmulatedDevice(), []

    class Noting(EmulatedDevice):
        def launch(self, kernel, grid, block, args, **options):  # type: ignore[no-untyped-def]
            launched.append((kernel, grid, block, bytes(args), options["shared_bytes"]))

    kernel, args = device.module(CASES, {}).kernel("sum_rows", SumArgs), SumArgs()
    launch = PreparedLaunch(kernel, (1, 2, 3), 64, args, shared_bytes=5)
    noting = Noting()
    launch.start(noting)
    name, _ = SumArgs._fields_[0][:2]
    setattr(args, name, 77)
    launch.start(noting)
    assert launched[0][:3] == launched[1][:3] == (kernel, (1, 2, 3), 64)
    assert launched[0][4] == 5
    assert launched[1][3] == bytes(args) != launched[0][3]
