"""Capture in pieces: launches before a pause are run before what the pause is for, and whatever
goes wrong leaves no thread behind."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.row_kernels import AddRows
from dflash_runtime.compute.gpu.run.captured_pieces import Pause, capture_pieces
from support.emulated_device import EmulatedDevice
from support.interrupts import interrupt_main_thread


def test_pieces_and_what_the_host_does_between_them_are_in_order() -> None:
    device = EmulatedDevice()
    add = AddRows(device)
    x, y = (device.upload(np.full((1, 4), value, np.float32)) for value in (1.0, 10.0))
    seen: list[float] = []

    def look() -> None:
        seen.append(float(device.download(x)[0, 0]))

    def look_and_change() -> None:
        look()
        device.write(y, np.full((1, 4), 100.0, np.float32))

    def launch_all(pause: Pause) -> None:
        launch(x, x)
        pause(look)
        launch(x, y)
        pause(look_and_change)
        launch(x, y)

    def launch(first: DeviceArray, second: DeviceArray) -> None:
        add.launch(first, second, x)

    pieces = capture_pieces(device, launch_all)
    look()
    assert seen == [1.0]  # nothing has run yet
    for _ in range(2):
        for piece in pieces:
            piece.graph.replay()
            if piece.host_work is not None:
                piece.host_work()
    assert seen[1:] == [2.0, 12.0, 224.0, 324.0]
    assert device.download(x)[0, 0] == 424.0
    assert [piece.host_work for piece in pieces] == [look, look_and_change, None]


def test_an_interrupt_waits_for_the_end_of_a_piece() -> None:
    """It comes to the main thread; what the other one launches must not run meanwhile."""
    device = EmulatedDevice()
    add, x = AddRows(device), device.upload(np.ones((1, 4), np.float32))

    def launch_all(pause: Pause) -> None:
        interrupt_main_thread()
        time.sleep(0.05)
        add.launch(x, x, x)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            capture_pieces(device, launch_all)
        np.testing.assert_array_equal(device.download(x), 1.0)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("num_pauses", [0, 1])
def test_what_fails_leaves_nothing_behind(num_pauses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    device = EmulatedDevice()

    def launch_all(pause: Pause) -> None:
        for _ in range(num_pauses):
            pause(lambda: None)
        raise KeyError("a layer")

    with pytest.raises(KeyError, match="a layer"):
        capture_pieces(device, launch_all)
    assert set(threading.enumerate()) <= before

    def no_graphs(launch_all: object) -> None:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(device, "capture", no_graphs)
    with pytest.raises(RuntimeError, match="no graphs"):
        capture_pieces(device, lambda pause: None)
    assert set(threading.enumerate()) <= before
