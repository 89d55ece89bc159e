"""Capture in pieces: launches before a pause are run before what the pause is for, and whatever
goes wrong leaves the pass closed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from dflash_runtime.compute.gpu.device.device import DeviceArray, Graph
from dflash_runtime.compute.gpu.launch.row_kernels import Elementwise
from dflash_runtime.compute.gpu.run.step_path import capture_pieces
from dflash_runtime.compute.model import Pausable
from support.emulated_device import EmulatedDevice
from support.interrupts import interrupt_main_thread


def test_pieces_and_what_the_host_does_between_them_are_in_order() -> None:
    device = EmulatedDevice()
    add = Elementwise(device).add_rows
    x, y = (device.upload(np.full((1, 4), value, np.float32)) for value in (1.0, 10.0))
    seen: list[float] = []

    def look() -> None:
        seen.append(float(device.download(x)[0, 0]))

    def look_and_change() -> None:
        look()
        device.write(y, np.full((1, 4), 100.0, np.float32))

    def launches() -> Pausable[str]:
        launch(x, x)
        yield look
        launch(x, y)
        yield None  # nothing for the host to do: no piece ends here
        yield look_and_change
        launch(x, y)
        return "logits"

    def launch(first: DeviceArray, second: DeviceArray) -> None:
        add(first, second, x)

    pieces, result = capture_pieces(device, launches())
    assert result == "logits"
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


def test_an_interrupt_ends_the_capture_and_the_pass() -> None:
    device = EmulatedDevice()
    add, x = Elementwise(device).add_rows, device.upload(np.ones((1, 4), np.float32))
    ended: list[str] = []

    def launches() -> Pausable[None]:
        try:
            yield lambda: None
            interrupt_main_thread()
            time.sleep(0.05)
            add(x, x, x)
        finally:
            ended.append("pass")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            capture_pieces(device, launches())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["pass"]
    add(x, x, x)
    np.testing.assert_array_equal(device.download(x), 2.0)


@pytest.mark.parametrize("num_pauses", [0, 1])
def test_what_fails_leaves_nothing_behind(num_pauses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice()
    ended: list[str] = []

    def launches(error: Exception | None) -> Pausable[None]:
        try:
            for _ in range(num_pauses):
                yield lambda: None
            if error is not None:
                raise error
        finally:
            ended.append("pass")

    with pytest.raises(KeyError, match="a layer"):
        capture_pieces(device, launches(KeyError("a layer")))
    assert ended == ["pass"]

    captured: list[Graph] = []
    capture = device.capture

    def one_graph(launch: Callable[[], None]) -> Graph:
        if len(captured) == num_pauses:
            raise RuntimeError("no graphs here")
        captured.append(capture(launch))
        return captured[-1]

    monkeypatch.setattr(device, "capture", one_graph)
    with pytest.raises(RuntimeError, match="no graphs"):
        capture_pieces(device, launches(None))
    assert len(ended) == 1 + num_pauses  # a pass that has not begun has nothing to end
